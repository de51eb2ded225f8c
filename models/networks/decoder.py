"""Decoders: from a Description to logits and text, with a cache of what was read.

The graph of a step depends on three numbers only, so it is planned once and replayed: how many tokens, how many cache
rows are looked at (rounded up, the mask hides the rest), how many logit rows are wanted.  Positions, cache row numbers
and the masks are inputs; attention layers with windows share a mask per window.  A batch holds tokens of one text or of
several (networks/cells.py).
"""
import math
import warnings

import numpy as np

import ggjit as gg
from ggjit.core.buffer import MultiBuffer
from ggjit.core.placing import place_tensors
from ggjit.core.table import TABLE
from ggjit.core.versions import T_VERSION
from ggjit.models.blocks.description import CacheSizes, Loader, Scope, linear, mask_name, rows_name
from ggjit.models.blocks.facts import MAX_CTX, ROPE_OPTIONS, Facts, rope_options
from ggjit.models.core.checks import integer, one_of
from ggjit.models.families.registry import DECODERS
from ggjit.models.networks import context_shift, saved_state
from ggjit.models.networks.cells import Cells
from ggjit.models.networks.network import Network
from ggjit.models.text.chat_template import chat_prompt
from ggjit.models.text.generation import Generation
from ggjit.models.text.generations import Generations, is_many
from ggjit.models.text.sampling import OPTIONS
from ggjit.ops.core.errors import ModelError, ParamError
from ggjit.ops.core.host_memory import asking
from ggjit.ops.core.progress import counted
from ggjit.ops.core.types import BY_NAME
from ggjit.tensors.context import Context

KV_TYPES = ("F16", "F32", "BF16", "Q8_0", "Q4_0")
DEFAULT_N_CTX = 4096
DEFAULT_N_SEQS, MAX_SEQS = 8, 256       # texts at once


class Decoder(Network):
    """`m.logits(ids)`, `m.hidden(ids)`, `m.decode(ids)`, `m.generate(prompt)`, `m.chat(messages)`."""

    def __init__(self, file, backend="CPU", n_threads=None, n_ctx=None, n_batch=512, kv_type="F16", flash=True,
                 n_seqs=DEFAULT_N_SEQS, **kw):
        self._want_ctx, self.flash = n_ctx, bool(flash)
        self.n_batch = integer("n_batch", n_batch, 1, MAX_CTX)
        self.n_seqs = integer("n_seqs", n_seqs, 1, MAX_SEQS)
        self.kv_type = BY_NAME[one_of("kv_type", str(kv_type).upper(), KV_TYPES).lower()]
        self._rope = rope_options({k: kw.pop(k) for k in ROPE_OPTIONS if k in kw})
        self.holder = None              # mark of the Generation whose text is in the cache
        super().__init__(file, backend, n_threads, **kw)

    # ------------------------------------------------------------ loading
    def _load(self):
        facts = Facts(self.file, rope=self._rope)
        self.n_embd, self.n_layer, self.n_ctx_train = facts.n_embd, facts.n_layer, facts.n_ctx_train
        self.n_ctx = facts.n_ctx = self._context_size()
        self.description = DECODERS[self.file.arch](facts)
        self.n_layer, self._n_left = facts.n_layer, facts.n_predicting
        self._check_positions()
        self.n_batch = min(self.n_batch, self.n_ctx)
        self._check_kv_type()
        self.cells = Cells(self.n_ctx, self.description.windows, self.n_batch, self.n_seqs, self._mask_values())
        self._load_weights()
        self._make_cache()
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
        return integer("n_ctx", n, 1, MAX_CTX)

    def _check_positions(self):
        """Can the positions of the context be told apart?"""
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
                          f"comes later may be poor (rope_scaling=\"yarn\", rope_scale={times:g} may help)",
                          stacklevel=2)

    def _load_weights(self):
        file, want, d, about = self.file, self.weights.want, self.n_embd, self.description
        table = file.tensors.get("token_embd.weight")
        self.n_vocab = table.ne[1] if table and len(table.ne) > 1 else 0
        if table and not self.n_vocab:
            raise ModelError(f"{file.path}: token_embd.weight {list(table.ne)} holds no vocabulary")
        loader = Loader(self.weights, d)
        self.embd = want("token_embd.weight", d, self.n_vocab)
        self._embd_adapters = self.weights.beside("token_embd.weight")
        self.positions = want("position_embd.weight", d, self.n_ctx_train) if about.positions else None
        self.embd_norm = loader.norm(about.embd_norm, about.norm) if about.embd_norm else None
        self.out_norm = loader.norm(about.out_norm, about.norm)
        self._load_output(want, d)
        self.out_bias = want("output.bias", self.n_vocab) if about.output_bias else None
        self._out_adapters = [] if self.out is self.embd else self.weights.beside("output.weight")
        self.layers = [block.load(loader, f"{about.prefix}{i}.") for i, block in enumerate(about.blocks)]
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
                if self.offload.takes("output.weight") else self.embd

    def _matrices(self):
        return self._products

    def _make_cache(self):
        """What layers keep, where their weights are, zeroed: unwritten rows are masked, but must hold numbers."""
        self.kv_ctx = Context()
        self.cache, by_backend = [], {}
        for i, block in enumerate(self.description.blocks):
            self.cache.append([self.kv_ctx.new_tensor(type_, ne, f"{name} {i}") for name, type_, ne in
                               block.cache(self._cache_sizes())])
            where = self.offload.home(f"blk.{i}.") or self.backend
            by_backend.setdefault(where, []).extend(self.cache[-1])
        self.recurrent = any(leaf.name.startswith("state") for kept in self.cache for leaf in kept)
        self.cells.has_states = self.recurrent
        self.kv_buffer = MultiBuffer([buf for buf, _ in place_tensors(
            [(b.default_buffer_type, tensors) for b, tensors in by_backend.items()])])
        self.kv_buffer.clear()

    def _cache_sizes(self):
        return CacheSizes(self.n_embd, self.kv_type, self.cells.n_rows, self.cells.n_slots)

    def _kept_nbytes(self, layer):
        cache = self.description.blocks[layer].cache(self._cache_sizes())
        return sum(type_.row_nbytes(ne[0]) * math.prod(ne[1:]) for _, type_, ne in cache)

    def _mask_values(self):
        """{window: array}: what a mask holds by distance; that of position p begins at n_ctx - 1 - p."""
        bias = self.description.alibi()
        with asking(f"the masks of a context of {self.n_ctx} (less with a smaller n_ctx)"):
            back = np.arange(1 - self.n_ctx, self.n_ctx + 1)                # key's position less the token's
            return {window: np.where((back <= 0) & (back > -(window or self.n_ctx)), back if bias else 0, -np.inf)
                    .astype(self._mask_dtype()) for window in self.description.windows}

    def _mask_dtype(self):
        return np.float32 if self.description.alibi() else np.float16      # distances above 2048 have no F16

    # ------------------------------------------------------------ the graph
    def _build(self, ctx, shape):
        if shape[0] == context_shift.NAME:
            return context_shift.turning(self, ctx, shape[1:])
        n_tokens, n_kv, n_out, hidden, n_seqs = (*shape, *(False, 1)[len(shape) - 3:])
        about = self.description
        inputs = self._inputs(n_tokens, n_kv, n_out, n_seqs)
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        g = Scope(leaf, n_tokens, n_kv, about.eps, self._flash, self.cache, n_seqs,
                  whole=self._hooks.wanted is not None)
        x = self._embedded(g)
        for i, (block, w) in enumerate(zip(about.blocks, self.layers, strict=True)):
            # after the last layer the other rows are not read
            x = block.build(g, x, w, i, leaf.get("out_rows") if i == self.n_layer - 1 else None)
        x = gg.set_name(g.norm(x, about.norm, self.out_norm), "result_norm")
        return inputs, (x if hidden else self._logits(x)), *g.states

    def _inputs(self, n_tokens, n_kv, n_out, n_seqs):
        inputs = {"tokens": np.zeros(n_tokens, np.int32)}
        if self.description.rotates:
            inputs["positions"] = np.zeros(n_tokens, np.int32)
        for window, n_rows in self.cells.n_rows.items():
            inputs[rows_name(window)] = np.zeros(n_tokens, np.int64)
            inputs[mask_name(window)] = np.full((n_tokens, min(n_kv, n_rows)), -np.inf, self._mask_dtype())
        if self.description.temperature:
            inputs["temperature"] = np.ones((n_tokens, 1, 1), np.float32)
        if self.recurrent:
            inputs |= {"slot": np.zeros(n_seqs, np.int32), "next_slot": np.ones(n_seqs, np.int64)}
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

    def _key_rows(self, layer, n_tokens):
        """(first, rows): positions from `first` on lie in these cache rows of a layer, once the text has n_tokens more;
        None where several texts share the rows."""
        if self.text is None:
            return None
        lay, end = self.text.lays[self.description.blocks[layer].mixer.window], len(self.text.ids) + n_tokens
        first = max(0, end - lay.n)
        return first, lay.at(first, end)

    # ------------------------------------------------------------ running
    def reset(self):
        """Forget the text so far; the next tokens start at position 0."""
        self.cells.clear()
        self.text, self.holder = self.cells.open(self.n_ctx), None
        self._read_with = self._weight_versions()

    def _weight_versions(self):
        """Grows when a weight is written to: what was read before is not what the network computes now."""
        return int(TABLE.words[self._weight_ids, T_VERSION].sum())

    @property
    def _weights_as_read(self):
        """Was no weight written to since the text began?"""
        return self._read_with == self._weight_versions()

    @property
    def n_past(self):
        """Tokens of the text so far."""
        return len(self.text.ids) if self.text else 0

    def lend(self, mark):
        """Give all rows to the holder of `mark`; the text so far is forgotten."""
        self.cells.clear()
        self.text, self.holder = None, mark
        self._read_with = self._weight_versions()

    @property
    def shares(self):
        """May a text take over what another one has read, in place of reading it again?"""
        return self.cells.can_share and self._hooks.wanted is None and self._weights_as_read

    def keep_prefix(self, ids):
        """Forget the text so far, but for what `ids` begins with: how many of them need not be read again.

        All but the last at most, since its logits are wanted.  States of recurrent layers know the whole text only.
        What was read while values of it were kept or replaced (networks/hooks.py), or before a weight was written to,
        or stood behind tokens that a context shift dropped, is read again.
        """
        with self._lock:
            ids = self._checked_ids(ids, self.n_ctx)
            n, text = 0, self.text
            same = self._hooks.wanted is None and self._weights_as_read
            if text and same and not text.broken:
                n = min(len(text.ids), len(ids) - 1, text.exact)
                differ = np.flatnonzero(np.array(text.ids[:n], np.int32) != ids[:n])
                n = int(differ[0]) if len(differ) else n
            if not n or not text.holds(n) or (self.recurrent and n < len(text.ids)):
                self.reset()
                return 0
            text.cut(n, text.slot)
            self.holder = None
            return n

    def shift_context(self, n_keep, n_discard):
        """Drop n_discard tokens after the first n_keep; those behind them move forward, see context_shift.py.

            if m.n_past == m.n_ctx:
                m.shift_context(4, m.n_ctx // 2)
        """
        with self._lock:
            n_keep = integer("n_keep", n_keep, 0, self.n_past)
            n_discard = integer("n_discard", n_discard, 0, self.n_past - n_keep, f" (n_past {self.n_past} - n_keep)")
            if n_discard:
                self.holder = None
                context_shift.shift(self, n_keep, n_discard)

    def save_state(self, path=None):
        """The text so far and what the layers know of it, as bytes; written to `path` where there is one.

            state = m.save_state();  m.load_state(state)

        Errors: NotSupported, while several texts are being generated.
        """
        with self._lock:
            return saved_state.save(self, path)

    def load_state(self, state):
        """Go on where `save_state` was called: its bytes, or the path of its file.  What was read here is forgotten.

        Errors, with the text as it was: BadFile (broken bytes), ModelError (another model), ParamError (another
        kv_type, or a context that is too small).
        """
        with self._lock:
            saved_state.load(self, state)

    def decode(self, ids, all_logits=False):
        """Feed `ids` at the next positions; logits after the last one (n_vocab,), or after each (n, n_vocab).

        An interrupted call leaves the text as it was before.  Errors: ParamError when the context is full,
        IndexRangeError for ids outside the vocabulary.
        """
        with self._lock:
            out = self._fed(ids, all_logits)
            if not all_logits:
                return out[-1][-1]
            with asking("logits"):
                return np.concatenate(out)

    def _fed(self, ids, all_rows, hidden=False):
        """[rows of each batch]: logits, or hidden states, after all tokens or the last."""
        if self.text is None:
            self.reset()
        self.holder, text = None, self.text
        ids = self._checked_ids(ids, self.n_ctx - len(text.ids))
        if text.broken:
            self._mend(text)
        return self._read(text, ids, all_rows, hidden)

    def _read(self, text, ids, all_rows=False, hidden=False):
        """As `_fed`, of any text; an interrupted call leaves it as it was."""
        n, slot, out = len(text.ids), text.slot, []
        if not n and text is self.text:
            self._read_with = self._weight_versions()
        if self._hooks.wanted is not None and len(ids):
            text.exact, text.hooked = min(text.exact, n), min(text.hooked, n)
        try:
            for start in counted("reading batches of tokens", range(0, len(ids), self.n_batch)):
                part, slots = ids[start:start + self.n_batch], self.cells.free_slots(1, slot)
                out.append(self._fed_batch([(text, part)], slots, all_rows, hidden))
                text.add(part, slots[0])
        except BaseException:
            text.cut(n, slot)
            raise
        return out

    def _mend(self, text):
        """Read again what an interrupted call has overwritten: under hooks only what was read under hooks."""
        ids, n_plain = text.ids, min(text.hooked, len(text.ids))
        text.forget()
        try:
            with self._hooks.none_wanted():
                self._read(text, np.array(ids[:n_plain], np.int32))
            self._read(text, np.array(ids[n_plain:], np.int32))
        except BaseException:
            text.ids, text.broken = ids, True
            raise

    def feed(self, runs):
        """The next tokens of several texts in one batch: runs [(text, ids)] -> logits after each run (n_runs, n_vocab).

        Recurrent layers take one run of any length, or runs of one token.  Runs of one token are padded to a power of
        two by the last of them, so that few plans serve any number.  An interrupted call leaves all texts as they were.
        """
        slots = self.cells.free_slots(len(runs))
        out = self._fed_batch(*self._padded(runs, slots))[:len(runs)]
        self._added(runs, slots)
        return out

    @property
    def n_stages(self):
        """Devices that a batch passes through: so many batches can be under way at once (`submit`)."""
        return 1 if self.recurrent or self._hooks.wanted is not None else max(len(self.offload.gpus), 1)

    def submit(self, runs):
        """As `feed`, but the batch is on its way when this returns: a function that waits for its logits.

        After an error, of this or of the function, what was read of these texts is not known.
        """
        slots = self.cells.free_slots(len(runs))
        step = self._filled(*self._padded(runs, slots))
        with asking("logits"):
            read = step.submit()
        self._added(runs, slots)
        return lambda: read().reshape(-1, self.n_vocab)[:len(runs)]

    def _padded(self, runs, slots):
        """Runs of one token, and their slots, up to a power of two."""
        n = len(runs)
        more = (1 << (n - 1).bit_length()) - n if all(len(ids) == 1 for _, ids in runs) else 0
        return runs + runs[-1:] * more, slots + slots[-1:] * more

    def _added(self, runs, slots):
        for (text, ids), slot in zip(runs, slots, strict=True):
            if self._hooks.wanted is not None:
                text.exact = min(text.exact, len(text.ids))
            text.add(ids, slot)

    def _fed_batch(self, runs, slots, all_rows=False, hidden=False):
        step = self._filled(runs, slots, all_rows, hidden)
        with asking("hidden states" if hidden else "logits"):
            return step.run().reshape(-1, self.n_embd if hidden else self.n_vocab).copy()

    def _filled(self, runs, slots, all_rows=False, hidden=False):
        """The planned graph for a batch, with its inputs."""
        n, n_runs = sum([len(ids) for _, ids in runs]), len(runs)
        step = self._step((n, self.cells.n_kv(runs), n if all_rows else n_runs, hidden,
                           n_runs if self.recurrent else 1))
        self._fill(step.inputs, runs, slots)
        return step

    def _fill(self, inputs, runs, slots):
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
                scale, length = self.description.temperature
                inputs["temperature"][at:end, 0, 0] = 1 + scale * np.log1p(np.arange(past, past + n) // length)
            self.cells.place(inputs, at, text, n)
            at = end
        if self.recurrent:
            inputs["slot"][:], inputs["next_slot"][:] = [text.slot for text, _ in runs], slots
        if "out_rows" in inputs:
            inputs["out_rows"][:] = np.cumsum([len(ids) for _, ids in runs]) - 1

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

    def generate(self, prompt, n_predict=64, temp=0.0, stop=(), ignore_eos=False, **options):
        """Iterator over pieces of text that continue `prompt`; `.stats` afterwards, with "stop_reason".

        n_predict: tokens at most, -1 for no limit.  temp: temperature; 0 always takes the likeliest token.  stop: texts
        or ids that end it; no part of such a text comes out.  ignore_eos: the model's own ends are never chosen.
        Others: llama.cpp's options and defaults of sampling (top_k=40, top_p=0.95, min_p=0.05, seed ...), listed in
        models/text/sampling.py.
        grammar: GBNF text that the answer fits; json_schema: a JSON Schema that it fits, as a dict or text;
        grammar_triggers: texts, compiled patterns and ids from which on it fits (before the first all is allowed).
        cache_prompt=False: what the prompt shares with the text before it is read again, too.  context_shift=True: when
        the context is full, half of what follows the first n_keep (0) tokens is dropped; else the text ends there.
        A list of prompts: an iterator over (number, piece), up to n_seqs texts at once; `runs[i].stats`, `runs.texts`.
        """
        kind = Generations if is_many(prompt) else Generation
        return kind(self, prompt, n_predict, stop, ignore_eos, temp=temp, **options)

    def chat_prompt(self, messages, tools=None, add_generation_prompt=True, template=None, **variables):
        """(text, ids) of a conversation, a list of {"role": ..., "content": ...}, by the chat template in the file.

        tools, variables: passed on to it.  template: another one, as Jinja text or by name ("chatml", one in the file).
        Errors: ParamError for messages that do not fit, ModelError for a template that is missing or fails.
        """
        return chat_prompt(self.file, self.tokenizer, messages, tools, add_generation_prompt, template, **variables)

    def chat(self, messages, n_predict=-1, tools=None, template=None, variables=None, **options):
        """Iterator over the pieces of the answer to a conversation, as `generate` gives them.

        messages, tools, template, variables: as in `chat_prompt`.  options: as in `generate`, but that the temperature
        is llama.cpp's 0.8 unless told.
        """
        ids = self.chat_prompt(messages, tools, template=template, **(variables or {})).ids
        return self.generate(ids, n_predict, **{"temp": OPTIONS["temp"].default, **options})

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
