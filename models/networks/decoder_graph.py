"""A decoder as graphs: its weights, the cache of what was read, and the graph of a batch of tokens.

The graph of a batch depends on a few numbers only, so it is planned once and replayed: how many tokens, how many cache
rows are looked at (rounded up, the mask hides the rest), how many logit rows are wanted.  Positions, cache row numbers
and the masks are inputs; attention layers with windows share a mask per window.  A batch holds tokens of one text or of
several (networks/kv_cells.py).
"""
import math
import warnings

import numpy as np

import ggjit as gg
from ggjit.core.buffer import MultiBuffer
from ggjit.core.placing import place_tensors
from ggjit.models.blocks.description import CacheSizes, Loader, Scope, linear, mask_name, rows_name
from ggjit.models.blocks.hparams import MAX_CTX, ROPE_OPTIONS, HParams, rope_options
from ggjit.models.core.checks import integer, one_of
from ggjit.models.families.registry import DECODERS
from ggjit.models.networks import context_shift
from ggjit.models.networks.kv_cells import KVCells
from ggjit.models.networks.network import Network
from ggjit.ops.core.errors import ModelError, ParamError
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.types import BY_NAME
from ggjit.tensors.context import Context

KV_TYPES = ("F16", "F32", "BF16", "Q8_0", "Q4_0")
DEFAULT_N_CTX = 4096
DEFAULT_N_SEQS, MAX_SEQS = 8, 256       # texts at once


class DecoderGraph(Network):
    """`_fed_batch(runs, state_rows)`: the next tokens of some texts through the network."""

    def __init__(self, file, backend="CPU", n_threads=None, n_ctx=None, n_batch=512, kv_type="F16", flash=True,
                 n_seqs=DEFAULT_N_SEQS, **kw):
        self._want_ctx, self.flash = n_ctx, bool(flash)
        self.n_batch = integer("n_batch", n_batch, 1, MAX_CTX)
        self.n_seqs = integer("n_seqs", n_seqs, 1, MAX_SEQS)
        self.kv_type = BY_NAME[one_of("kv_type", str(kv_type).upper(), KV_TYPES).lower()]
        self._rope = rope_options({k: kw.pop(k) for k in ROPE_OPTIONS if k in kw})
        super().__init__(file, backend, n_threads, **kw)

    # ------------------------------------------------------------ loading
    def _load(self):
        hparams = HParams(self.file, rope=self._rope)
        self.n_embd, self.n_layer, self.n_ctx_train = hparams.n_embd, hparams.n_layer, hparams.n_ctx_train
        self.n_ctx = hparams.n_ctx = self._context_size()
        self.description = DECODERS[self.file.arch](hparams)
        self.n_layer, self._n_left = len(self.description.blocks), hparams.n_predicting
        self._check_positions()
        self.n_batch = min(self.n_batch, self.n_ctx)
        self._check_kv_type()
        self.cells = KVCells(self.n_ctx, self.description.windows, self.n_batch, self.n_seqs, self._mask_values(),
                             self.description.chunked)
        self._load_weights()
        self._make_cache()

    def _check_kv_type(self):
        for block in self.description.blocks:
            d = [getattr(block.mixer, name, 0) for name in ("d_head", "d_head_v", "d_index")]
            wrong = [n for n in d if n % self.kv_type.block]
            if wrong:
                raise ParamError(f"kv_type {self.kv_type!r} stores blocks of {self.kv_type.block}, the heads of this "
                                 f"model have {wrong[0]}; use F16 or F32")

    def _reserve(self):
        """For the largest graph, so that the arena never has to move."""
        (self.scheduler or self._allocator).reserve(self.largest_graph())

    def _context_size(self):
        n = self._want_ctx
        if n is None:
            return min(self.n_ctx_train, DEFAULT_N_CTX)
        return integer("n_ctx", n, 1, MAX_CTX)

    def _check_positions(self):
        """ParamError where the network cannot tell the positions of the context apart; a warning where it was not
        trained for so many."""
        about, path = self.description, self.file.path
        if self._rope and not any(getattr(piece, "rope", None) for piece in about.pieces):
            raise ParamError(f"{path} has no RoPE; leave {', '.join(self._rope)} out")
        if self.n_ctx <= self.n_ctx_train:
            return
        if about.positions:
            raise ParamError(f"n_ctx must be an integer from 1 to {self.n_ctx_train}, which {path} has positions for, "
                             f"got {self.n_ctx}")
        if about.windows and not self._rope:
            times = self.n_ctx / self.n_ctx_train
            warnings.warn(f"{path} was trained for contexts of {self.n_ctx_train} tokens, not of {self.n_ctx}: what "
                          f"comes later may be poor (rope_scaling=\"yarn\", rope_scale={min(times, 1e6):g} may help)",
                          stacklevel=2)

    def _load_weights(self):
        file, want, d, about = self.file, self.weights.want, self.n_embd, self.description
        table = file.tensors.get("token_embd.weight")
        self.n_vocab = table.ne[1] if table and len(table.ne) > 1 else 0
        if table and not self.n_vocab:
            raise ModelError(f"{file.path}: token_embd.weight {list(table.ne)} holds no vocabulary")
        loader = Loader(self.weights, d, self.n_vocab)
        self.embd = want("token_embd.weight", d, self.n_vocab)
        self._embd_adapters = self.weights.beside("token_embd.weight")
        self.positions = want("position_embd.weight", d, self.n_ctx_train) if about.positions else None
        self.embd_norm = loader.norm(about.embd_norm, about.norm) if about.embd_norm else None
        self.out_norm = loader.norm(about.out_norm, about.norm)
        self.frame = about.frame.load(loader) if about.frame else {}
        self._load_output(want, d)
        self.out_bias = want("output.bias", self.n_vocab) if about.output_bias else None
        self._out_adapters = [] if self.out is self.embd else self.weights.beside("output.weight")
        stored = about.n_stored or len(about.blocks)
        self.layers = [block.load(loader, f"{about.prefix}{i % stored}.") for i, block in enumerate(about.blocks)]
        adapters = [t for adapter in self.weights.adapters for pair in adapter.pairs.values() for t in pair]
        loader.ignore(*(name for name in file.tensors for i in range(self._n_left)
                        if name.startswith(f"{about.prefix}{self.n_layer + i}.")))
        self._weight_ids = np.array([t.base.id for t in (*self.weights._leaves.values(), *adapters)], np.int64)
        # rows of the embedding are read one by one
        self._products = loader.matrices if self.out is self.embd else [self.out, *loader.matrices]

    def _load_output(self, want, d):
        tied = self.description.tied
        self.out = None if tied else want("output.weight", d, self.n_vocab, optional=tied is None)
        if self.out is None:                    # tied; on the GPU a copy, the embedding itself stays where it is
            self.out = want("token_embd.weight", d, self.n_vocab, named="output.weight") \
                if self.offload.has("output.weight") else self.embd

    def _matrices(self):
        return self._products

    def _make_cache(self):
        """What layers keep, where their weights are, zeroed: unwritten rows are masked, but must hold numbers."""
        self.kv_ctx = Context()
        self.cache, by_backend = [], {}
        for i, block in enumerate(self.description.blocks):
            self.cache.append([self.kv_ctx.new_tensor(type_, ne, f"{name} {i}") for name, type_, ne in
                               block.cache(self._cache_sizes())])
            where = self.offload.backend_of(f"blk.{i}.") or self.backend
            by_backend.setdefault(where, []).extend(self.cache[-1])
        self.recurrent = any(leaf.name.startswith("state") for kept in self.cache for leaf in kept)
        self.cells.has_states = self.recurrent
        self.kv_buffer = MultiBuffer([buf for buf, _ in place_tensors(
            [(b.default_buffer_type, tensors) for b, tensors in by_backend.items()])])
        self.kv_buffer.clear()

    def _cache_sizes(self):
        return CacheSizes(self.n_embd, self.kv_type, self.cells.n_rows, self.cells.n_state_rows)

    def _kept_nbytes(self, layer):
        cache = self.description.blocks[layer].cache(self._cache_sizes())
        return sum(type_.row_nbytes(ne[0]) * math.prod(ne[1:]) for _, type_, ne in cache)

    def _mask_values(self):
        """{window: array}: what a mask holds by distance; that of position p begins at n_ctx - 1 - p."""
        bias = self.description.alibi()
        with oom_guard(f"the masks of a context of {self.n_ctx} (less with a smaller n_ctx)"):
            return {window: self._seen(window or self.n_ctx, bias) for window in self.description.windows}

    def _seen(self, window, bias):
        """What one mask holds: of the keys from window - 1 positions before the token to its own, 0 or ALiBi's bias."""
        values = np.full(2 * self.n_ctx, -np.inf, self._mask_dtype())
        n = min(window, self.n_ctx)
        values[self.n_ctx - n:self.n_ctx] = np.arange(1 - n, 1) if bias else 0
        return values

    def _mask_dtype(self):
        return np.float32 if self.description.alibi() else np.float16      # distances above 2048 have no F16

    @property
    def kv_nbytes(self):
        """Bytes of the KV cache."""
        return self.kv_buffer.size

    def free(self):
        super().free()
        if hasattr(self, "kv_buffer"):
            self.kv_ctx.free()
            self.kv_buffer.free()

    # ------------------------------------------------------------ the graph
    def _build(self, ctx, shape):
        if shape[0] == context_shift.NAME:
            return context_shift.rotation_graph(self, ctx, shape[1:])
        n_tokens, n_kv, n_out, hidden, n_seqs = (*shape, *(False, 1)[len(shape) - 3:])
        about = self.description
        inputs = self._inputs(n_tokens, n_kv, n_out, n_seqs)
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        g = Scope(leaf, n_tokens, n_kv, about.eps, self._flash, self.cache, n_seqs,
                  whole=self._hooks.wanted is not None)
        x = self._through_blocks(g, self._embedded(g), leaf.get("out_rows"))
        x = gg.set_name(g.norm(x, about.norm, self.out_norm), "result_norm")
        return inputs, (x if hidden else self._logits(x)), *g.states

    def _inputs(self, n_tokens, n_kv, n_out, n_seqs):
        inputs = {"tokens": np.zeros(n_tokens, np.int32), **self.description.constants}
        if self.description.rotates:
            inputs["positions"] = np.zeros(n_tokens, np.int32)
        for window, n_rows in self.cells.n_rows.items():
            inputs[rows_name(window)] = np.zeros(n_tokens, np.int64)
            inputs[mask_name(window)] = np.full((n_tokens, min(n_kv, n_rows)), -np.inf, self._mask_dtype())
        if self.description.temperature:
            inputs["temperature"] = np.ones((n_tokens, 1, 1), np.float32)
        if self.recurrent:
            inputs |= {"state_row": np.zeros(n_seqs, np.int32), "next_state_row": np.ones(n_seqs, np.int64)}
        if n_out < n_tokens:
            inputs["out_rows"] = np.zeros(n_out, np.int32)
        return inputs

    def _embedded(self, g):
        about = self.description
        x = gg.get_rows(self.embd, g.leaf["tokens"])
        for low, up, factor in self._embd_adapters:
            x = gg.add(x, gg.scale(gg.mul_mat(up, gg.get_rows(low, g.leaf["tokens"])), factor))
        if about.embd_scale:
            x = gg.scale(x, about.embd_scale)
        if self.positions is not None:
            x = gg.add(x, gg.get_rows(self.positions, g.leaf["positions"]))
        return gg.set_name(x if self.embd_norm is None else g.norm(x, about.norm, self.embd_norm), "embd")

    def _through_blocks(self, g, x, rows=None):
        """rows: of the tokens, those that are wanted: after the last layer no others are read."""
        about = self.description
        x = g.shared["embd"] = about.frame.before(g, x, self.frame) if about.frame else x
        for i, (block, w) in enumerate(zip(about.blocks, self.layers, strict=True)):
            x = block.build(g, x, w, i, rows if i == self.n_layer - 1 else None)
        return about.frame.after(g, x, self.frame, rows) if about.frame else x

    def _logits(self, x):
        about = self.description
        y = linear((self.out, self.out_bias, *self._out_adapters), x)
        if about.logit_scale:
            y = gg.scale(y, about.logit_scale)
        if about.softcap:
            y = gg.scale(gg.tanh(gg.scale(y, 1.0 / about.softcap)), about.softcap)
        return gg.set_name(y, "logits")

    def largest_graph(self, all_logits=False):
        """A full batch that ends at the last cache row: what the compute arena is made for."""
        n = min(self.n_batch, self.n_ctx)
        return self.graph(n, self.cells.most, n if all_logits else min(n, self.n_seqs))

    def _common_shapes(self):
        """Decode, a short and a long prompt."""
        return [(n, self.cells.rounded(n), 1, False, 1) for n in (1, 4, 64) if n <= self.n_ctx]

    def _later_shapes(self):
        """A prompt is followed by single tokens."""
        return self._common_shapes()[:1]

    def _compared_shapes(self):
        cached = bool(self.description.windows)
        return [(n, n_kv * cached, n) for n, n_kv in ((1, 1), (2, 1), (1, 2)) if max(n, n_kv) <= self.n_ctx]

    # ------------------------------------------------------------ a batch
    def _fed_batch(self, runs, state_rows, all_rows=False, hidden=False):
        step = self._filled(runs, state_rows, all_rows, hidden)
        with oom_guard("hidden states" if hidden else "logits"):
            return step.run().reshape(-1, self.n_embd if hidden else self.n_vocab).copy()

    def _filled(self, runs, state_rows, all_rows=False, hidden=False):
        """The planned graph for a batch, with its inputs."""
        n, n_runs = sum([len(ids) for _, ids in runs]), len(runs)
        step = self._step((n, self.cells.n_kv(runs), n if all_rows else n_runs, hidden,
                           n_runs if self.recurrent else 1))
        self._fill(step.inputs, runs, state_rows)
        return step

    def _fill(self, inputs, runs, state_rows):
        at, tokens, positions = 0, inputs["tokens"], inputs.get("positions")
        for text, ids in runs:
            n, past = len(ids), len(text.ids)
            end = at + n
            tokens[at:end] = ids
            if positions is not None:
                if n == 1:
                    positions[at] = past
                else:
                    positions[at:end] = np.arange(past, past + n)
            if "temperature" in inputs:
                inputs["temperature"][at:end, 0, 0] = self.description.temperatures(past, n)
            self.cells.place(inputs, at, text, n)
            at = end
        if self.recurrent:
            inputs["state_row"][:], inputs["next_state_row"][:] = [text.state_row for text, _ in runs], state_rows
        if "out_rows" in inputs:
            inputs["out_rows"][:] = np.cumsum([len(ids) for _, ids in runs]) - 1
