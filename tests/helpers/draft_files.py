"""Small random-weight draft models for a small target, and what llama.cpp guesses with them.

    python -m helpers.draft_files TOOLS NAME FOLDER         writes target.gguf, draft.gguf, and drafts.npz: ids,
                                                            `found`, the guesses after each beginning of them,
                                                            `margins`, by how much each was likelier than the next

A process of its own, so that no two ggml libraries meet.  Its steps are those of llama.cpp's common/speculative.cpp.
"""
import ctypes as C
import os
import sys

import gguf
import numpy as np

from helpers import arch_files
from helpers.gguf_files import written

N, D, V = 5, 64, 96                     # guesses; numbers of a token, and tokens, of the targets
IDS, FIRST = 24, 12                     # tokens of the text; the shortest beginning
OUTPUT = {"output.weight": (V, D)}
EMBD = {"token_embd.weight": (V, D), **OUTPUT}
MARKOV = {"markov_w1.weight": (V, 16), "markov_w2.weight": (V, 16)}
POSTS = ("post_attention_norm", "post_ffw_norm", "layer_output_scale")


def _attention(p, d, n_in=None, **left_out):
    return {f"{p}{n}.weight": ne for n, ne in {
        "attn_norm": (d,), "attn_q": (128, n_in or d), "attn_k": (64, n_in or d), "attn_v": (64, n_in or d),
        "attn_output": (d, 128), "ffn_norm": (d,), "ffn_gate": (96, d), "ffn_up": (96, d), "ffn_down": (d, 96)}.items()
        if n not in left_out}


def _eagle(more=(), d=D, target="llama", **settings):
    tensors = {"fc.weight": (d, 3 * D), "output_norm.weight": (d,), "blk.0.attn_norm_2.weight": (d,),
               **_attention("blk.0.", d, 2 * d), **dict(more)}
    if "norm_before_fc" in settings:
        tensors["enc.output_norm.weight"] = 3 * D,
    return target, "eagle3", tensors, {
        "target_layers": [1, 2, 3], "target_hidden_size": D, "embedding_length": d, "block_count": 1, **settings}


def _dflash(more=(), posts=(), left_out=(), sinks=False, **settings):
    tensors = {"fc.weight": (D, 2 * D), "enc.output_norm.weight": (D,), "output_norm.weight": (D,)}
    for i in range(2):
        tensors |= _attention(f"blk.{i}.", D, **dict.fromkeys(left_out))
        tensors |= {f"blk.{i}.attn_{n}_norm.weight": (32,) for n in "qk"}
        tensors |= {f"blk.{i}.{n}.weight": (1 if "scale" in n else D,) for n in posts}
        tensors |= {f"blk.{i}.attn_sinks.weight": (4,)} if sinks else {}
    return "qwen3", "dflash", tensors | dict(more), {
        "target_layers": [1, 3], "embedding_length": D, "block_count": 2, "block_size": N + 1,
        "tokenizer.ggml.mask_token_id": V - 1, **settings}


def _assistant(target):
    d, tensors = 48, {"token_embd.weight": (V, 48), "output_norm.weight": (48,), "rope_freqs.weight": (32,),
                      "nextn.pre_projection.weight": (48, 2 * D), "nextn.post_projection.weight": (D, 48)}
    for i, near in enumerate((True, True, False)):
        d_head = 32 if near else 64
        tensors |= {f"blk.{i}.{n}.weight": ne for n, ne in {
            "attn_norm": (d,), "attn_q": (4 * d_head, d), "attn_output": (d, 4 * d_head), "attn_q_norm": (d_head,),
            "post_attention_norm": (d,), "layer_output_scale": (1,), "ffn_norm": (d,), "ffn_gate": (96, d),
            "ffn_up": (96, d), "ffn_down": (d, 96), "post_ffw_norm": (d,)}.items()}
    return target, "gemma4-assistant", tensors, {
        "embedding_length": d, "embedding_length_out": D, "block_count": 3, "nextn_predict_layers": 3,
        "attention.sliding_window": 16, "attention.sliding_window_pattern": [True, True, False],
        "attention.key_length": 64, "attention.value_length": 64, "attention.key_length_swa": 32,
        "attention.value_length_swa": 32, "rope.freq_base_swa": 500.0, "rope.dimension_count": 64,
        "rope.dimension_count_swa": 32, "attention.head_count_kv": [2, 2, 1],
        "attention.shared_kv_layers": 3}


def _dflash2():
    conv = {f"blk.{i}.{piece}_conv_{part}": ne for i in range(2) for piece in ("attn", "ffn") for part, ne in (
        ("base", (2, 3, D)), ("proj.weight", (2 * 3 * 4, D)))}
    return _dflash({**conv, "selector_hidden.weight": (16, D), "selector_predecessor.weight": (V, 16),
                    "selector_successor.weight": (V, 16)}, conv_kernel_size=3, conv_group_size=16, selector_rank=16,
                   selector_top_k=5, logit_scale=0.7, final_logit_softcapping=4.0)


D2T = {"d2t": (40,), "output.weight": (40, D)}
FILES = {
    "eagle3": lambda: _eagle(OUTPUT),
    "eagle3-mapped": lambda: _eagle({"d2t": (40,), "token_embd.weight": (V, 48), "output.weight": (40, 48)}, 48,
                                    norm_before_fc=True, norm_before_residual=True),
    "eagle3-last": lambda: _eagle({"d2t": (40,), "output.weight": (40, D), "rope_freqs.weight": (16,)},
                                  target="gpt-oss", target_layers=[0, 2, 4]),
    "dflash": lambda: _dflash(),
    "dflash-posts": lambda: _dflash(EMBD, POSTS, sinks=True, **{
        "embedding_scale": 3.0, "attention.scale": 0.2, "attention.value_scale": 0.7, "hidden_activation": "gelu"}),
    "dflash-windows": lambda: _dflash(OUTPUT, left_out=["attn_v"], **{
        "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False], "attention.causal": True}),
    "dflash2": _dflash2,
    "dspark": lambda: _dflash({**MARKOV, "conf_proj.weight": (1, D + 16), "conf_proj.bias": (1,)}, block_size=N),
    "dspark-mapped": lambda: _dflash({**MARKOV, **D2T, "markov_w2.weight": (40, 16)}, sample_from_anchor=False),
    "gemma4-assistant": lambda: _assistant("gemma4"),
    "gemma4-assistant-own": lambda: _assistant("gemma4-moe")}


def write(tools, name, folder):
    """(path of the target, path of the draft model)"""
    target, arch, tensors, settings = FILES[name]()
    paths = [os.path.join(folder, f"{part}.gguf") for part in ("target", "draft")]
    arch_files.write(tools, target, paths[0], **({"layers": 4} if target == "qwen3" or arch == "eagle3" else {}))
    writer, rng = gguf.GGUFWriter(paths[1], arch), np.random.default_rng(11)
    for key, value in {"context_length": 256, "feed_forward_length": 96, "attention.head_count": 4,
                       "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
                       "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": V, **settings}.items():
        key = key if key.startswith("tokenizer") else f"{arch}.{key}"
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
               list: writer.add_array}[type(value)]
        add(key, value)
    writer.add_tokenizer_model("no_vocab")
    for tensor, ne in tensors.items():
        writer.add_tensor(tensor, _values(tensor, ne, rng))
    written(writer, paths[1])
    return paths


def _values(name, ne, rng):
    if name == "d2t":
        return np.sort(rng.permutation(V)[:ne[0]]).astype(np.int64)
    x = rng.standard_normal(ne).astype(np.float32)
    if "norm" in name or "scale" in name or "freqs" in name:
        return np.float32(1) + np.float32(0.2) * x
    return x if "token_embd" in name else x * np.float32(1.5 * ne[-1] ** -.5)


# ---------------------------------------------------------------- llama.cpp
class Embd(C.Structure):
    _fields_ = [("data", C.c_void_p), ("n_rows", C.c_size_t), ("n_embd", C.c_size_t)]


class Oracle:
    """The contexts of a target and its draft model, by llama.cpp's C and C++ functions."""

    def __init__(self, folder, shares):
        """shares: does the draft model read the target's keys and values?"""
        from peer_llamacpp import LlamaLib, put
        self.lib = lib = LlamaLib()
        L, P, I, B = lib.L, C.c_void_p, C.c_int32, C.c_bool
        for name, res, args in (
                ("llama_batch_ext_init", P, (P,)), ("llama_batch_ext_clear", None, (P,)),
                ("llama_batch_ext_add_token", I, (P, I, I)), ("llama_batch_ext_add_embd", I, (P, I, Embd)),
                ("llama_batch_ext_set_embd_token", B, (P, I, Embd)),
                ("llama_batch_ext_set_embd_state", B, (P, I, Embd)), ("llama_batch_ext_set_pos", B, (P, I, P)),
                ("llama_batch_ext_set_output_embd", B, (P, I, B)), ("llama_process", I, (P, I, P)),
                ("llama_memory_seq_rm", B, (P, I, I, I)), ("llama_set_causal_attn", None, (P, B)),
                ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, (P, B, B)),
                ("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, (P, C.c_uint32, B)),
                ("_Z30llama_get_embeddings_layer_inpP13llama_contextj", C.POINTER(C.c_float), (P, C.c_uint32)),
                ("_Z26llama_get_embeddings_nextnP13llama_context", C.POINTER(C.c_float), (P,))):
            f = getattr(L, name)
            f.restype, f.argtypes = res, args
        init, after = L.llama_init_from_model, []

        def with_other(model, params):
            if after:                   # llama_context_params.ctx_other, the last field; its booleans end at 6
                raw = bytes(params.b)
                flags = next(o for o in range(100, 160) if raw[o:o + 4] in (b"\0\1\1\1", b"\1\1\1\1"))
                put(params, 36, "<i", int(shares))      # .ctx_type: LLAMA_CONTEXT_TYPE_MTP
                put(params, (flags + 6 + 7) // 8 * 8 + 16, "<Q", after[0])
            return init(model, params)
        L.llama_init_from_model = with_other
        self.target = lib.load(os.path.join(folder, "target.gguf")).context(n_ctx=256, flash=0, kv=0)
        after.append(self.target.h)
        self.draft = lib.load(os.path.join(folder, "draft.gguf")).context(n_ctx=256, flash=0, kv=0)
        self.L, self.batch = L, L.llama_batch_ext_init(self.draft.h)
        self.with_state = L.llama_batch_ext_set_embd_state if shares else L.llama_batch_ext_set_embd_token

    def keep(self, layers, n_layer):
        """Keep what the target's layers read."""
        for i in layers:
            if i < n_layer:
                self.L._Z30llama_set_embeddings_layer_inpP13llama_contextjb(self.target.h, i, True)
        self.nextn(self.target, False)

    def nextn(self, c, masked):
        self.L._Z26llama_set_embeddings_nextnP13llama_contextbb(c.h, True, masked)

    def states(self, c, n, n_embd):
        p = self.L._Z26llama_get_embeddings_nextnP13llama_context(c.h)
        return np.ctypeslib.as_array(p, (n, n_embd)).copy()

    def features(self, layers, n_layer, n):
        """[n, layers D] of the batch that the target read last."""
        def of(i):
            if i == n_layer:
                return self.states(self.target, n, D)
            p = self.L._Z30llama_get_embeddings_layer_inpP13llama_contextj(self.target.h, i)
            return np.ctypeslib.as_array(p, (n, D)).copy()
        return np.ascontiguousarray(np.concatenate([of(i) for i in layers], 1))

    def process(self, decode, rows, output=True):
        """rows: (id or None, state or None, position) of each token; the logits of all."""
        L, b, held = self.L, self.batch, []
        L.llama_batch_ext_clear(b)
        for id, state, pos in rows:
            embd = None
            if state is not None:
                held.append(np.ascontiguousarray(state, np.float32))
                embd = Embd(held[-1].ctypes.data, 1, held[-1].size)
            i = L.llama_batch_ext_add_embd(b, 0, embd) if id is None else L.llama_batch_ext_add_token(b, 0, id)
            assert i >= 0, i
            if id is not None and embd is not None:
                assert self.with_state(b, i, embd)
            L.llama_batch_ext_set_pos(b, i, C.byref((C.c_int32 * 4)(pos, pos, pos, 0)))
            L.llama_batch_ext_set_output_embd(b, i, output)
        code = L.llama_process(self.draft.h, int(decode), b)
        assert code == 0, (code, self.lib.log[-1000:])
        if decode and output:
            return np.ctypeslib.as_array(L.llama_get_logits(self.draft.h), (len(rows), V)).copy()

    def forget(self, c, first):
        self.L.llama_memory_seq_rm(c.mem, 0, first, -1)


def eagle(o, ids, settings):
    d, layers = settings["embedding_length"], settings["target_layers"]
    o.nextn(o.draft, True)
    o.draft.reset()
    o.process(False, [(None, f, i) for i, f in enumerate(o.features(layers, 4, len(ids) - 1))])
    before = o.states(o.draft, len(ids) - 1, d)
    logits = [o.process(True, [(ids[i + 1], before[i], i) for i in range(len(ids) - 1)])[-1]]
    state = o.states(o.draft, len(ids) - 1, d)[-1]
    while len(logits) < N:
        logits += list(o.process(True, [(int(logits[-1].argmax()), state, len(ids) + len(logits) - 2)]))
        state = o.states(o.draft, 1, d)[0]
    return logits


def dflash(o, ids, settings):
    past, layers = len(ids) - 1, settings["target_layers"]
    first = 0 if settings.get("markov") and settings.get("sample_from_anchor", True) else 1
    o.draft.reset()
    o.L.llama_set_causal_attn(o.draft.h, settings.get("attention.causal", False))
    o.process(True, [(None, f, i) for i, f in enumerate(o.features(layers, 4, past))], False)
    block = [ids[-1]] + [V - 1] * (settings["block_size"] - 1)
    if "selector_top_k" in settings:
        o.nextn(o.draft, False)
        o.process(True, [(id, None, past + i) for i, id in enumerate(block)], False)
        return _selected(o.states(o.draft, len(block), D)[1:], settings["selector_top_k"])
    return list(o.process(True, [(id, None, past + i) for i, id in enumerate(block)])[first:])


def _selected(lattice, k):
    """Scores of all ids at each mask; lattice: ids, then the scores of each by the one that was picked before."""
    rows, before = [], 0
    for row in lattice:
        scores = row[k + before * k:][:k]
        rows.append(np.full(V, -1e30))
        rows[-1][row[:k].astype(int)] = scores
        before = scores.argmax()
    return rows


def assistant(o, ids, settings):
    past = len(ids) - 1
    o.nextn(o.draft, True)
    state, token, logits = o.states(o.target, past, D)[-1], ids[-1], []
    while len(logits) < N:
        logits += list(o.process(True, [(token, state, past)]))
        token, state = int(logits[-1].argmax()), o.states(o.draft, 1, D)[0]
    return logits


def main(tools, name, folder):
    write(tools, name, folder)
    _, arch, tensors, settings = FILES[name]()
    settings = dict(settings, markov="markov_w1.weight" in tensors)
    o, ids = Oracle(folder, arch == "gemma4-assistant"), np.random.default_rng(7).integers(0, V - 1, IDS).tolist()
    o.keep(settings.get("target_layers", ()), 4)
    found, margins = [], []
    for n in range(FIRST, IDS + 1):
        o.target.reset()
        o.target.decode(ids[:n - 1], all_logits=True)
        logits = np.array({"eagle3": eagle, "dflash": dflash}.get(arch, assistant)(o, ids[:n], settings))
        found.append(logits.argmax(1))
        best = np.sort(logits, 1)
        margins.append(best[:, -1] - best[:, -2])
    np.savez(os.path.join(folder, "drafts.npz"), ids=ids, found=found, margins=margins)


if __name__ == "__main__":
    main(*sys.argv[1:])
