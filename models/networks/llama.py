"""LLaMA and its close relatives: rotary positions, grouped-query attention over a KV cache, SwiGLU or experts of it.

    x = embd[ids]
    per layer:  x += Wo attention(rope(Wq n), rope(Wk n), Wv n),  n = rms_norm(x) * g
                x += Wdown (silu(Wgate m) * Wup m),               m = rms_norm(x) * h
    logits = Wout (rms_norm(x) * o)

The graph of a step depends on three numbers only, so it is planned once and replayed: how many tokens, how many cache
rows are looked at (rounded up, the mask hides the rest), how many logit rows are wanted.  Positions, cache row numbers
and the mask are inputs.

    cache of one layer                         row r = token position r
    K, V  [n_embd_kv, n_ctx]                   set_rows writes the new rows, attention views rows 0 .. n_kv-1
"""
import math

import numpy as np

import ggjit as gg
from ggjit.core.buffer import MultiBuffer
from ggjit.core.placing import place_tensors
from ggjit.models.core.checks import integer, one_of
from ggjit.models.networks import moe
from ggjit.models.networks.network import MAX_EPS, Network
from ggjit.models.text.generation import Generation
from ggjit.ops.core.errors import ModelError, ParamError
from ggjit.ops.core.host_memory import asking
from ggjit.ops.core.types import BY_NAME
from ggjit.tensors.context import Context

ROPE_NORMAL, ROPE_NEOX = 0, 2
ROPE_MODE = {"llama": ROPE_NORMAL, "qwen2": ROPE_NEOX}      # the architectures served, and how each rotates pairs
KV_TYPES = ("F16", "F32", "BF16", "Q8_0", "Q4_0")
LINEAR = "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"
MAX_CTX = (1 << 31) - 1         # positions are int32
KV_STEP = 256                   # cache rows looked at are a multiple of this
DEFAULT_N_CTX = 4096
ROPE_BASES = 1.0, 1e15          # models have 1e3 to 1e9; up to 1 the angles of later pairs grow instead of shrinking
SCALES = 1e-6, 1e6              # factors that models state


class Llama(Network):
    """`m.logits(ids)`, `m.decode(ids)`, `m.generate(prompt)`."""

    def __init__(self, file, backend="CPU", n_threads=None, n_ctx=None, n_batch=512, kv_type="F16", flash=True,
                 **kw):
        self._want_ctx, self.flash = n_ctx, bool(flash)
        self.n_batch = integer("n_batch", n_batch, 1, MAX_CTX)
        self.kv_type = BY_NAME[one_of("kv_type", str(kv_type).upper(), KV_TYPES).lower()]
        self.holder = None              # mark of the Generation whose text is in the cache
        super().__init__(file, backend, n_threads, **kw)

    # ------------------------------------------------------------ loading
    def _load(self):
        get, file = self._positive, self.file
        self.n_embd, self.n_layer = get("embedding_length"), get("block_count")
        self.n_head = get("attention.head_count")
        self.n_head_kv = get("attention.head_count_kv", self.n_head)
        self.n_ff, self.n_ctx_train = get("feed_forward_length"), min(get("context_length"), MAX_CTX)
        if self.n_head % self.n_head_kv or (self.n_embd % self.n_head and not file.arch_get("attention.key_length", 0)):
            raise ModelError(f"{file.path}: {self.n_head} heads, {self.n_head_kv} kv heads and embedding_length "
                             f"{self.n_embd} do not fit together")
        self.d_head = get("attention.key_length", self.n_embd // self.n_head)
        self.d_head_v = get("attention.value_length", self.d_head)
        self.eps = self._between("attention.layer_norm_rms_epsilon", 0.0, MAX_EPS)
        self.rope = self._rope_settings()
        self.n_ctx = self._context_size()
        self.n_batch = min(self.n_batch, self.n_ctx)
        if self.d_head % self.kv_type.block or self.d_head_v % self.kv_type.block:
            raise ParamError(f"kv_type {self.kv_type!r} stores blocks of {self.kv_type.block}, the heads of this model "
                             f"have {self.d_head}; use F16 or F32")
        self._load_weights()
        self._make_cache()
        # the mask of the token at position p is a window of this: p + 1 zeros, then -inf
        self._causal = np.repeat(np.array([0, -np.inf], np.float16), self.n_ctx)
        self.n_past = 0

    def _reserve(self):
        """For the largest graph, so that the arena never has to move."""
        (self.scheduler or self._allocator).reserve(self.largest_graph())

    def _rope_settings(self):
        """(n_dims, mode, n_ctx_orig, freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow)"""
        get = self.file.arch_get
        n_dims = get("rope.dimension_count", self.d_head, int)
        if not 0 < n_dims <= self.d_head or n_dims % 2:
            raise ModelError(f"{self.file.path}: rope.dimension_count {n_dims} does not fit heads of {self.d_head}")
        kind = get("rope.scaling.type", "none", str)
        if kind not in ("none", "linear", "yarn"):
            raise ModelError(f"{self.file.path}: rope.scaling.type {kind!r} is not supported")
        factor = self._between("rope.scaling.factor", *SCALES, 1.0)
        scale = 1.0 / factor if kind != "none" else 1.0
        n_orig = get("rope.scaling.original_context_length", self.n_ctx_train, int)
        if not 0 < n_orig <= MAX_CTX:
            raise ModelError(f"{self.file.path}: rope.scaling.original_context_length {n_orig} is out of range")
        base = self._between("rope.freq_base", *ROPE_BASES, 10000.0)
        attn = self._between("rope.scaling.attn_factor", *SCALES, 1.0)
        return (n_dims, ROPE_MODE[self.file.arch], n_orig, base, scale, 1.0 if kind == "yarn" else 0.0, attn, 32.0, 1.0)

    def _context_size(self):
        n = self._want_ctx
        if n is None:
            return min(self.n_ctx_train, DEFAULT_N_CTX)
        return integer("n_ctx", n, 1, self.n_ctx_train, " (what the model was trained for)")

    def _load_weights(self):
        file, want, d = self.file, self.weights.want, self.n_embd
        table = file.tensors.get("token_embd.weight")
        self.n_vocab = table.ne[1] if table and len(table.ne) > 1 else 0
        if table and not self.n_vocab:
            raise ModelError(f"{file.path}: token_embd.weight {list(table.ne)} holds no vocabulary")
        self.embd = want("token_embd.weight", d, self.n_vocab)
        self.out_norm = want("output_norm.weight", d)
        self.out = want("output.weight", d, self.n_vocab, optional=True)
        if self.out is None:                    # tied; on the GPU a copy, the embedding itself stays where it is
            self.out = want("token_embd.weight", d, self.n_vocab, named="output.weight") \
                if self.offload.takes("output.weight") else self.embd
        self.rope_factors = want("rope_freqs.weight", self.rope[0] // 2, optional=True)
        q, k, v, f = self.d_head * self.n_head, self.d_head * self.n_head_kv, self.d_head_v * self.n_head_kv, self.n_ff
        shapes = {"attn_q": (d, q), "attn_k": (d, k), "attn_v": (d, v), "attn_output": (self.d_head_v * self.n_head, d)}
        mixture = moe.is_mixture(file)
        if not mixture:
            shapes |= {"ffn_gate": (d, f), "ffn_up": (d, f), "ffn_down": (f, d)}
        self.layers = []
        for i in range(self.n_layer):
            p = f"blk.{i}."
            layer = {n: (want(f"{p}{n}.weight", *ne), want(f"{p}{n}.bias", ne[1], optional=True))
                     for n, ne in shapes.items()}
            if mixture:
                layer["experts"] = moe.load_experts(file, want, i, d, f)
            self.layers.append({**layer, "attn_norm": want(p + "attn_norm.weight", d),
                                "ffn_norm": want(p + "ffn_norm.weight", d)})

    def _matrices(self):
        out = [] if self.out is self.embd else [self.out]               # rows of the embedding are read one by one
        return out + [layer[n][0] for layer in self.layers for n in LINEAR if n in layer]

    def _make_cache(self):
        """K and V of every layer where its weights are, zeroed: unwritten rows are masked, but must hold numbers."""
        self.kv_ctx = Context()
        k_ne, v_ne = ((d * self.n_head_kv, self.n_ctx) for d in (self.d_head, self.d_head_v))
        new = self.kv_ctx.new_tensor
        self.cache = [(new(self.kv_type, k_ne, f"k cache {i}"), new(self.kv_type, v_ne, f"v cache {i}"))
                      for i in range(self.n_layer)]
        by_backend = {}
        for i, kv in enumerate(self.cache):
            where = self.offload.gpu if self.offload.takes(f"blk.{i}.") else self.backend
            by_backend.setdefault(where, []).extend(kv)
        self.kv_buffer = MultiBuffer([buf for buf, _ in place_tensors(
            [(b.default_buffer_type, tensors) for b, tensors in by_backend.items()])])
        self.kv_buffer.clear()

    # ------------------------------------------------------------ the graph
    def _build(self, ctx, shape):
        n_tokens, n_kv, n_out = shape
        inputs = {"tokens": np.zeros(n_tokens, np.int32), "positions": np.zeros(n_tokens, np.int32),
                  "rows": np.zeros(n_tokens, np.int64), "mask": np.full((n_tokens, n_kv), -np.inf, np.float16)}
        if n_out < n_tokens:
            inputs["out_rows"] = np.zeros(n_out, np.int32)
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        x = gg.set_name(gg.get_rows(self.embd, leaf["tokens"]), "embd")
        for i, w in enumerate(self.layers):
            x = self._attention(x, w, i, leaf, n_tokens, n_kv)
            if i == self.n_layer - 1 and n_out < n_tokens:      # the other rows are not read from here on
                x = gg.get_rows(x, leaf["out_rows"])
            x = self._feed_forward(x, w, i)
        x = gg.set_name(gg.mul(gg.rms_norm(x, self.eps), self.out_norm), "result_norm")
        return inputs, gg.set_name(gg.mul_mat(self.out, x), "logits")

    @staticmethod
    def _linear(w, weight, x, i, name):
        """W x (+ b) of layer i; results carry llama.cpp's names, so that plans and reports can be read."""
        a, bias = w[weight]
        y = gg.mul_mat(a, x)
        return gg.set_name(y if bias is None else gg.add(y, bias), f"{name}-{i}")

    def _norm(self, x, weight, i, name):
        return gg.set_name(gg.mul(gg.rms_norm(x, self.eps), weight), f"{name}-{i}")

    def _attention(self, x, w, i, leaf, n_tokens, n_kv):
        n = self._norm(x, w["attn_norm"], i, "attn_norm")
        q = gg.reshape_3d(self._linear(w, "attn_q", n, i, "Qcur"), self.d_head, self.n_head, n_tokens)
        k = gg.reshape_3d(self._linear(w, "attn_k", n, i, "Kcur"), self.d_head, self.n_head_kv, n_tokens)
        v = self._linear(w, "attn_v", n, i, "Vcur")
        q, k = (gg.set_name(gg.rope_ext(t, leaf["positions"], self.rope_factors, *self.rope), f"{name}_roped-{i}")
                for t, name in ((q, "Q"), (k, "K")))
        k = gg.reshape_2d(k, self.d_head * self.n_head_kv, n_tokens)
        # attention reads views of what set_rows returns, so it comes after the writes
        k_all = gg.set_rows(self.cache[i][0], k, leaf["rows"])
        v_all = gg.set_rows(self.cache[i][1], v, leaf["rows"])
        k_all, v_all = self._rows_by_head(k_all, self.d_head, n_kv), self._rows_by_head(v_all, self.d_head_v, n_kv)
        q = gg.permute(q, 0, 2, 1, 3)                           # [d_head, n_tokens, n_head]
        scale = 1.0 / math.sqrt(self.d_head)
        if self.flash:
            o = gg.set_name(gg.flash_attn_ext(q, k_all, v_all, leaf["mask"], scale, 0.0, 0.0), f"attn-{i}")
        else:
            kq = gg.set_name(gg.mul_mat(k_all, q), f"kq-{i}")
            p = gg.set_name(gg.soft_max_ext(kq, leaf["mask"], scale, 0.0), f"kq_soft_max-{i}")
            o = gg.set_name(gg.mul_mat(gg.cont(gg.transpose(v_all)), p), f"kqv-{i}")   # [d_head_v, n_tokens, n_head]
            o = gg.cont(gg.permute(o, 0, 2, 1, 3))
        o = gg.reshape_2d(o, self.d_head_v * self.n_head, n_tokens)
        return gg.set_name(gg.add(self._linear(w, "attn_output", o, i, "attn_out"), x), f"ffn_inp-{i}")

    def _rows_by_head(self, cache, d, n_kv):
        """The first n_kv cache rows as [d, n_kv, n_head_kv]."""
        return gg.view_3d(cache, d, n_kv, self.n_head_kv, cache.nb[1], cache.type.row_nbytes(d), 0)

    def _feed_forward(self, x, w, i):
        m = self._norm(x, w["ffn_norm"], i, "ffn_norm")
        if "experts" in w:
            return gg.set_name(gg.add(moe.feed_forward(m, w["experts"], i), x), f"l_out-{i}")
        gate, up = self._linear(w, "ffn_gate", m, i, "ffn_gate"), self._linear(w, "ffn_up", m, i, "ffn_up")
        h = gg.set_name(gg.swiglu_split(gate, up), f"ffn_swiglu-{i}")
        return gg.set_name(gg.add(self._linear(w, "ffn_down", h, i, "ffn_out"), x), f"l_out-{i}")

    def largest_graph(self, all_logits=False):
        """A full batch that ends at the last cache row: what the compute arena is made for."""
        n = min(self.n_batch, self.n_ctx)
        return self.graph(n, self.n_ctx, n if all_logits else 1)

    def _n_kv(self, n):
        return min(-(-n // KV_STEP) * KV_STEP, self.n_ctx)

    def _common_shapes(self):
        """Decode, a short and a long prompt."""
        return [(n, self._n_kv(n), 1) for n in (1, 4, 64) if n <= self.n_ctx]

    # ------------------------------------------------------------ running
    def reset(self):
        """Forget the text so far; the next tokens start at position 0."""
        self.n_past, self.holder = 0, None

    def decode(self, ids, all_logits=False):
        """Feed `ids` at the next positions; logits after the last one (n_vocab,), or after each (n, n_vocab).

        An interrupted call leaves the text as it was before.  Errors: ParamError when the context is full,
        IndexRangeError for ids outside the vocabulary.
        """
        with self._lock:
            self.holder = None
            ids = self._checked_ids(ids, self.n_ctx - self.n_past if self.n_past < self.n_ctx else 0)
            past, out = self.n_past, []
            try:
                for start in range(0, len(ids), self.n_batch):
                    part = ids[start:start + self.n_batch]
                    out.append(self._decode_batch(part, all_logits))
                    self.n_past += len(part)
            except BaseException:
                self.n_past = past
                raise
            with asking("logits"):
                return np.concatenate(out) if all_logits else out[-1][-1]

    def _decode_batch(self, ids, all_logits):
        n, past = len(ids), self.n_past
        step = self._step((n, self._n_kv(past + n), n if all_logits else 1))
        inputs = step.inputs
        inputs["tokens"][...] = ids
        positions = past if n == 1 else np.arange(past, past + n)
        inputs["positions"][...] = inputs["rows"][...] = positions
        mask = inputs["mask"]
        for i in range(n):
            first = self.n_ctx - 1 - past - i
            mask[i] = self._causal[first:first + mask.shape[1]]
        if "out_rows" in inputs:
            inputs["out_rows"][:] = n - 1
        with asking("logits"):
            return step.run().reshape(-1, self.n_vocab).copy()

    def logits(self, ids):
        """(n, n_vocab) float32: logits after every one of `ids`, from position 0; the text so far is forgotten.

        Errors: ParamError for weights that are NaN, IndexRangeError for ids outside the vocabulary.
        """
        with self._lock:
            ids = self._checked_ids(ids, self.n_ctx)
            self.reset()
            return self._finite(self.decode(ids, all_logits=True), "the logits")

    def generate(self, prompt, n_predict=64, temp=0.0, **sampling):
        """Iterator over pieces of text that continue `prompt`; `.stats` afterwards.

        temp 0 is greedy; top_k, top_p, min_p, seed and the rest as in models/text/sampling.py.
        """
        return Generation(self, prompt, n_predict, temp, sampling)

    @property
    def kv_nbytes(self):
        """Bytes of the KV cache."""
        return self.kv_buffer.size

    def free(self):
        super().free()
        self.holder = None
        if hasattr(self, "kv_buffer"):
            self.kv_ctx.free()
            self.kv_buffer.free()
