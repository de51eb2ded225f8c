"""llama.cpp's own tokenizer, for comparison; runs as a process of its own so that no two ggml libraries meet.

    python tokenizer_oracle.py TOOLS < jobs.json > answers.json

TOOLS is the folder that holds peer_llamacpp.py.  In: [{path, texts, add_special, parse_special}].  Out, per job: `ids`
of each text, `back`, the text of those ids (hex), `pieces` (hex) of every token.  Only the file's vocabulary is loaded.
"""
import ctypes as C
import json
import os
import sys


def main(tools):
    sys.path.insert(0, tools)
    from peer_llamacpp import LlamaLib
    peer = LlamaLib()                       # owns the log callback, so it has to live as long as the library is used
    lib = peer.L
    lib.llama_detokenize.argtypes = (C.c_void_p, C.c_void_p, C.c_int, C.c_char_p, C.c_int, C.c_bool, C.c_bool)
    lib.llama_token_to_piece.argtypes = (C.c_void_p, C.c_int, C.c_char_p, C.c_int, C.c_int, C.c_bool)
    json.dump([answer(peer, **job) for job in json.load(sys.stdin)], sys.stdout)


def answer(peer, path, texts, add_special, parse_special):
    lib = peer.L
    params = lib.llama_model_default_params()
    assert bytes(params.b[72:76]) == b"\0\0\1\0", "llama_model_params moved"
    params.b[72] = 1                                        # vocab_only
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    assert model, f"{path}: {peer.log[-500:]}"
    vocab = lib.llama_model_get_vocab(model)
    ids = [tokenize(lib, vocab, text.encode(), add_special, parse_special) for text in texts]
    pieces = [piece(lib, vocab, i) for i in range(lib.llama_vocab_n_tokens(vocab))]
    back = [detokenize(lib, vocab, one) for one in ids]
    lib.llama_model_free(model)
    return dict(ids=ids, pieces=pieces, back=back)


def tokenize(lib, vocab, raw, add_special, parse_special):
    out = (C.c_int32 * (len(raw) * 4 + 16))()
    n = lib.llama_tokenize(vocab, raw, len(raw), out, len(out), add_special, parse_special)
    assert n >= 0
    return list(out[:n])


def detokenize(lib, vocab, ids):
    """With control tokens, hex."""
    given, n = (C.c_int32 * len(ids))(*ids), -64 * len(ids) - 64
    while n < 0:                                            # the size it needs
        out = C.create_string_buffer(-n)
        n = lib.llama_detokenize(vocab, given, len(ids), out, len(out), False, True)
    return out.raw[:n].hex()


def piece(lib, vocab, id):
    out = C.create_string_buffer(1 << 16)
    n = lib.llama_token_to_piece(vocab, id, out, len(out), 0, False)
    assert n >= 0
    return out.raw[:n].hex()


if __name__ == "__main__":
    main(sys.argv[1])
