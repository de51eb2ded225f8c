"""Decoders: texts that are read and continued; weights, caches and parts of their graphs are in decoder_graph.py.

A text is the ids that were read and the cache rows that hold what the layers know of them (networks/kv_cells.py).
"""
import math
from typing import NamedTuple

import numpy as np

import ggjit as gg
from ggjit.core.arguments import typed_methods
from ggjit.core.table import TABLE
from ggjit.core.versions import T_VERSION
from ggjit.cpu.cpu_plan import reserve_work
from ggjit.cpu.device import CPU
from ggjit.models.blocks.description import Loader, Scope
from ggjit.models.blocks.hparams import MAX_CTX, HParams, rope_options
from ggjit.models.core.checks import integer, one_of
from ggjit.models.core.other_options import GENERATION, takes_other_names
from ggjit.models.families.registry import DECODERS
from ggjit.models.networks import context_shift, predictor, saved_state, steering
from ggjit.models.networks import decoder_graph as graphs
from ggjit.models.networks.kv_cells import KVCells, whole_pages
from ggjit.models.networks.load_options import LoadOptions
from ggjit.models.networks.memory import MemoryTerm, expected_in, terms_of_leaves
from ggjit.models.networks.network import MAX_KEPT_PLANS, Network
from ggjit.models.networks.picture_tokens import PictureTokens
from ggjit.models.networks.pooling import RANK, Pooling
from ggjit.models.networks.vision import load_vision
from ggjit.models.text.chat_template import chat_prompt
from ggjit.models.text.generation import Generation
from ggjit.models.text.generations import Generations, is_many
from ggjit.models.text.infill import infill_ids
from ggjit.models.text.logprobs import ScoredText, checked_count, token_of
from ggjit.models.text.picture_prompt import ids_with_pictures, without_pictures
from ggjit.models.text.running_batch import LEAST_PIECE
from ggjit.models.text.sampling import OPTIONS
from ggjit.ops.core.errors import NotSupported, ParamError, TypeMismatch
from ggjit.ops.core.host_memory import empty, oom_guard
from ggjit.ops.core.progress import counted
from ggjit.ops.core.types import BY_NAME
from ggjit.ops.matmul.choices import columns_apart

KV_TYPES = ("F16", "F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
MAX_SEQS = 256                          # texts at once
MAX_CELLS = 1 << 30
APART = -1                              # in a graph's shape, in place of the number of page tables
STATES = "states"                       # in a graph's shape: logits, and the states of all tokens


class KeysValues(NamedTuple):
    """What a layer keeps of a text: (n_head_kv, n_tokens, d_head) each, from position `first` on."""
    keys: np.ndarray
    values: np.ndarray
    first: int


def _by_head(leaf, rows, n_head):
    """Rows of a cache as (n_head, n_rows, d_head)."""
    a = leaf.numpy().reshape(-1, leaf.ne[0])[np.asarray(rows)]
    return a.reshape(len(a), n_head, -1).transpose(1, 0, 2).astype(np.float32)


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
    cache_owner = None                  # mark of the Generation whose text is in the cache
    N_SEQS = 8                          # texts at once, where n_seqs does not say
    SEES = True                         # may it have a vision part?
    vision = pictures = None            # the Vision beside it, and the PictureTokens of what it saw
    predictor = None                    # guesses by a layer of its own, once they were asked for
    control, _control_ctx = {}, None    # {layer: leaf that is added to what it gives on} and their context
    set_lora, set_control_vectors = steering.set_lora, steering.set_control_vectors

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
            self._load_vision(self.options.vision)
        graphs.make_cache(self)
        self.reset()

    def _load_weights(self):
        graphs.load_weights(self)

    def _load_vision(self, path):
        self.vision, self.pictures = load_vision(path, self), PictureTokens(self.n_vocab)
        self.vision._code = self._code          # what it compiles counts there
        if self.vision.sees_all and self.vision.n_side ** 2 // self.vision.n_merge ** 2 > self.n_batch:
            raise ParamError(f"n_batch = {self.n_batch}: a picture of {self.vision.file.path} is read at once, and has "
                             f"{self.vision.n_side ** 2 // self.vision.n_merge ** 2} vectors")

    @property
    def _has_grid(self):
        """May a token's position be another number than that of the tokens before it?"""
        return self.vision is not None and self.vision.family.has_grid

    @property
    def _end_of_ids(self):
        return self.n_vocab if self.pictures is None else self.pictures.end

    def encode_image(self, image):
        """float32 (n, n_embd): what the decoder reads of a picture, all its tiles; load_model(path, vision=mmproj).

        image: a path, the bytes of a file, or an array uint8 (height, width, 3).  Of Qwen 3 VL: (n, n_embd (1 + k)),
        since its first k layers add vectors, too.

            m.encode_image("cat.jpg").shape

        Errors: NotSupported without a vision part; BadFile, ParamError, ShapeError, TypeMismatch for what is no
        picture.
        """
        if self.vision is None:
            raise NotSupported(f"{self.file.path} sees nothing alone; load_model(path, vision=\"mmproj.gguf\")")
        return np.concatenate(self.vision.encode(image))

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
        return [*self.kv_buffer.buffers, *(self.predictor.buffer.buffers if self.predictor else ())]

    def _memory_terms(self):
        return super()._memory_terms() + ([] if self.vision is None else self.vision.memory_terms())

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
        if self.vision is not None:
            self.vision.free()
        if self.predictor is not None:
            self.predictor.free()
        if hasattr(self, "kv_buffer"):
            self.kv_ctx.free()
            self.kv_buffer.free()

    # ------------------------------------------------------------ graphs
    def _build(self, ctx, shape):
        if shape[0] == context_shift.NAME:
            return context_shift.rotation_graph(self, ctx, shape[1:])
        if shape[0] == predictor.NAME:
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
            return inputs, graphs.logits(self, x), graphs.states(self, g, x, leaf.get("out_rows")), *g.states
        return inputs, (x if hidden else graphs.logits(self, x)), *g.states

    def _inputs(self, n_tokens, n_kv, n_out, n_seqs, n_tables, pictures):
        return graphs.inputs(self, n_tokens, n_kv, n_out, n_seqs, n_tables, pictures)

    def _made(self, shape):
        if len(shape) < 6 or shape[0] in (context_shift.NAME, predictor.NAME) or shape[5] in (0, 1):
            return super()._made(shape)
        with columns_apart():           # every text has the bits that it has alone
            return super()._made(shape)

    def largest_graph(self, all_logits=False):
        """A full batch that ends at the last cache row: what the compute arena is made for."""
        return self.graph(*self.full_batch(self._piece(all_logits), all_logits))

    def full_batch(self, n, all_rows=False, hidden=False):
        """The shape of a graph of n tokens that end at the last cache row."""
        n_kv = min(self.cells.most, whole_pages(self.n_ctx)) if self.cells.paged else self.cells.most
        return n, n_kv, n if all_rows else min(n, self.n_seqs), hidden

    def _piece(self, all_rows=False, hidden=False):
        """Tokens that are read at once."""
        n = min(self.n_batch, self.n_ctx)
        return n if self.arena is None else min(n, self.arena.piece(all_rows, hidden))

    @property
    def n_plans(self):
        n = self._piece()
        return min(len({self.cells.rounded(end) for end in range(n, self.n_ctx + n, n)}), MAX_KEPT_PLANS)

    def _keep_within(self, arena):
        self.arena, self.n_batch = arena, arena.piece()

    @property
    def least_piece(self):
        """Tokens that a batch of any length can be cut into so many of, and pieces that the same kernels compute; they
        hold a picture."""
        picture = self.vision is not None and self.vision.sees_all
        return max(2 * LEAST_PIECE, self.vision.n_side ** 2 // self.vision.n_merge ** 2 if picture else 0)

    def _shape_of(self, n_tokens):
        return n_tokens, self.cells.rounded(n_tokens), 1

    @property
    def _most_at_once(self):
        return self.n_batch

    def _common_shapes(self):
        """Decode, a short and a long prompt."""
        return [(n, self.cells.rounded(n), 1, False, 1) for n in (1, 4, 64) if n <= self.n_ctx]

    def _later_shapes(self):
        """Shapes of the steps that follow a prompt: single tokens."""
        return self._common_shapes()[:1]

    def _compared_shapes(self):
        cached = bool(self.description.windows)
        return [(n, n_kv * cached, n) for n, n_kv in ((1, 1), (2, 1), (1, 2)) if max(n, n_kv) <= self.n_ctx]

    # ------------------------------------------------------------ a batch
    def _fed_batch(self, runs, state_rows, all_rows=False, hidden=False, out=None):
        """Logits or hidden states of a batch; written to `out` where there is one: it is not copied then."""
        step = self._filled(runs, state_rows, all_rows, hidden)
        n = self.pooling.n_scores if hidden == RANK else self.n_embd if hidden else self.n_vocab
        rows = step.run().reshape(-1, n)
        if out is None:
            out = empty(rows.shape, np.float32, "hidden states" if hidden else "logits")
        out[...] = rows
        self._show(runs, step, hidden)
        return out

    def _predicts(self, runs, hidden):
        """Are the states of this batch kept for guesses?"""
        return self.predictor is not None and not hidden and len(runs) == 1 and runs[0][0] is self.text \
            and self._hooks.wanted is None

    def _show(self, runs, step, hidden=False):
        """Keep the states of a batch for guesses, where they are asked for."""
        if self._predicts(runs, hidden):
            text, ids = runs[0]
            self.predictor.saw(len(text.ids), np.asarray(ids).tolist(), step.plan.view(step.more[0]))

    def predicting(self):
        """The Predictor that guesses by the network's own layer.  Errors: NotSupported."""
        if self.description.next_token is None:
            raise NotSupported(f"{self.file.path} has no layer that guesses tokens further on, or none that is "
                               f"computed here; speculative=\"lookup\" needs none")
        if self.scheduler is not None:
            raise NotSupported("speculative=\"mtp\" is computed on the CPU alone; leave n_gpu_layers and devices out")
        if self.predictor is None:
            with self._lock:
                self.predictor = predictor.Predictor(self)
                self.reset()                # of what was read before no states are known
        return self.predictor

    def _filled(self, runs, state_rows, all_rows=False, hidden=False, apart=False):
        """The planned graph for a batch, with its inputs."""
        n_tables = self._n_tables(runs)
        step = self._step(self._shape(runs, n_tables, all_rows, hidden, apart))
        self._fill(step.inputs, runs, state_rows, n_tables)
        return step

    def _shape(self, runs, n_tables, all_rows=False, hidden=False, apart=False):
        """The shape of a batch's graph.  apart: of one text, each token with the bits that it has alone."""
        n, n_runs = sum([len(ids) for _, ids in runs]), len(runs)
        hidden = STATES if self._predicts(runs, hidden) else hidden
        shape = n, (self.cells.n_keys if n_tables else self.cells.n_kv)(runs), n if all_rows else n_runs, hidden
        pictures = self.vision is not None and any((np.asarray(ids) >= self.n_vocab).any() for _, ids in runs)
        more = (APART,) if apart else (n_tables,) if n_tables or pictures else ()
        return *shape, n_runs if self.recurrent else 1, *more, *[True] * pictures

    def _n_tables(self, runs):
        """Page tables of a batch: one of a text, or one for each of several that have a token each; 0: none, since the
        rows of a text follow its positions, or since texts have several tokens."""
        if not self.cells.paged or self._hooks.wanted is not None:
            return 0
        if len(runs) == 1:
            return int(runs[0][0] is not self.text)
        return len(runs) if all(len(ids) == 1 for _, ids in runs) else 0

    def _fill(self, inputs, runs, state_rows, n_tables=0):
        at, tokens, positions = 0, inputs["tokens"], inputs.get("positions")
        for i, (text, ids) in enumerate(runs):
            n, past = len(ids), len(text.ids)
            end = at + n
            tokens[at:end] = ids
            if "picture" in inputs:
                tokens[at:end][ids >= self.n_vocab] = 0
                self.pictures.fill(ids, inputs["picture"][at:end], inputs["is_text"][at:end])
            if positions is not None:
                first = past - self.pictures.saved(text) if self._has_grid else past
                if n == 1:
                    positions[at] = first
                else:
                    positions[at:end] = np.arange(first, first + n)
                if "parts" in inputs:
                    parts, _ = self.pictures.positions(ids, past, past - first)
                    inputs["parts"].reshape(4, -1)[:3, at:end] = parts
            for more in self.description.inputs:
                more.fill(inputs, at, text, ids)
            if "temperature" in inputs:
                inputs["temperature"][at:end, 0, 0] = self.description.temperatures(past, n)
            if n_tables:
                self.cells.place_pages(inputs, at, text, n, i)
            else:
                self.cells.place(inputs, at, text, n)
            if "picture" in inputs and self.vision.sees_all:
                for start, stop in self.pictures.runs(ids):
                    self.cells.open_mask(inputs, at, text, start, stop, bool(n_tables))
            at = end
        if self.recurrent:
            inputs["state_row"][:], inputs["next_state_row"][:] = [text.state_row for text, _ in runs], state_rows
        if "out_rows" in inputs:
            inputs["out_rows"][:] = np.cumsum([len(ids) for _, ids in runs]) - 1

    # ------------------------------------------------------------ the text
    def reset(self):
        """Forget the text so far; the next tokens start at position 0."""
        self.cells.clear()
        self.text, self.cache_owner = self.cells.open(self.n_ctx), None
        self._read_with = self._weight_versions()

    def _weight_versions(self):
        """Grows when a weight is written to: what was read before is not what the network computes now."""
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
        What was read while values of it were kept or replaced (models/networks/hooks.py), or before a weight was
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
        """Make the plan that `decode_apart` of n ids uses next."""
        with self._lock:
            self._step(self._shape([(self.text, range(n))], 0, True, apart=True))

    @property
    def is_watched(self):
        """Are values of it kept or replaced (models/networks/hooks.py)?"""
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
        rows = self._rows(len(ids), hidden) if all_rows else None
        if not n and text is self.text:
            self._read_with = self._weight_versions()
        if self._hooks.wanted is not None and len(ids):
            text.exact, text.hooked = min(text.exact, n), min(text.hooked, n)
        try:
            at = 0
            for part in counted("reading batches of tokens", self._batches(ids, self._piece(all_rows, hidden))):
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

    def _batches(self, ids, n):
        """[ids of each batch], n or less; a picture whose vectors see each other is not cut.  Within an arena those of
        the batch that was asked for are cut into equal pieces, so that none is short where the batch was not."""
        if self.arena is not None:
            whole = min(self.options.n_batch, self.n_ctx)
            batches = np.split(ids, range(whole, len(ids), whole)) if len(ids) else []
            if self.vision is None or not self.vision.sees_all:
                return [piece for batch in batches for piece in np.array_split(batch, -(-len(batch) // n))]
        ends = list(range(n, len(ids), n))
        if ends and self.vision is not None and self.vision.sees_all:
            ends, whole = [], self.pictures.runs(ids)
            while (end := (ends[-1] if ends else 0) + n) < len(ids):
                ends.append(next((a for a, b in whole if a < end < b), end))
        return np.split(ids, ends) if len(ids) else []

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
        """As `feed`, but the batch is on its way when this returns: a function that waits for its logits.

        After an error, of this or of the function, what was read of these texts is not known.
        """
        state_rows = self.cells.free_state_rows(len(runs))
        step = self._filled(*self._padded(runs, state_rows))
        with oom_guard("logits"):
            read = step.submit()
        self._added(runs, state_rows)
        return lambda: read().reshape(-1, self.n_vocab)[:len(runs)]

    def _padded(self, runs, state_rows):
        """Runs of one token, and their state_rows, up to a power of two, beyond eight to a quarter of one."""
        n = len(runs)
        step = max(1 << (n - 1).bit_length() >> 2, 1) if n > 8 else 1 << (n - 1).bit_length()
        more = -n % step if all(len(ids) == 1 for _, ids in runs) else 0
        return runs + runs[-1:] * more, state_rows + state_rows[-1:] * more

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

    def kv(self, layer):
        """KeysValues of the text so far in one layer: `.keys` (n_head_kv, n_tokens, d_head), `.values`, `.first`, the
        position of the first that the layer keeps; float32, as the cache holds them (keys after RoPE).

            m.logits("a text"); m.kv(3).keys[0]             # those of head 0

        Errors: ParamError (a number that is no layer; no text was read), NotSupported for layers without keys.
        """
        layer = integer("layer", layer, 0, self.n_layer - 1)
        mixer = self.description.blocks[layer].mixer
        kept = {t.name.rpartition(" ")[0]: t for t in self.cache[layer]}
        if "k cache" not in kept or not hasattr(mixer, "n_head_kv"):
            raise NotSupported(f"layer {layer} of this {self.file.arch} network keeps no keys and values of its own")
        with self._lock:
            if not self.n_past:
                raise ParamError("kv: no text was read yet; m.logits(text) reads one")
            first, rows = self._key_rows(layer, 0)
            return KeysValues(*(_by_head(kept[name], rows, mixer.n_head_kv) for name in ("k cache", "v cache")), first)

    # ------------------------------------------------------------ results
    def hidden(self, ids):
        """(n, dim) float32: what the last norm makes of every one of `ids`, or of a text's tokens, from
        position 0; the text so far is
        forgotten.

        Errors: ParamError for weights that are NaN, IndexRangeError for ids outside the vocabulary.
        """
        with self._lock:
            ids = self._checked_ids(ids, self.n_ctx)
            self.reset()
            return self._finite(self._fed(ids, True, hidden=True), "the hidden states")

    def embed_ids(self, ids):
        """The vector of one text given as token ids; (dim,) float32, of length 1.  The text so far is forgotten.

        Errors: NotSupported for a file that says no pooling, ParamError for weights that are NaN.
        """
        kind = self.pooling.of_embedding()
        with self._lock:
            ids = self._checked_ids(ids, self.n_ctx)
            self.reset()
            rows = self._fed(ids, kind != "last", hidden=True)
            if kind == "mean":
                e = rows.sum(0, dtype=np.float64) / len(ids)
            else:
                e = rows[0 if kind == "cls" else -1]
            e = self._finite(e, "the text's numbers")
            return (e / max(np.linalg.norm(e.astype(np.float64)), 1e-12)).astype(np.float32)

    def rank_ids(self, ids, n_first=None):
        """The classifier's numbers of one text given as token ids; (n_scores,) float32.  The text so far is forgotten.

        Errors: as `embed_ids`; NotSupported for a model without a classifier.
        """
        self.pooling.check_ranks()
        with self._lock:
            ids = self._checked_ids(ids, self.n_ctx)
            self.reset()
            return self._finite(self._fed(ids, False, hidden=RANK)[-1], "the text's scores")

    def logits(self, ids):
        """(n, n_vocab) float32: logits after every one of `ids`, or of a text's tokens, from position 0; the text so
        far is forgotten.

        Errors: ParamError for weights that are NaN, IndexRangeError for ids outside the vocabulary.
        """
        with self._lock:
            ids = self._checked_ids(ids, self.n_ctx)
            self.reset()
            return self._finite(self.decode(ids, all_logits=True), "the logits")

    @takes_other_names(GENERATION)
    def generate(self, prompt, n_predict=64, temp=0.0, stop=(), ignore_eos=False, images=(), **options):
        """Iterator over pieces of text that continue `prompt`; `.stats` afterwards, with "stop_reason".

        n_predict: tokens at most, -1 for no limit.  temp: temperature; 0 always takes the likeliest token.  stop: texts
        or ids that end it; no part of such a text comes out.  ignore_eos: the model's own ends are never chosen.
        Others: llama.cpp's options and defaults of sampling (top_k=40, top_p=0.95, min_p=0.05, seed ...), listed in
        models/text/sampling.py.
        grammar: GBNF text that the answer fits; json_schema: a JSON Schema that it fits, as a dict or text;
        grammar_triggers: texts, compiled patterns and ids from which on it fits (before the first all is allowed).
        logprobs: a number k; then every one of `.tokens` has the log-probability that the model gave it, before
        sampling and grammars, and the k likeliest tokens there; stats["logprobs"] holds them for JSON.
        `.text`: the whole text, `.tokens`: its tokens (models/text/generation.py); in a notebook cell both are shown.
        speculative: "lookup" (the text itself), "mtp" (a layer of the model's own that was trained to guess, where the
        file has one) or a smaller Decoder of the same vocabulary guess what follows; several tokens are
        computed at once, and those that are right are kept: the text is the same, faster where guesses come true; where
        they do not pay, they end.  stats["drafted_tokens"], stats["accepted_tokens"] count them.
        cache_prompt=False: what the prompt shares with the text before it is read again, too.  context_shift=True: when
        the context is full, half of what follows the first n_keep (0) tokens is dropped; else the text ends there.
        A list of prompts: an iterator over (number, piece), up to n_seqs texts at once; `runs[i].stats`, `runs.texts`.
        images: pictures, as encode_image takes them, at the marks "<__media__>" of the prompt, or before it.
        """
        if len(images):
            if not isinstance(prompt, str):
                raise TypeMismatch(f"pictures belong to a text, got {type(prompt).__name__}; a call for each prompt")
            prompt = ids_with_pictures(self, prompt, images)
        kind = Generations if is_many(prompt) else Generation
        return kind(self, prompt, n_predict, stop, ignore_eos, temp=temp, **options)

    def infill(self, before, after, n_predict=64, others=(), suffix_first=False, **options):
        """Iterator over pieces of the text between `before` and `after`, by a model that was trained to fill in the
        middle (mostly of code).

            m.infill("def add(a, b):\\n    return ", "\\n\\nprint(add(1, 2))").text

        others: (name, text) of other files that it may look at.  suffix_first: the order in which some models were
        trained.  options: as in `generate`.
        Errors: those of `generate`; NotSupported for a vocabulary without the tokens for it.
        """
        ids = infill_ids(self.tokenizer, before, after, others, suffix_first, self.file.path)
        return self.generate(ids, n_predict, **options)

    def score(self, texts, logprobs=0):
        """A ScoredText of each text: `.tokens` with the log-probability of each given all before it, `.logprob`, their
        sum in nats, `.perplexity`.  The first token has none: nothing is before it.  The text so far is forgotten.

        texts: a list of texts or of lists of token ids; one text or list of ids gives one ScoredText.
        logprobs: how many alternatives each token has, 0 for none.
        Errors: ParamError for an empty list and a text that is longer than the context, TypeMismatch, IndexRangeError.

            m.score(["It was a truth", "It truth a was"])[0].logprob
        """
        n_alternatives = checked_count(0 if logprobs is None else logprobs)
        many = is_many(texts)
        if not isinstance(texts, str | list | tuple) or not len(texts):
            raise ParamError("score takes a text that is not empty, or a list of texts or token ids with at least one")
        all_ids = [self._checked_ids(x, self.n_ctx) for x in (texts if many else [texts])]
        scored = [self._scored(ids, n_alternatives) for ids in all_ids]
        return scored if many else scored[0]

    def _scored(self, ids, n_alternatives):
        tokens = [token_of(self.tokenizer, int(ids[0]))]
        with self._lock:
            self.reset()
            for start in range(0, len(ids), self.n_batch):
                logits = self._finite(self.decode(ids[start:start + self.n_batch], all_logits=True), "the logits")
                following = ids[start + 1:start + 1 + len(logits)].tolist()
                tokens += [token_of(self.tokenizer, id, row, n_alternatives)
                           for id, row in zip(following, logits, strict=False)]
        return ScoredText(tokens)

    def chat_prompt(self, messages, tools=None, add_generation_prompt=True, template=None, **variables):
        """(text, ids) of a conversation, a list of {"role": ..., "content": ...}, by the chat template in the file.

        tools, variables: passed on to it.  template: another one, as Jinja text or by name ("chatml", one in the file).
        A message may hold pictures: {"type": "image", "image": path or array} among the parts of its content.
        Errors: ParamError for messages that do not fit, ModelError for a template that is missing or fails.
        """
        messages, pictures = without_pictures(messages) if isinstance(messages, list | tuple) else (messages, [])
        prompt = chat_prompt(self.file, self.tokenizer, messages, tools, add_generation_prompt, template, **variables)
        if not pictures:
            return prompt
        ids = ids_with_pictures(self, prompt.text, pictures, special=True)
        bos = [self.tokenizer.bos_id] if self.tokenizer.add_bos else []
        return prompt._replace(ids=ids if ids[:1] == bos else bos + ids)

    @takes_other_names(GENERATION)
    def chat(self, messages, n_predict=-1, tools=None, template=None, variables=None, **options):
        """Iterator over the pieces of the answer to a conversation, as `generate` gives them.

        messages, tools, template, variables: as in `chat_prompt`.  options: as in `generate`, but that the temperature
        is llama.cpp's 0.8 unless given.
        """
        ids = self.chat_prompt(messages, tools, template=template, **(variables or {})).ids
        return self.generate(ids, n_predict, **{"temp": OPTIONS["temp"].default, **options})
