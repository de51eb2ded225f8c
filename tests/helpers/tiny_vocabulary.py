"""A GGUF file with a byte-level vocabulary and just enough of a model for llama.cpp to load that."""
import gguf

from ggjit.models.text.tokenizer import BYTE_OF_CHAR

CHAR_OF_BYTE = {byte: c for c, byte in BYTE_OF_CHAR.items()}


def write(path, special=(), words=(), **keys):
    """Ids 0 to 255 are the bytes, then come `special` (the first is bos, the second eos) and `words`, as bytes; keys:
    further metadata below "tokenizer."."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(64)
    w.add_embedding_length(8)
    w.add_block_count(1)
    w.add_feed_forward_length(8)
    w.add_head_count(1)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("default")
    words = ["".join(CHAR_OF_BYTE[b] for b in word) for word in words]
    w.add_token_list([CHAR_OF_BYTE[b] for b in range(256)] + [*special] + words)
    w.add_token_types([1] * 256 + [3] * len(special) + [1] * len(words))
    w.add_token_merges(["q z"])
    w.add_bos_token_id(256)
    w.add_eos_token_id(257)
    for key, value in keys.items():
        {str: w.add_string, bool: w.add_bool, list: w.add_array}[type(value)]("tokenizer." + key, value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
