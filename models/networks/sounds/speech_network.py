"""Speech networks: an encoder of sounds, and a decoder that writes text token by token with attention to the
encoder's output.

    e       = norm(blocks(frames of the sound))
    K, V    = Wk e, Wv e of every layer of the decoder, kept until another sound is heard
    logits  = E norm(blocks(embedding of the tokens)),  E: the embedding

    block   x += attention(norm x)  (decoder: x += cross attention(norm x))  x += feed forward(norm x)

A decoder's texts of one sound (beams, samples) look at the same K and V; several sounds may be written at once.

    cache of a layer            self K, V [dim, n_text n_seqs]        cross K, V [d_head, n_audio n_head n_windows]
                                a row of each position of each text   a row of each frame of each head of each window

What the models differ in (whisper.py, moonshine.py): how a sound becomes frames, how positions are told, their weights.
"""
import dataclasses

import numpy as np

import ggjit as gg
from ggjit.graphs.graph import Graph
from ggjit.models.blocks.hparams import HParams
from ggjit.models.core.checks import one_of
from ggjit.models.networks.base.network import Network
from ggjit.models.networks.inside.hooks import TensorSpec
from ggjit.ops.core.errors import IndexRangeError, ModelError, ParamError
from ggjit.ops.core.types import BF16, F16, F32
from ggjit.ops.matmul.mul_mat import PREC_F32
from ggjit.tensors.context import Context
from ggjit.tensors.summary import op_name

ENCODE, ALIGN = "encode", "align"       # kinds of graphs
GELUS = {"exact": gg.gelu_erf, "ggml": gg.gelu}
KV_TYPES = {"F16": F16, "F32": F32}
N_KEYS = 64                     # the decoder looks at multiples of so many cache rows: few graphs serve all positions
N_TOKENS = 16                   # several tokens are read in multiples of so many
EPS = 1e-5
MAX_ROWS = 1 << 16              # of tokens, positions and windows: what a file may ask for


@dataclasses.dataclass(frozen=True)
class Decode:
    """The graph of a decoder's step: n_tokens of each of n_beams texts of each of n_windows windows.

    n_kv: cache rows that are looked at; n_out: tokens of each text whose logits are wanted, the last ones or those
    named by the input "out"; n_audio: frames of the windows."""
    n_tokens: int
    n_kv: int
    n_windows: int
    n_beams: int
    n_out: int
    n_audio: int


class SpeechNetwork(Network):
    """Base of the speech networks.  Subclasses load their weights in `_load_model(hparams)` with `_load_blocks` and
    build ENCODE graphs with `_encoded`.

    kv_type: of the caches, "F16" or "F32"; None: F16 beside quantised weights and with gelu="ggml", else F32.
    """
    CAUSAL = False
    cache_owner = None                  # object whose text is in the caches
    heard_frames = None                 # frames of the window that was encoded last
    _gelu = "exact"

    def __init__(self, file, options=None, kv_type=None):
        self._asked_kv = None if kv_type is None else one_of("kv_type", kv_type, KV_TYPES)
        self._cache = self._cache_buffer = None
        super().__init__(file, options)

    # ------------------------------------------------------------ loading
    def _load(self):
        hparams = HParams(self.file)
        self.n_embd, self.n_layer = hparams.n_embd, hparams.n_layer
        self.n_decoder, self.n_head = hparams.positive("decoder_block_count"), hparams.positive("attention.head_count")
        self.n_text, self.n_vocab = hparams.positive("context_length"), hparams.positive("vocab_size")
        self.n_ctx, self.d_head = self.n_text, self.n_embd // self.n_head
        if self.n_embd % self.n_head or self.n_text > MAX_ROWS:
            raise ModelError(f"{self.file.path}: {self.n_head} heads of a width of {self.n_embd} and {self.n_text} "
                             f"tokens do not fit a speech model")
        self._load_model(hparams)
        self.alignment_heads = self._alignment_heads()
        rounded = self._gelu == "ggml" or any(t.type.quantized for t in self._products)
        self.kv_type = KV_TYPES[self._asked_kv or ("F16" if rounded else "F32")]
        self._allocate_cache(1, 1)

    def _alignment_heads(self):
        """[(layer, head), ...] of the decoder that follow the sound; if not known, all of its upper half."""
        return [(i, h) for i in range(self.n_decoder // 2, self.n_decoder) for h in range(self.n_head)]

    def _allocate_cache(self, n_windows, n_seqs):
        """Caches of so many windows and texts, instead of those there are."""
        shapes = {"self": (self.n_embd, self.n_text * n_seqs),
                  "cross": (self.d_head, self.n_audio * self.n_head * n_windows)}
        ctx = Context()
        try:
            cache = {kind: [tuple(ctx.new_tensor(self.kv_type, ne, f"{kind} {c} cache-{i}") for c in "kv")
                            for i in range(self.n_decoder)] for kind, ne in shapes.items()}
            buffer = gg.alloc_ctx_tensors(ctx, self.backend)
        except BaseException:
            ctx.free()
            raise
        self._steps.clear()
        self._free_cache()
        self._cache_ctx, self._cache, self._cache_buffer = ctx, cache, buffer
        self.n_windows, self.n_seqs = n_windows, n_seqs

    def _free_cache(self):
        if self._cache_buffer is not None:
            self._cache_ctx.free()
            self._cache_buffer.free()
            self._cache_buffer = None

    def _kept_buffers(self):
        return [] if self._cache_buffer is None else [self._cache_buffer]

    def free(self):
        with self._lock:
            super().free()
            self._free_cache()

    @property
    def lock(self):
        """Held while a window is encoded and decoded, since the caches hold one window at a time."""
        return self._lock

    @property
    def kv_nbytes(self):
        """Bytes of the caches."""
        return sum(t.nbytes for kind in self._cache.values() for pair in kind for t in pair)

    def _matrices(self):
        return self._products

    def _load_blocks(self, n_ff, n_ff_decoder, biased, norm_bias):
        """All blocks, their last norms and the embedding.  n_ff_decoder: rows of its first matrix, twice n_ff where a
        gate and up lie in one; biased: the matrices of attention that have one."""
        want, d, self._products = self.weights.want, self.n_embd, []

        def linear(name, n_in=d, n_out=d, bias=True):
            self._products.append(want(name + ".weight", n_in, n_out))
            return self._products[-1], want(name + ".bias", n_out) if bias else None

        def norm(name):
            return want(name + ".weight", d), want(name + ".bias", d) if norm_bias else None

        def attention(p, name):
            return {"norm": norm(f"{p}.{name}_ln"), **{c: linear(f"{p}.{name}.{c}", bias=c in biased)
                                                       for c in ("query", "key", "value", "out")}}

        def block(p, n_up, *attentions):
            return {name: attention(p, name) for name in attentions} | {
                "mlp_ln": norm(p + ".mlp_ln"), "up": linear(p + ".mlp.0", d, n_up),
                "down": linear(p + ".mlp.2", n_ff, d)}
        self._encoder = [block(f"encoder.blocks.{i}", n_ff, "attn") for i in range(self.n_layer)]
        self._encoder_norm = norm("encoder.ln_post")
        self._embedding = want("decoder.token_embedding.weight", d, self.n_vocab)
        self._decoder = [block(f"decoder.blocks.{i}", n_ff_decoder, "attn", "cross_attn")
                         for i in range(self.n_decoder)]
        self._decoder_norm = norm("decoder.ln")

    # ------------------------------------------------------------ graphs
    def _build(self, ctx, shape):
        if isinstance(shape, Decode):
            return self._build_decoder(ctx, shape)
        kind, *sizes = shape
        return (self._build_encoder if kind == ENCODE else self._build_alignment)(ctx, *sizes)

    def _named(self, shapes):
        """[{name: tensor}, ...], one dict for each pair of encoder's and decoder's graph."""
        return [{name: t for named in super(SpeechNetwork, self)._named(pair) for name, t in named.items()}
                for pair in shapes]

    def other_graphs(self):
        """The decoder's, of a token."""
        shape = next(shape for shape in self._common_shapes() if isinstance(shape, Decode))
        return [Graph(*self._built(shape)[2])]

    def _spec(self, name, tensors):
        t, = tensors
        return TensorSpec(name, op_name(t), t.shape, self.backend.name, None, None, np.dtype(np.float32))

    def _product(self, weights, x):
        """W x (+ b)."""
        w, bias = weights
        y = gg.mul_mat(w, x)
        if self._gelu == "exact" and w.type in (F16, BF16):
            y = gg.mul_mat_set_prec(y, PREC_F32)
        return y if bias is None else gg.add(y, bias)

    def _norm(self, x, params):
        w, bias = params
        y = gg.mul(gg.norm(x, EPS), w)
        return y if bias is None else gg.add(y, bias)

    def _turned(self, x, leaf):
        """Queries or keys [dim, n], rotated by their positions where the model does that."""
        return x

    def _embedded(self, leaf):
        """[dim, n] of the decoder's tokens."""
        return gg.get_rows(self._embedding, leaf["tokens"])

    def _activation(self, x, w):
        """GELU of x; or, where one matrix gives gate and up, silu(gate) * up."""
        return GELUS[self._gelu](x) if w["down"][0].ne[0] == x.ne[0] else gg.swiglu(x)

    def _attend(self, q, k, v, mask, name, flash):
        """softmax(q k^T / sqrt d + mask) v: q [64, n, heads, m], k and v [64, n_kv, heads, m] -> [dim, n m]."""
        scale = self.d_head ** -0.5
        n = q.ne[1] * q.ne[3]
        if flash:
            o = gg.flash_attn_ext(q, k, v, mask, scale)
        else:
            p = gg.soft_max_ext(gg.mul_mat_set_prec(gg.mul_mat(k, q), PREC_F32), mask, scale, 0.0)
            p = name(p, "kq_soft_max")
            o = gg.mul_mat_set_prec(gg.mul_mat(gg.cont(gg.transpose(v)), p), PREC_F32)
            o = gg.cont(gg.permute(o, 0, 2, 1, 3))
        return name(gg.reshape_2d(o, self.n_embd, n), "attn")

    def _by_head(self, x, m=1):
        """[dim, n m] -> [64, n, heads, m]"""
        x = gg.reshape_4d(x, self.d_head, self.n_head, x.ne[1] // m, m)
        return gg.permute(x, 0, 2, 1, 3)

    def _feed_forward(self, x, w, name):
        h = self._activation(self._product(w["up"], self._norm(x, w["mlp_ln"])), w)
        x = gg.add(x, name(self._product(w["down"], name(h, "ffn_act")), "ffn_out"))
        return name(x, "l_out")

    def _encoded(self, x, n_audio, leaf):
        """[dim, n_audio] of the frames x, then the nodes that write the decoder's keys and values to the rows that the
        input "cache_at" says."""
        for i, w in enumerate(self._encoder):
            def name(t, what, i=i):
                return gg.set_name(t, f"enc_{what}-{i}")
            a = w["attn"]
            h = name(self._norm(x, a["norm"]), "attn_norm")
            q, k, v = (self._product(a[c], h) for c in ("query", "key", "value"))
            q, k, v = map(self._by_head, (self._turned(q, leaf), self._turned(k, leaf), v))
            o = self._product(a["out"], self._attend(q, k, v, None, name, self._flash))
            x = self._feed_forward(gg.add(x, name(o, "attn_out")), w, name)
        x = gg.set_name(self._norm(x, self._encoder_norm), "enc_result")
        written = [gg.set_rows(kept, gg.reshape_2d(self._product(w["cross_attn"][c], x), self.d_head,
                                                   self.n_head * n_audio), leaf["cache_at"])
                   for w, pair in zip(self._decoder, self._cache["cross"], strict=True)
                   for c, kept in zip(("key", "value"), pair, strict=True)]
        return x, *written

    def _cross_heads(self, cache, n_audio, n_windows, first):
        """[64, n_audio, heads, n_windows] of a cache."""
        row = cache.nb[1]
        head = row * self.n_audio
        return gg.view_4d(cache, self.d_head, n_audio, self.n_head, n_windows, row, head, head * self.n_head,
                          first * head * self.n_head)

    def _build_decoder(self, ctx, s):
        n_seqs = s.n_windows * s.n_beams
        n = n_seqs * s.n_tokens
        inputs = {"tokens": np.zeros(n, np.int32), "positions": np.zeros(n, np.int32), "rows": np.zeros(n, np.int64),
                  "mask": np.zeros((s.n_tokens, s.n_kv), np.float16)}
        if s.n_out < s.n_tokens:
            inputs["out"] = np.zeros(n_seqs * s.n_out, np.int32)
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}

        def keys_and_values(i, k, v):
            """Of all positions of each text, the new ones included, as [64, n_kv, heads, n_seqs]."""
            row = self._cache["self"][i][0].nb[1]
            return [gg.view_4d(gg.set_rows(kept, new, leaf["rows"]), self.d_head, s.n_kv, self.n_head, n_seqs,
                               row, row // self.n_head, row * self.n_text, 0)
                    for kept, new in zip(self._cache["self"][i], (k, v), strict=True)]
        x = self._decode(leaf, s.n_windows, n_seqs, s.n_audio, keys_and_values)
        x = gg.get_rows(x, leaf["out"]) if "out" in leaf else x
        return inputs, self._logits(x)

    def _build_alignment(self, ctx, n, n_audio, window):
        """Logits of n tokens of one text about that window, read from the start, and the cross attention of the layers
        that have alignment heads."""
        inputs = {"tokens": np.zeros(n, np.int32), "positions": np.arange(n, dtype=np.int32),
                  "mask": np.triu(np.full((n, n), -np.inf), 1).astype(np.float16)}
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        maps = dict.fromkeys(self._alignment_layers)
        x = self._decode(leaf, 1, 1, n_audio, lambda i, k, v: (self._by_head(k), self._by_head(v)), maps,
                         window)
        return inputs, self._logits(x), *maps.values()

    @property
    def _alignment_layers(self):
        return sorted({i for i, _ in self.alignment_heads})

    def _decode(self, leaf, n_windows, n_seqs, n_audio, keys_and_values, maps=(), first=0):
        """The blocks of the decoder; maps: {layer: None}, which get their cross attention [n_audio, tokens, heads];
        first: of the windows."""
        x = gg.set_name(self._embedded(leaf), "dec_embd")
        for i, w in enumerate(self._decoder):
            def name(t, what, i=i):
                return gg.set_name(t, f"dec_{what}-{i}")

            def cross_name(t, what, i=i):
                if what == "kq_soft_max" and i in maps:
                    maps[i] = t
                return gg.set_name(t, f"cross_{what}-{i}")
            a, c = w["attn"], w["cross_attn"]
            h = name(self._norm(x, a["norm"]), "attn_norm")
            q, k, v = (self._product(a[what], h) for what in ("query", "key", "value"))
            q, k = self._turned(q, leaf), self._turned(k, leaf)
            o = self._attend(self._by_head(q, n_seqs), *keys_and_values(i, k, v), leaf["mask"], name, self._flash)
            x = gg.add(x, name(self._product(a["out"], o), "attn_out"))
            q = self._by_head(self._product(c["query"], cross_name(self._norm(x, c["norm"]), "attn_norm")), n_windows)
            k, v = (self._cross_heads(kept, n_audio, n_windows, first) for kept in self._cache["cross"][i])
            o = self._attend(q, k, v, None, cross_name, self._flash and i not in maps)
            x = self._feed_forward(gg.add(x, cross_name(self._product(c["out"], o), "attn_out")), w, name)
        return x

    def _logits(self, x):
        x = gg.set_name(self._norm(x, self._decoder_norm), "result_norm")
        return gg.set_name(self._product((self._embedding, None), x), "logits")

    # ------------------------------------------------------------ running
    def _heard(self, shape, n_audio, window, **inputs):
        """Run the encoder's graph: its results (n_audio, dim), whose keys and values the decoder finds as that
        window."""
        with self._lock:
            if window >= self.n_windows:
                self._allocate_cache(window + 1, max(self.n_seqs, window + 1))
            self.heard_frames = n_audio
            step = self._step(shape)
            for name, value in inputs.items():
                step.inputs[name][...] = value
            first = (window * self.n_head + np.arange(self.n_head)) * self.n_audio
            step.inputs["cache_at"][:] = (np.arange(n_audio)[:, None] + first).reshape(-1)
            return step.run().reshape(n_audio, self.n_embd)

    def reserve(self, n_windows, n_seqs):
        """Caches of at least so many windows and texts; what they held is lost if they have to grow."""
        with self._lock:
            if n_windows > self.n_windows or n_seqs > self.n_seqs:
                self._allocate_cache(max(n_windows, self.n_windows), max(n_seqs, self.n_seqs))

    def feed(self, tokens, n_past=0, n_windows=1, out=None, n_audio=None):
        """Logits (texts, wanted, n_vocab) of tokens (texts, n), which follow n_past others of each text.

        The texts are those of n_windows windows, as many of each.  out: the tokens of each text, by their index, whose
        logits are wanted; None: the last one.  Valid until the network runs again.
        """
        tokens = self._checked_tokens(tokens, n_past)
        n_seqs, n = tokens.shape
        with self._lock:
            if n_seqs > self.n_seqs or n_windows > self.n_windows or n_seqs % n_windows:
                raise ParamError(f"{n_seqs} texts of {n_windows} windows, there is room for {self.n_seqs} of "
                                 f"{self.n_windows}; call reserve(n_windows, n_seqs) first")
            out = [n - 1] if out is None else out
            if n > 1:                   # surplus tokens do no harm: the next step overwrites their rows
                n = min(-(-n // N_TOKENS) * N_TOKENS, self.n_text - n_past)
                tokens = np.pad(tokens, ((0, 0), (0, n - tokens.shape[1])))
            n_kv = min(-(-(n_past + n) // N_KEYS) * N_KEYS, self.n_text)
            step = self._step(Decode(n, n_kv, n_windows, n_seqs // n_windows, len(out), n_audio or self.n_audio))
            inputs, at = step.inputs, np.arange(n_past, n_past + n)
            inputs["tokens"][:] = tokens.reshape(-1)
            inputs["positions"].reshape(n_seqs, n)[:] = at
            inputs["rows"].reshape(n_seqs, n)[:] = at + self.n_text * np.arange(n_seqs)[:, None]
            inputs["mask"][:] = np.where(np.arange(n_kv) <= at[:, None], 0, -np.inf)
            if "out" in inputs:
                inputs["out"].reshape(n_seqs, len(out))[:] = np.array(out) + n * np.arange(n_seqs)[:, None]
            return step.run().reshape(n_seqs, len(out), self.n_vocab)

    def _checked_tokens(self, tokens, n_past):
        tokens = np.atleast_2d(np.asarray(tokens))
        if tokens.ndim != 2 or not tokens.size or tokens.dtype.kind not in "iu":
            raise ParamError(f"tokens are rows of integers, got shape {tokens.shape} {tokens.dtype}")
        if tokens.min() < 0 or tokens.max() >= self.n_vocab:
            raise IndexRangeError(f"tokens {tokens.min()} to {tokens.max()} are outside the vocabulary "
                                  f"0..{self.n_vocab - 1}")
        if n_past + tokens.shape[1] > self.n_text:
            raise ParamError(f"{tokens.shape[1]} tokens after {n_past} do not fit the context of {self.n_text}")
        return tokens.astype(np.int32)

    def take_over(self, sources, n_past):
        """Text i continues text sources[i], whose first n_past cache rows are copied to it."""
        sources = np.asarray(sources)
        moved = np.flatnonzero(sources != np.arange(len(sources)))
        if not len(moved):
            return
        with self._lock:
            for pair in self._cache["self"]:
                for t in pair:
                    a = t.buffer.host_bytes(t.offs, t.nbytes).reshape(self.n_seqs, self.n_text, -1)
                    a[moved, :n_past] = a[sources[moved], :n_past]

    def align(self, tokens, n_audio=None, window=0):
        """(logits (n, n_vocab), attention (alignment heads, n, n_audio)) of tokens (n,) about a window."""
        tokens = self._checked_tokens(tokens, 0)[0]
        n, n_all = len(tokens), min(-(-len(tokens) // N_TOKENS) * N_TOKENS, self.n_text)
        with self._lock:
            step = self._step((ALIGN, n_all, n_audio or self.n_audio, window))
            step.inputs["tokens"][:] = np.pad(tokens, (0, n_all - n))
            logits = step.run().reshape(n_all, self.n_vocab)[:n]
            maps = {i: step.plan.view(t) for i, t in zip(self._alignment_layers, step.more, strict=True)}
            return logits, np.stack([maps[i].reshape(self.n_head, n_all, -1)[h, :n] for i, h in self.alignment_heads])
