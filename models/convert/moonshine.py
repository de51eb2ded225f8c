"""Moonshine's folders of Hugging Face as GGUF files, under the names of networks/sounds/speech_network.py."""
import numpy as np

from ggjit.models.convert.common_metadata import collected
from ggjit.models.convert.vocabulary import add_vocabulary
from ggjit.models.convert.whisper import HF_NAMES, entry
from ggjit.models.files.load_tensors import mapped_numbers
from ggjit.ops.core.errors import ModelError
from ggjit.ops.core.types import BF16, F16, F32

NAMES = (("encoder.layer_norm.", "encoder.ln_post."), ("decoder.norm.", "decoder.ln."), ("groupnorm", "group_norm"),
         ("input_layernorm", "attn_ln"), ("final_layernorm", "mlp_ln"), (".o_proj.", ".out."), (".mlp.fc", ".fc"))
# the norm behind a layer's first attention: of the feed forward, or of cross attention
SECOND_NORM = {"encoder": "mlp_ln", "decoder": "cross_attn_ln"}
# values of config.json that the network knows
KNOWN = {"encoder_hidden_act": "gelu", "decoder_hidden_act": "silu", "attention_bias": False,
         "tie_word_embeddings": True}


def from_hf(gguf, folder, config, sources, kind):
    """(metadata, [Entry]) of a folder whose config.json says "moonshine".  sources: {name: leaf}."""
    for key, only in KNOWN.items():
        if config.get(key, default=only) != only:
            raise ModelError(f"{config.path}: {key} {config[key]!r}, Moonshine has {only}")
    heads = {config.get(f"{side}_num_{what}", default=config["encoder_num_attention_heads"])
             for side in ("encoder", "decoder") for what in ("attention_heads", "key_value_heads")}
    if len(heads) > 1:
        raise ModelError(f"{config.path}: encoder and decoder have different numbers of heads, {sorted(heads)}")
    tensors = dict(_renamed(name, mapped_numbers(leaf)) for name, leaf in sources.items()
                   if name != "proj_out.weight")         # the embedding again
    return _metadata(gguf, folder, config, kind, heads.pop()), [entry(folder, name, x, kind)
                                                                for name, x in tensors.items()]


def _renamed(name, x):
    new = name.removeprefix("model.")
    side = new.partition(".")[0]
    new = new.replace("post_attention_layernorm", SECOND_NORM.get(side, ""))
    for old, ours in (*NAMES, *HF_NAMES):
        new = new.replace(old, ours)
    if side == "decoder" and ".mlp.0." in new:          # up, then the gate
        up, gate = np.split(x, 2)
        x = np.concatenate([gate, up])
    return new, x


def _metadata(gguf, folder, config, kind, n_head):
    w = gguf.GGUFWriter(None, "moonshine")
    d, rope = config["hidden_size"] // n_head, config.rope()
    w.add_type("model")
    w.add_name(folder.resolve().name)
    w.add_file_type({F32: 0, F16: 1, BF16: 32}.get(kind, 7))
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_block_count(config["encoder_num_hidden_layers"])
    w.add_decoder_block_count(config["decoder_num_hidden_layers"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(n_head)
    w.add_context_length(config["max_position_embeddings"])
    w.add_vocab_size(config["vocab_size"])
    w.add_rope_dimension_count(int(d * rope.get("partial_rotary_factor", 0.9)) // 2 * 2)
    w.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    add_vocabulary(w, gguf, folder, config)
    return collected(w)
