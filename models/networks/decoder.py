"""Decoders: from a Description to logits and text, with a cache of what was read.

The graph of a step depends on three numbers only, so it is planned once and replayed: how many tokens, how many cache
rows are looked at (rounded up, the mask hides the rest), how many logit rows are wanted.  Positions, cache row numbers
and the masks are inputs; attention layers with windows share a mask per window.

A recurrent layer keeps states, each a row of N_SLOTS.  A call reads one row and writes another, so that an interrupted
call leaves the text as it was:

    slot 0          empty, never written: where a text begins
    slots 1 to 3    before the call, and in turn after each batch of it
"""
import math

import numpy as np

import ggjit as gg
from ggjit.core.buffer import MultiBuffer
from ggjit.core.placing import place_tensors
from ggjit.models.blocks.description import N_SLOTS, Loader, Scope, linear, mask_name
from ggjit.models.blocks.facts import MAX_CTX, Facts
from ggjit.models.core.checks import integer, one_of
from ggjit.models.families.registry import DECODERS
from ggjit.models.networks.network import Network
from ggjit.models.text.chat_template import chat_prompt
from ggjit.models.text.generation import Generation
from ggjit.ops.core.errors import ModelError, ParamError
from ggjit.ops.core.host_memory import asking
from ggjit.ops.core.progress import counted
from ggjit.ops.core.types import BY_NAME
from ggjit.tensors.context import Context

KV_TYPES = ("F16", "F32", "BF16", "Q8_0", "Q4_0")
KV_STEP = 256                   # cache rows looked at are a multiple of this
DEFAULT_N_CTX = 4096


class Decoder(Network):
    """`m.logits(ids)`, `m.hidden(ids)`, `m.decode(ids)`, `m.generate(prompt)`, `m.chat(messages)`."""

    def __init__(self, file, backend="CPU", n_threads=None, n_ctx=None, n_batch=512, kv_type="F16", flash=True,
                 **kw):
        self._want_ctx, self.flash = n_ctx, bool(flash)
        self.n_batch = integer("n_batch", n_batch, 1, MAX_CTX)
        self.kv_type = BY_NAME[one_of("kv_type", str(kv_type).upper(), KV_TYPES).lower()]
        self.holder = None              # mark of the Generation whose text is in the cache
        super().__init__(file, backend, n_threads, **kw)

    # ------------------------------------------------------------ loading
    def _load(self):
        facts = Facts(self.file)
        self.n_embd, self.n_layer, self.n_ctx_train = facts.n_embd, facts.n_layer, facts.n_ctx_train
        self.n_ctx = facts.n_ctx = self._context_size()
        self.description = DECODERS[self.file.arch](facts)
        self.n_batch = min(self.n_batch, self.n_ctx)
        self._check_kv_type()
        self._load_weights()
        self._make_cache()
        self._make_masks()
        self.reset()

    def _check_kv_type(self):
        for block in self.description.blocks:
            d = getattr(block.mixer, "d_head", 0), getattr(block.mixer, "d_head_v", 0)
            if any(n % self.kv_type.block for n in d):
                raise ParamError(f"kv_type {self.kv_type!r} stores blocks of {self.kv_type.block}, the heads of this "
                                 f"model have {d[0]}; use F16 or F32")

    def _reserve(self):
        """For the largest graph, so that the arena never has to move."""
        (self.scheduler or self._allocator).reserve(self.largest_graph())

    def _context_size(self):
        n = self._want_ctx
        if n is None:
            return min(self.n_ctx_train, DEFAULT_N_CTX)
        return integer("n_ctx", n, 1, self.n_ctx_train, " (what the model was trained for)")

    def _load_weights(self):
        file, want, d, about = self.file, self.weights.want, self.n_embd, self.description
        table = file.tensors.get("token_embd.weight")
        self.n_vocab = table.ne[1] if table and len(table.ne) > 1 else 0
        if table and not self.n_vocab:
            raise ModelError(f"{file.path}: token_embd.weight {list(table.ne)} holds no vocabulary")
        loader = Loader(self.weights, d)
        self.embd = want("token_embd.weight", d, self.n_vocab)
        self.positions = want("position_embd.weight", d, self.n_ctx_train) if about.positions else None
        self.embd_norm = loader.norm(about.embd_norm, about.norm) if about.embd_norm else None
        self.out_norm = loader.norm(about.out_norm, about.norm)
        self._load_output(want, d)
        self.out_bias = want("output.bias", self.n_vocab) if about.output_bias else None
        self._out_adapters = [] if self.out is self.embd else self.weights.beside("output.weight")
        self.layers = [block.load(loader, f"{about.prefix}{i}.") for i, block in enumerate(about.blocks)]
        # rows of the embedding are read one by one
        self._products = loader.matrices if self.out is self.embd else [self.out, *loader.matrices]

    def _load_output(self, want, d):
        tied = self.description.tied
        self.out = None if tied else want("output.weight", d, self.n_vocab, optional=tied is None)
        if self.out is None:                    # tied; on the GPU a copy, the embedding itself stays where it is
            self.out = want("token_embd.weight", d, self.n_vocab, named="output.weight") \
                if self.offload.takes("output.weight") else self.embd

    def _matrices(self):
        return self._products

    def _make_cache(self):
        """What layers keep, where their weights are, zeroed: unwritten rows are masked, but must hold numbers."""
        self.kv_ctx = Context()
        self.cache, by_backend = [], {}
        for i, block in enumerate(self.description.blocks):
            self.cache.append([self.kv_ctx.new_tensor(type_, ne, f"{name} {i}") for name, type_, ne in
                               block.cache(self.n_ctx, self.kv_type, self.n_embd)])
            where = self.offload.home(f"blk.{i}.") or self.backend
            by_backend.setdefault(where, []).extend(self.cache[-1])
        self.recurrent = any(leaf.name.startswith("state") for kept in self.cache for leaf in kept)
        self.kv_buffer = MultiBuffer([buf for buf, _ in place_tensors(
            [(b.default_buffer_type, tensors) for b, tensors in by_backend.items()])])
        self.kv_buffer.clear()

    def _kept_nbytes(self, layer):
        cache = self.description.blocks[layer].cache(self.n_ctx, self.kv_type, self.n_embd)
        return sum(type_.row_nbytes(ne[0]) * math.prod(ne[1:]) for _, type_, ne in cache)

    def _make_masks(self):
        """{window: array}: the mask of the token at position p is the part of it from n_ctx - 1 - p on."""
        self._masks = {}
        back = np.arange(1 - self.n_ctx, self.n_ctx + 1)                    # key's position less the token's
        for window in self.description.windows:
            seen = (back <= 0) & (back > -(window or self.n_ctx))
            bias = back if self.description.alibi() else 0
            self._masks[window] = np.where(seen, bias, -np.inf).astype(self._mask_dtype())

    def _mask_dtype(self):
        return np.float32 if self.description.alibi() else np.float16      # distances above 2048 have no F16

    # ------------------------------------------------------------ the graph
    def _build(self, ctx, shape):
        n_tokens, n_kv, n_out, hidden = (*shape, False)[:4]
        about = self.description
        inputs = self._inputs(n_tokens, n_kv, n_out)
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        g = Scope(leaf, n_tokens, n_kv, about.eps, self._flash, self.cache, whole=self._hooks.wanted is not None)
        x = self._embedded(g)
        for i, (block, w) in enumerate(zip(about.blocks, self.layers, strict=True)):
            # after the last layer the other rows are not read
            x = block.build(g, x, w, i, leaf.get("out_rows") if i == self.n_layer - 1 else None)
        x = gg.set_name(g.norm(x, about.norm, self.out_norm), "result_norm")
        return inputs, (x if hidden else self._logits(x)), *g.states

    def _inputs(self, n_tokens, n_kv, n_out):
        inputs = {"tokens": np.zeros(n_tokens, np.int32)}
        if self.description.rotates:
            inputs["positions"] = np.zeros(n_tokens, np.int32)
        if self.description.windows:
            inputs["rows"] = np.zeros(n_tokens, np.int64)
        for window in self.description.windows:
            inputs[mask_name(window)] = np.full((n_tokens, n_kv), -np.inf, self._mask_dtype())
        if self.description.temperature:
            inputs["temperature"] = np.ones((n_tokens, 1, 1), np.float32)
        if self.recurrent:
            inputs |= {"slot": np.zeros(1, np.int32), "next_slot": np.ones(1, np.int64)}
        if n_out < n_tokens:
            inputs["out_rows"] = np.zeros(n_out, np.int32)
        return inputs

    def _embedded(self, g):
        about = self.description
        x = gg.get_rows(self.embd, g.leaf["tokens"])
        if about.embd_scale:
            x = gg.scale(x, about.embd_scale)
        if self.positions is not None:
            x = gg.add(x, gg.get_rows(self.positions, g.leaf["positions"]))
        return gg.set_name(x if self.embd_norm is None else g.norm(x, about.norm, self.embd_norm), "embd")

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
        return self.graph(n, self.n_ctx, n if all_logits else 1)

    def _n_kv(self, n):
        return min(-(-n // KV_STEP) * KV_STEP, self.n_ctx) if self.description.windows else 0

    def _common_shapes(self):
        """Decode, a short and a long prompt."""
        return [(n, self._n_kv(n), 1) for n in (1, 4, 64) if n <= self.n_ctx]

    def _compared_shapes(self):
        cached = bool(self.description.windows)
        return [(n, n_kv * cached, n) for n, n_kv in ((1, 1), (2, 1), (1, 2)) if max(n, n_kv) <= self.n_ctx]

    # ------------------------------------------------------------ running
    def reset(self):
        """Forget the text so far; the next tokens start at position 0."""
        self.n_past, self.slot, self.holder = 0, 0, None

    def decode(self, ids, all_logits=False):
        """Feed `ids` at the next positions; logits after the last one (n_vocab,), or after each (n, n_vocab).

        An interrupted call leaves the text as it was before.  Errors: ParamError when the context is full,
        IndexRangeError for ids outside the vocabulary.
        """
        with self._lock:
            out = self._fed(ids, all_logits)
            with asking("logits"):
                return np.concatenate(out) if all_logits else out[-1][-1]

    def _fed(self, ids, all_rows, hidden=False):
        """[rows of each batch]: logits, or hidden states, after all tokens or the last."""
        self.holder = None
        ids = self._checked_ids(ids, self.n_ctx - self.n_past if self.n_past < self.n_ctx else 0)
        before, out = (self.n_past, self.slot), []
        try:
            for start in counted("reading batches of tokens", range(0, len(ids), self.n_batch)):
                part = ids[start:start + self.n_batch]
                free = next(s for s in range(1, N_SLOTS) if s not in (self.slot, before[1]))
                out.append(self._fed_batch(part, all_rows, hidden, free))
                self.n_past, self.slot = self.n_past + len(part), free
        except BaseException:
            self.n_past, self.slot = before
            raise
        return out

    def _fed_batch(self, ids, all_rows, hidden, next_slot):
        n, past = len(ids), self.n_past
        shape = (n, self._n_kv(past + n), n if all_rows else 1)
        step = self._step((*shape, True) if hidden else shape)
        inputs = step.inputs
        inputs["tokens"][...] = ids
        positions = past if n == 1 else np.arange(past, past + n)
        for name in ("positions", "rows"):
            if name in inputs:
                inputs[name][...] = positions
        if "temperature" in inputs:
            scale, length = self.description.temperature
            inputs["temperature"][:, 0, 0] = 1 + scale * np.log1p(np.arange(past, past + n) // length)
        for window, values in self._masks.items():
            mask = inputs[mask_name(window)]
            for i in range(n):
                first = self.n_ctx - 1 - past - i
                mask[i] = values[first:first + mask.shape[1]]
        if self.recurrent:
            inputs["slot"][0], inputs["next_slot"][0] = self.slot, next_slot
        if "out_rows" in inputs:
            inputs["out_rows"][:] = n - 1
        with asking("hidden states" if hidden else "logits"):
            return step.run().reshape(-1, self.n_embd if hidden else self.n_vocab).copy()

    def hidden(self, ids):
        """(n, dim) float32: what the last norm makes of every one of `ids`, from position 0; the text so far is
        forgotten.

        Errors: ParamError for weights that are NaN, IndexRangeError for ids outside the vocabulary.
        """
        with self._lock:
            ids = self._checked_ids(ids, self.n_ctx)
            self.reset()
            out = self._fed(ids, True, hidden=True)
            with asking("hidden states"):
                return self._finite(np.concatenate(out), "the hidden states")

    def logits(self, ids):
        """(n, n_vocab) float32: logits after every one of `ids`, from position 0; the text so far is forgotten.

        Errors: ParamError for weights that are NaN, IndexRangeError for ids outside the vocabulary.
        """
        with self._lock:
            ids = self._checked_ids(ids, self.n_ctx)
            self.reset()
            return self._finite(self.decode(ids, all_logits=True), "the logits")

    def generate(self, prompt, n_predict=64, stop=(), ignore_eos=False, **sampling):
        """Iterator over pieces of text that continue `prompt`; `.stats` afterwards, with "stop_reason".

        n_predict: tokens at most, -1 for no limit.  stop: texts or ids that end it; no part of such a text comes out.
        ignore_eos: the model's own ends are never chosen.  sampling: llama.cpp's options and defaults (temp=0.8,
        top_k=40, top_p=0.95, min_p=0.05, seed ...), listed in models/text/sampling.py; temp=0 always takes the
        likeliest token.
        """
        return Generation(self, prompt, n_predict, stop, ignore_eos, **sampling)

    def chat_prompt(self, messages, tools=None, add_generation_prompt=True, template=None, **variables):
        """(text, ids) of a conversation, a list of {"role": ..., "content": ...}, by the chat template in the file.

        tools, variables: passed on to it.  template: another one, as Jinja text or by name ("chatml", one in the file).
        Errors: ParamError for messages that do not fit, ModelError for a template that is missing or fails.
        """
        return chat_prompt(self.file, self.tokenizer, messages, tools, add_generation_prompt, template, **variables)

    def chat(self, messages, n_predict=-1, tools=None, template=None, variables=None, **options):
        """Iterator over the pieces of the answer to a conversation, as `generate` gives them.

        messages, tools, template, variables: as in `chat_prompt`.  options: as in `generate`.
        """
        ids = self.chat_prompt(messages, tools, template=template, **(variables or {})).ids
        return self.generate(ids, n_predict, **options)

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
