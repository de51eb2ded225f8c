"""Decoders: texts that are read and continued; weights, caches and parts of their graphs are in decoder_graph.py.

A text is the ids that were read and the cache rows that hold what the layers know of them (parts/kv_cells.py).
"""
import contextlib
import math

import numpy as np

import ggjit as gg
from ggjit.api.rematerialize import BudgetError
from ggjit.core.arguments import typed_methods
from ggjit.core.table import TABLE
from ggjit.core.versions import T_VERSION
from ggjit.cpu.cpu_plan import reserve_work
from ggjit.cpu.device import CPU
from ggjit.models.blocks.description import Loader, Scope
from ggjit.models.blocks.hparams import MAX_CTX, HParams, rope_options
from ggjit.models.core.checks import integer, one_of
from ggjit.models.families.registry import DECODERS
from ggjit.models.networks.base.load_options import LoadOptions
from ggjit.models.networks.base.memory import MemoryTerm, expected_in, term_of, terms_of_leaves
from ggjit.models.networks.base.network import Network
from ggjit.models.networks.parts import context_shift, saved_state, steering
from ggjit.models.networks.parts import decoder_graph as graphs
from ggjit.models.networks.parts.guesses import NAME, STATES
from ggjit.models.networks.parts.kv_cells import KVCells
from ggjit.models.networks.parts.pooling import RANK, Pooling
from ggjit.models.networks.parts.predictor import predicting, predicts, show
from ggjit.models.networks.pictures import senses
from ggjit.models.networks.texts import batches, results, writing
from ggjit.ops.core.errors import NotSupported, ParamError
from ggjit.ops.core.host_memory import empty, oom_guard
from ggjit.ops.core.progress import counted
from ggjit.ops.core.types import BY_NAME
from ggjit.ops.matmul.choices import columns_apart

KV_TYPES = ("F16", "F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
MAX_SEQS = 256                          # texts at once
MAX_CELLS = 1 << 30


def _kv_types(asked):
    """(type of keys, of values) of "F16", "Q8_0/Q4_0" or a pair.  Errors: ParamError."""
    names = asked if isinstance(asked, list | tuple) else str(asked).split("/")
    if len(names) not in (1, 2):
        raise ParamError(f"kv_type is {asked!r}, expected a type, or one of keys and one of values: \"Q8_0/Q4_0\"")
    types = [BY_NAME[one_of("kv_type", str(name).upper(), KV_TYPES).lower()] for name in names]
    return types[0], types[-1]


@typed_methods
class Decoder(Network):
    """`m.logits(ids)`, `m.hidden(ids)`, `m.decode(ids)`, `m.generate(prompt)`, `m.chat(messages)`."""
    cache_owner = None                  # identity of the Generation whose text is in the cache
    N_SEQS = 8                          # texts at once, where n_seqs does not say
    SEES = True                         # may it have a vision part?
    vision = hearing = None             # the Vision and the Hearing beside it
    pictures = None                     # PictureTokens of what it saw and heard
    predictor = None                    # the Guesses that were asked for last
    control, _control_ctx = {}, None    # {layer: leaf that is added to what it gives on} and their context
    set_lora, set_control_vectors = steering.set_lora, steering.set_control_vectors
    encode_image, encode_audio = senses.encode_image, senses.encode_audio
    _take_control, _begin_again = steering._take_control, steering.begin_again

    def __init__(self, file, options=None):
        """options: LoadOptions.  Errors: ParamError."""
        options = self.options = LoadOptions() if options is None else options
        self.flash = bool(options.flash)
        self.n_batch = integer("n_batch", options.n_batch, 1, MAX_CTX)
        self.n_seqs = integer("n_seqs", self.N_SEQS if options.n_seqs is None else options.n_seqs, 1, MAX_SEQS)
        self.kv_type, self.v_type = _kv_types(options.kv_type)
        self.rope_changes = rope_options(options.rope)
        super().__init__(file, options)

    # ------------------------------------------------------------ loading
    def _load(self):
        hparams = HParams(self.file, rope=self.rope_changes)
        self.n_embd, self.n_layer, self.n_ctx_train = hparams.n_embd, hparams.n_layer, hparams.n_ctx_train
        self.n_ctx = hparams.n_ctx = graphs.context_size(self)
        self.description = DECODERS[self.file.arch](hparams)
        self.n_layer, self._n_left = len(self.description.blocks), hparams.n_predicting
        graphs.check_positions(self)
        if any(more.one_text for more in self.description.inputs):
            if self.options.n_seqs not in (None, 1):
                raise ParamError(f"n_seqs is {self.n_seqs}, but {self.file.arch} models read one text at a time here; "
                                 f"leave it out")
            self.n_seqs = 1
        self.n_batch = min(self.n_batch, self.n_ctx)
        graphs.check_kv_type(self)
        self._mask_memory = {}
        self.n_cells = max(self.n_ctx, integer("n_cells", self.options.n_cells or self.n_ctx, 1, MAX_CELLS))
        self.cells = KVCells(self.n_ctx, self.description.windows, self.n_batch, self.n_seqs, graphs.mask_values(self),
                             self.description.chunked, self.n_cells, graphs.can_page(self))
        self._load_weights()
        self.pooling = Pooling(hparams, Loader(self.weights, self.n_embd), "none", True, self.options.pooling)
        if self.options.vision is not None:
            senses.load(self, self.options.vision)
        graphs.make_cache(self)
        self.reset()

    def _load_weights(self):
        graphs.load_weights(self)

    @property
    def _senses(self):
        return [sense for sense in (self.vision, self.hearing) if sense is not None]

    @property
    def _has_grid(self):
        """May a token's position be another number than that of the tokens before it?"""
        return self.vision is not None and self.vision.family.has_grid

    @property
    def _end_of_ids(self):
        return self.n_vocab if self.pictures is None else self.pictures.end

    def _reserve(self):
        """Reserve memory for the largest graph, so that the arena never has to move."""
        graph = self.within_arena(self.largest_graph())
        (self.scheduler or self._allocator).reserve(graph)
        if self.scheduler is None and self.backend.device is CPU:
            reserve_work(self.backend, graph)

    def _matrices(self):
        return self._products

    def _kept_nbytes(self, layer):
        cache = self.description.blocks[layer].cache(graphs.cache_sizes(self))
        return sum(type_.row_nbytes(ne[0]) * math.prod(ne[1:]) for _, type_, ne in cache)

    def _kept_buffers(self):
        return self.kv_buffer.buffers

    def _filled_buffers(self):
        return *super()._filled_buffers(), *(b for sense in self._senses for b in sense._filled_buffers())

    def _memory_terms(self):
        terms = super()._memory_terms() + [term for sense in self._senses for term in sense.memory_terms()]
        return terms if self.predictor is None else [*terms, term_of("next token", self.predictor.memory)]

    def _kept_terms(self):
        terms = graphs.kept_by_kind(self)
        return super()._kept_terms() if len(terms) < 2 and "KV cache" in terms else \
            [term for kind, leaves in terms.items() for term in terms_of_leaves(kind, leaves)]

    def expected_kept(self):
        kinds = graphs.kept_by_kind(self)
        if len(kinds) < 2:
            return [term for kind in kinds for term in expected_in(kind, self._kept_buffers(), self)]
        found = {}                          # states and caches of different layers lie in one buffer
        for kind, leaves in kinds.items():
            for t in leaves:
                device = None if t.buffer.buft.device is self.backend.device else t.buffer.buft.device.name
                found[kind, device] = found.get((kind, device), 0) + t.nbytes
        return [MemoryTerm(kind, n, n) if device is None else MemoryTerm(kind, n, device=device)
                for (kind, device), n in found.items()]

    @property
    def kv_nbytes(self):
        """Bytes of the KV cache."""
        return self.kv_buffer.size

    def free(self):
        super().free()
        self.cache_owner = None
        for sense in self._senses:
            sense.free()
        if self.predictor is not None:
            self.predictor.free()
        if self._control_ctx is not None:
            self._control_ctx.free()
        if hasattr(self, "kv_buffer"):
            self.kv_ctx.free()
            self.kv_buffer.free()

    # ------------------------------------------------------------ graphs
    def _build(self, ctx, shape):
        if shape[0] == context_shift.NAME:
            return context_shift.rotation_graph(self, ctx, shape[1:])
        if shape[0] == NAME:
            return self.predictor.build(ctx, shape[1:])
        n_tokens, n_kv, n_out, hidden, n_seqs, n_tables, pictures = (*shape, *(False, 1, 0, False)[len(shape) - 3:])
        n_tables = max(n_tables, 0)
        about = self.description
        inputs = self._inputs(n_tokens, n_kv, n_out, n_seqs, n_tables, pictures)
        leaf = {name: gg.from_numpy(ctx, a, name) for name, a in inputs.items()}
        g = Scope(leaf, n_tokens, n_kv, about.eps, self._flash, self.cache, n_seqs,
                  whole=self._hooks.wanted is not None)
        x = graphs.through_blocks(self, g, graphs.embedded(self, g), leaf.get("out_rows"))
        x = gg.set_name(g.norm(x, about.norm, self.out_norm), "result_norm")
        if hidden == RANK:
            return inputs, self.pooling.scores(g, x), *g.states
        if hidden == STATES:
            return inputs, graphs.logits(self, x), self.predictor.read(g, x, leaf.get("out_rows")), *g.states
        return inputs, (x if hidden else graphs.logits(self, x)), *g.states

    def _inputs(self, n_tokens, n_kv, n_out, n_seqs, n_tables, pictures):
        return graphs.inputs(self, n_tokens, n_kv, n_out, n_seqs, n_tables, pictures)

    def _made(self, shape):
        if len(shape) < 6 or shape[0] in (context_shift.NAME, NAME) or shape[5] in (0, 1):
            return super()._made(shape)
        with columns_apart():           # each text gets the bits that it gets alone
            return super()._made(shape)

    largest_graph, full_batch, _piece = batches.largest_graph, batches.full_batch, batches.piece
    n_plans, least_piece = property(batches.n_plans), property(batches.least_piece)
    n_rows_held = property(batches.n_rows_held)
    _shape_of, _most_at_once = batches.shape_of, property(batches.most_at_once)
    _common_shapes, _later_shapes = batches.common_shapes, batches.later_shapes
    _compared_shapes, _text_shapes = batches.compared_shapes, batches.text_shapes

    def _keep_within(self, arena):
        self.arena, self.n_batch = arena, arena.piece()

    # ------------------------------------------------------------ a batch
    _shape, _n_tables, _fill = batches.shape, batches.n_tables, batches.fill
    _batches, _padded = batches.batches, batches.padded
    _predicts, _show, predicting = predicts, show, predicting

    def _fed_batch(self, runs, state_rows, all_rows=False, hidden=False, out=None):
        """Logits or hidden states of a batch, as a new array or in `out`."""
        step = self._filled(runs, state_rows, all_rows, hidden)
        n = self.pooling.n_scores if hidden == RANK else self.n_embd if hidden else self.n_vocab
        rows = step.run().reshape(-1, n)
        if out is None:
            out = self._handed_out.add(empty(rows.shape, np.float32, "hidden states" if hidden else "logits"))
        out[...] = rows
        self._show(runs, step, hidden)
        return out

    def _filled(self, runs, state_rows, all_rows=False, hidden=False, apart=False):
        """The planned graph for a batch, with its inputs."""
        n_tables = self._n_tables(runs)
        step = self._step(self._shape(runs, n_tables, all_rows, hidden, apart))
        self._fill(step.inputs, runs, state_rows, n_tables)
        return step

    # ------------------------------------------------------------ the text
    def reset(self):
        """Forget the text so far; the next tokens start at position 0."""
        self.cells.clear()
        self.text, self.cache_owner = self.cells.open(self.n_ctx), None
        self._read_with = self._weight_versions()

    def _weight_versions(self):
        """A number that grows when a weight is written to; caches filled before are then out of date."""
        return int(TABLE.words[self._weight_ids, T_VERSION].sum())

    @property
    def _weights_as_read(self):
        """Is every weight as it was when the text began?"""
        return self._read_with == self._weight_versions()

    @property
    def n_past(self):
        """Tokens of the text so far."""
        return len(self.text.ids) if self.text else 0

    def hand_over(self, mark):
        """Give all rows to the cache_owner of `mark`; the text so far is forgotten."""
        self.cells.clear()
        self.text, self.cache_owner = None, mark
        self._read_with = self._weight_versions()

    @property
    def shares(self):
        """May a text take over what another one has read, in place of reading it again?"""
        return self.cells.can_share and self._hooks.wanted is None and self._weights_as_read

    def keep_prefix(self, ids):
        """Forget the text so far, but for what `ids` begins with: how many of them need not be read again.

        All but the last at most, since its logits are wanted.  States of recurrent layers know the whole text only.
        What was read while values of it were kept or replaced (models/networks/inside/hooks.py), or before a weight was
        written to, or stood behind tokens that a context shift dropped, is read again.
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
            text.cut(n, text.state_row)
            self.cache_owner = None
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
                self.cache_owner = None
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

    # ------------------------------------------------------------ reading
    def decode(self, ids, all_logits=False):
        """Feed `ids`, or a text, at the next positions; logits after the last one (n_vocab,), or after each (n,
        n_vocab).

        An interrupted call leaves the text as it was before.  Errors: ParamError when the context is full,
        IndexRangeError for ids outside the vocabulary.
        """
        with self._lock:
            out = self._fed(ids, all_logits)
            return out if all_logits else out[-1]

    def decode_apart(self, ids):
        """As `decode` with all_logits, of at most n_batch ids after others; each row has the bits that it has where its
        token is fed alone.  Not for recurrent layers, nor while values are kept or replaced."""
        with self._lock:
            self.cache_owner, text = None, self.text
            ids, n = self._checked_ids(ids, min(self.n_ctx - len(text.ids), self.n_batch)), len(text.ids)
            if text.broken:
                self._read_again(text)
            try:
                step = self._filled([(text, ids)], [0], True, apart=True)
                rows = step.run().reshape(-1, self.n_vocab).copy()
                self._show([(text, ids)], step)
                text.add(ids, 0)
            except BaseException:
                text.cut(n, 0)
                raise
            return rows

    def plan_apart(self, n):
        """Make the plan that `decode_apart` of n ids uses next; False where their batch does not fit `arena`."""
        with self._lock, contextlib.suppress(BudgetError):
            self._step(self._shape([(self.text, range(n))], 0, True, apart=True))
            return True
        return False

    @property
    def is_watched(self):
        """Are values of it kept or replaced (models/networks/inside/hooks.py)?"""
        return self._hooks.wanted is not None

    def cut_text(self, n):
        """Forget all but the first n tokens of the text so far.  Errors: ParamError; NotSupported for recurrent layers,
        which know the whole text only."""
        with self._lock:
            n = integer("n", n, 0, self.n_past)
            if n < self.n_past:
                if self.recurrent:
                    raise NotSupported("recurrent layers know the whole text only; m.reset() and read what shall stay")
                self.text.cut(n, self.text.state_row)
                self.cache_owner = None

    def _fed(self, ids, all_rows, hidden=False):
        """Rows of logits, hidden states (True), or a classifier's numbers (RANK): after all tokens, or after the
        last."""
        if self.text is None:
            self.reset()
        self.cache_owner, text = None, self.text
        ids = self._checked_ids(ids, self.n_ctx - len(text.ids))
        if text.broken:
            self._read_again(text)
        return self._read(text, ids, all_rows, hidden)

    def _read(self, text, ids, all_rows=False, hidden=False):
        """As `_fed`, of any text; an interrupted call leaves it as it was."""
        n, state_row, out = len(text.ids), text.state_row, None
        kept = STATES if self._predicts([(text, ids)], hidden) else hidden
        rows = self._rows(len(ids), hidden) if all_rows else None
        if not n and text is self.text:
            self._read_with = self._weight_versions()
        if self._hooks.wanted is not None and len(ids):
            text.exact, text.hooked = min(text.exact, n), min(text.hooked, n)
        try:
            at = 0
            for part in counted("reading batches of tokens", self._batches(ids, self._piece(all_rows, kept))):
                state_rows = self.cells.free_state_rows(1, state_row)
                out = self._fed_batch([(text, part)], state_rows, all_rows, hidden,
                                      None if rows is None else rows[at:at + len(part)])
                at += len(part)
                text.add(part, state_rows[0])
        except BaseException:
            text.cut(n, state_row)
            raise
        return out if rows is None else rows

    def _rows(self, n, hidden):
        """Memory for the logits or hidden states of n tokens, filled batch by batch.  Errors: OutOfMemory."""
        return self._handed_out.add(empty((n, self.n_embd if hidden else self.n_vocab), np.float32,
                                          "hidden states" if hidden else "logits"))

    def _read_again(self, text):
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

        Recurrent layers take one run of any length, or runs of one token.  Runs of one token are padded by the
        last of them, so that few plans serve any number.  An interrupted call leaves all texts as they were.
        """
        state_rows = self.cells.free_state_rows(len(runs))
        out = self._fed_batch(*self._padded(runs, state_rows))[:len(runs)]
        self._added(runs, state_rows)
        return out

    def open_text(self, n_tokens, like=None, n_shared=0):
        """A Text with cache rows for so many tokens, or None while others hold too many; the first n_shared are those
        of the text `like`, which has read them."""
        text = self.cells.open(n_tokens, like, n_shared)
        if text is not None and text.copies:
            saved_state.copy_rows(self, text.copies)
            text.copies = {}
        return text

    @property
    def n_stages(self):
        """Devices that a batch passes through: so many batches can be under way at once (`submit`)."""
        return 1 if self.recurrent or self._hooks.wanted is not None else max(len(self.offload.gpus), 1)

    def submit(self, runs):
        """As `feed`, but returns while the batch is still running: a function that waits for its logits.

        After an error here or in the function, it is unknown which tokens of these texts were read.
        """
        state_rows = self.cells.free_state_rows(len(runs))
        step = self._filled(*self._padded(runs, state_rows))
        with oom_guard("logits"):
            read = step.submit()
        self._added(runs, state_rows)
        return lambda: read().reshape(-1, self.n_vocab)[:len(runs)]

    def _added(self, runs, state_rows):
        for (text, ids), state_row in zip(runs, state_rows, strict=True):
            if self._hooks.wanted is not None:
                text.exact = min(text.exact, len(text.ids))
            text.add(ids, state_row)

    def _key_rows(self, layer, n_tokens):
        """(first, rows): positions from `first` on lie in these cache rows of a layer, once the text has n_tokens more;
        None where several texts share the rows."""
        if self.text is None:
            return None
        mapping, end = self.text.mappings[self.description.blocks[layer].mixer.window], len(self.text.ids) + n_tokens
        first = max(0, end - mapping.n)
        return first, mapping.at(first, end)

    # ------------------------------------------------------------ results
    hidden, logits, kv = results.hidden, results.logits, results.kv
    embed_ids, rank_ids = results.embed_ids, results.rank_ids
    generate, infill, score = writing.generate, writing.infill, writing.score
    chat_prompt, chat = writing.chat_prompt, writing.chat
