"""The base class of all networks: the file, its weights, its tokenizer, and plans kept for each input shape."""
import dataclasses
import time
from typing import TYPE_CHECKING

import numpy as np

from ggjit.core.arguments import typed_methods
from ggjit.core.kernels_ahead import followed_by
from ggjit.core.process_memory import process_memory, taken_now
from ggjit.core.run_lock import RunLock
from ggjit.cpu.cpu_plan import likely_parts, needs, work_memory
from ggjit.graphs.allocator import GraphAllocator
from ggjit.graphs.graph import Graph
from ggjit.graphs.plan_cache import PlanCache
from ggjit.models.blocks.hparams import HParams
from ggjit.models.core.checks import FIND_BROKEN, BrokenValues, integer
from ggjit.models.files.adapter import adapters_of
from ggjit.models.files.gguf import StringArray
from ggjit.models.files.quantized_part import quantized_file
from ggjit.models.files.weights import Weights
from ggjit.models.networks.base import token_ids, vectors
from ggjit.models.networks.base.arena import ComputeArena
from ggjit.models.networks.base.load_options import LoadOptions
from ggjit.models.networks.base.memory import (
    MAPPED,
    OF_ALL,
    TOKENIZER,
    WORK,
    Growth,
    HandedOut,
    MemoryUse,
    expected_in,
    process_term,
    term_of,
    terms_of_buffers,
    unique_memory,
)
from ggjit.models.networks.base.model_table import model_html
from ggjit.models.networks.base.only_some import OnlySome
from ggjit.models.networks.base.other_methods import no_items, of_a_model
from ggjit.models.networks.base.strict import refuse_unused
from ggjit.models.networks.inside import inside
from ggjit.models.networks.inside.hooks import Hooks
from ggjit.models.networks.placement.device_map import DeviceMap
from ggjit.models.networks.placement.layout import repacked
from ggjit.models.networks.placement.offload import choose_backends, offload, scheduler_of
from ggjit.ops.core.errors import ModelError, NoSuchAttribute, NotSupported, ParamError, StaleHandle, TypeMismatch
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.printable import printable
from ggjit.ops.core.record import OP
from ggjit.tensors.context import Context

PUBLIC = ("attention", "attribution", "backend", "capture", "capturing", "chat", "decode", "description", "detokenize",
          "embed", "encode", "encode_audio", "encode_image", "explain", "file", "free", "generate", "graph", "hidden",
          "hidden_states", "infill", "kv", "load_state", "logit_lens", "logits", "memory", "n_ctx", "n_past", "names",
          "patch", "quantize", "rerank", "reset", "save_state", "score", "set_control_vectors", "set_lora", "tokenize",
          "tokenizer", "warm_up", "weights")
MAX_KEPT_PLANS = 24


class Step:
    """One graph of a network for one input shape, planned: fill `inputs`, `run()`, read `output`."""

    def __init__(self, ctx, inputs, result, plan, more=()):
        """more: tensors beside the result that the graph computes."""
        self.ctx, self.inputs, self.result, self.plan, self.more = ctx, inputs, result, plan, more
        self._resolved, self._array = None, None

    def run(self):
        """Replay; the result as an array that stays valid until the network runs again."""
        self.plan.compute()
        if self._resolved != self.plan.resolved:        # the addresses moved, or this is the first run
            self._resolved, self._array = self.plan.resolved, self.plan.view(self.result)
        return self._array

    def submit(self):
        """Start a run on several devices; returns a function that waits for it.  `inputs` may be filled at once."""
        return self.plan.submit(self.result)


def _is_kept(y):
    """Does `y` write into what is kept between calls, which nothing else of its graph reads?"""
    return y.op is OP.SET_ROWS


@typed_methods
class Network(OnlySome):
    """Base of the architectures.  Subclasses read hyperparameters and weights in `__init__` and give `_build`.

    backend: of all that is in no GPU layer; scheduler: what runs a network on several devices, else None
    (`print(m.scheduler.explain())` tells which backend computes which node).
    """
    # products have many columns at a time: all weights except super-block types are repacked
    REPACKS = False
    CAUSAL = True                   # does attention look back only?
    AT_ONCE = False                 # are all tokens of an answer written at once?
    last_speed = None               # {"prompt", "decode": tokens a second} of the last text that was generated
    flash = True                    # may one kernel compute attention?
    arena = None                    # the ComputeArena that computed results have to lie in
    pooling = None                  # how the tokens of a text become one row (parts/pooling.py)

    def __init__(self, file, options=None):
        """options: LoadOptions."""
        options = self.options = LoadOptions() if options is None else options
        repack, n_gpu_layers, devices = options.repack, options.n_gpu_layers, options.devices
        if repack is not None and not isinstance(repack, bool | np.bool_):
            raise ParamError(f"repack must be True, False or None (as is best for the architecture), got {repack!r}")
        self.file = file
        self._before, self._code, self.growth_of_text = options.process, Growth(options.process), Growth()
        self._handed_out = HandedOut()
        self.backend, gpu = choose_backends(options.backend, options.n_threads, None if options.gpus else n_gpu_layers)
        gpus = options.gpus or ([] if gpu is None else [gpu])
        self.offload = DeviceMap(devices, self) if devices is not None else \
            offload(gpus, n_gpu_layers, HParams(file).n_layer, options.cpu_moe, options.override_tensor,
                    file.tensors)
        self.scheduler = None
        self.weights = Weights(file, self.backend.device)
        self._steps = PlanCache(MAX_KEPT_PLANS)
        self._lock = RunLock()
        self._hooks = Hooks()
        self._freed = False
        self._tokenizer = None
        self._allocator = GraphAllocator(self.backend)
        try:
            self.weights.adapters = adapters_of(options.lora, file, self.backend.device)
            self._load()
            self.scheduler = scheduler_of(self.backend, self.offload.gpus)
            self._check_vocabulary()
            for adapter in self.weights.adapters:
                adapter.refuse_unused()
            if options.strict:
                refuse_unused(file, self.weights.used, self.CAUSAL)
            self._repack(repack)
            for gpu in self.offload.gpus:
                self._move(gpu, repack)
            for adapter in self.weights.adapters:
                self._move_adapter(adapter)
            if options.arena is not None:
                self._keep_within(ComputeArena(self, options.arena))
            if options.reserve:
                self._reserve()
        except BaseException:
            self.free()
            raise
        self._loaded()
        self.load_seconds = time.perf_counter() - options.started

    def _loaded(self):
        """Count the growth of the process while loading as code, apart from the memory that loading fills."""
        self._code.end()
        filled = [b for b in self._filled_buffers() if b._arena is not None]
        known = term_of("filled", [b._arena for b in filled])
        self._code.known(known.anonymous, known.file)

    def _filled_buffers(self):
        """Those that loading made; adapters that are no file existed before this model."""
        adapters = [b for a in self.weights.adapters if a.is_file for b in a.copies]
        return *self.weights.buffers, *self.weights.copies, *adapters, *self._kept_buffers(), *self._compute_buffers()

    def _repack(self, asked, move=True):
        """move=False: the repacked weights get places but no values, in a process that only plans."""
        here = [t for t in self._matrices() if not self.offload.has(t.name)]
        chosen = repacked(here, asked, self.REPACKS, self.backend.device)
        self.weights.repack(chosen, getattr(self.backend, "n_threads", 1) if move else 0)

    def _move(self, gpu, asked):
        """Move what `gpu` has; matrices into its repacked memory, where it has such and they shall lie there."""
        there = [t for t in self._matrices() if self.offload.backend_of(t.name) is gpu]
        buft = next((b for b in gpu.device.extra_buffer_types() if b.name.endswith("_REPACK")), None)
        chosen = repacked(there, asked, self.REPACKS, gpu.device) if buft is not None else ()
        names = {t.name for t in chosen if buft.takes(t)}
        if names:
            self.weights.move(names.__contains__, buft)
        self.weights.move(lambda name: self.offload.backend_of(name) is gpu and name not in names,
                          gpu.default_buffer_type)

    def _move_adapter(self, adapter):
        """Copy what it has of GPU layers into the memory of these GPUs.  Errors: OutOfMemory."""
        for gpu in self.offload.gpus:
            adapter.move(lambda name, gpu=gpu: self.offload.backend_of(name) is gpu, gpu.default_buffer_type)

    def _take_control(self, other):
        """Compute with the control vectors of another model of this kind."""

    def _load(self):
        """Read hyperparameters, check every weight, allocate what lives as long as the network."""
        raise NotSupported(f"{type(self).__name__} does not load")

    def _kept_nbytes(self, layer):
        """Bytes that a layer keeps of a text."""
        return 0

    def explain(self):
        """Text: which device has which layers and how fast that is expected to be (with `devices`), or the splits of
        the last graph.  Errors: ParamError for a network on one backend."""
        if isinstance(self.offload, DeviceMap):
            return self.offload.explain()
        if self.scheduler is None:
            raise ParamError(f"{self!r} lies on one backend: there is nothing to explain")
        return str(self.scheduler.explain())

    def _matrices(self):
        """The weights that only products and get_rows read."""
        return []

    def _reserve(self):
        """Set memory aside for the largest graph, where it is known."""

    def _build(self, ctx, shape):
        """(inputs: {name: ndarray}, result tensor, more tensors to compute...) of the graph for `shape`; nodes that
        write into what is kept between calls are among them."""
        raise NotSupported(f"{type(self).__name__} builds no graph")

    # ------------------------------------------------------------ text
    if not TYPE_CHECKING:               # checkers would take every attribute for granted
        def __getattr__(self, name):
            """An AttributeError with a hint; called for names that a network lacks."""
            hint = "" if name.startswith("_") else of_a_model(self, name)
            raise NoSuchAttribute(f"{type(self).__name__} has no attribute {name!r}{hint}", name=name, obj=self)

    def __call__(self, prompt, **options):
        """`m("a text")` is what the model is for: `m.generate(text, ...)`, or `m.embed([text])` of an encoder.

        Errors: TypeMismatch for token ids, of which there are several meanings.
        """
        if not isinstance(prompt, str):
            raise TypeMismatch(f"m(...) takes a text, got {type(prompt).__name__}; of token ids, m.logits(ids) gives "
                               f"the logits and m.generate(ids) the text that follows")
        return self.generate(prompt, **options) if self.CAUSAL else self.embed([prompt], **options)[0]

    __getitem__ = no_items

    tokenizer, _end_of_ids = property(token_ids.tokenizer), property(token_ids.end_of_ids)
    tokenize, detokenize = token_ids.tokenize, token_ids.detokenize
    _ids_of_text, _checked_ids = token_ids.ids_of_text, token_ids.checked_ids

    # ------------------------------------------------------------ plans
    def _step(self, shape):
        """The planned graph for `shape`; the most recent ones are kept."""
        key, wanted = self.backend.plan_settings, self._hooks.wanted
        owner = shape if wanted is None else (shape, wanted)
        return self._steps.get(owner, lambda step: key, lambda: self._made(shape))

    def _made(self, shape):
        with self._code, self._code.without(self._compute_memory):
            ctx, inputs, results = self._built(shape)
            with followed_by(self._later_kernels):
                if self._hooks.wanted is None:
                    graph = self.within_arena(Graph(*results, order="together"))
                    results, plan = graph.outputs, self._plan(graph)
                else:
                    plan = inside.hooked_plan(self, inputs, results)
            result, *more = [y for y in results if not _is_kept(y)] or results
            self._steps.make_room()             # here, since the memory of a plan that goes is no growth any more
            return Step(ctx, inputs, result, plan, more)

    def within_arena(self, graph):
        """`graph`, or one that computes the same within `arena`.  Errors: BudgetError."""
        return graph if self.arena is None else self.arena.within(graph)

    def _keep_within(self, arena):
        self.arena = arena

    def _plan(self, graph):
        """A plan of `graph`.  All share one arena, since they never run at the same time."""
        if self.scheduler is not None:
            return self.offload.plan(self.scheduler, graph)
        self._place(graph)
        return self.backend.graph_plan_create(graph)

    def _place(self, graph):
        held = self._allocator.buffer_size()
        self._allocator.alloc_graph(graph)
        if self._allocator.buffer_size() != held:
            self._steps.clear()                 # kept plans have addresses in the arena that was replaced

    @property
    def compute_nbytes(self):
        """Bytes of the arena for computed tensors, on all devices."""
        if self.scheduler is not None:
            return sum(map(self.scheduler.buffer_size, self.scheduler.backends))
        return self._allocator.buffer_size()

    def _built(self, shape):
        ctx = Context()
        with ctx, oom_guard(f"the inputs of a graph of shape {shape} (less with a smaller n_ctx or n_batch)"):
            inputs, *results = self._build(ctx, shape)
        # what is kept is computed first: the memory of the values that are written there is free from then on
        return ctx, inputs, sorted(results, key=_is_kept, reverse=True)

    def graph(self, *shape):
        """The graph for a shape, unplanned: for measuring, drawing and reserving.

            m.graph(32)                 # of a text of 32 tokens

        Errors: ParamError for a length outside the context.
        """
        if not shape:
            return self.largest_graph()
        if len(shape) == 1 and not dataclasses.is_dataclass(shape[0]):
            shape = self._shape_of(integer("graph: the number of tokens", shape[0], 1, self._most_at_once))
        return Graph(*self._built(shape)[2], order="together")

    def _shape_of(self, n_tokens):
        """The shape of the graph of a text of that many tokens."""
        return (n_tokens,)

    @property
    def _most_at_once(self):
        """Tokens of one graph."""
        return self.n_ctx

    def as_graph(self):
        """(graph, {"weights": bytes, "KV cache": bytes}) of the most tokens at once: what gg.measure(m) shows."""
        return self.largest_graph(), {"weights": self.weights.nbytes, "KV cache": getattr(self, "kv_nbytes", 0)}

    def other_graphs(self):
        """Graphs that read weights which the largest one does not."""
        return []

    def warm_up(self):
        """Plan graphs of common sizes, which compiles their kernels into the cache."""
        for shape in self._common_shapes():
            self._step(shape)

    def _common_shapes(self):
        return ()

    @property
    def n_plans(self):
        """Plans that are kept once a text as long as the context was read."""
        return 1

    @property
    def n_rows_held(self):
        """Rows of logits that exist at once."""
        return int(self.CAUSAL)

    def _later_shapes(self):
        """Shapes of graphs that will be planned after the first one."""
        return ()

    def _text_shapes(self):
        """Shapes of the graphs that read one long text; () where that is the largest graph."""
        return ()

    def _later_kernels(self):
        """Kernels that graphs of these shapes will need, for the progress bar of compiling.  [] on several devices."""
        if self.scheduler is not None or self._hooks.wanted is not None:
            return []
        return [k for shape in self._later_shapes()
                for k in needs(likely_parts(self.graph(*shape), getattr(self.backend, "n_threads", 1)))]

    # ------------------------------------------------------------ memory
    def memory(self):
        """A MemoryUse: the bytes that the model takes from this process now, term by term, beside the process's own
        figures.

            use = m.memory()
            use.anonymous, use.file, use.terms["KV cache"]
            print(use)

        What it will take is known before it is loaded: `ggjit peak`.  Pages count when they are first used: memory set
        aside for a prompt is taken by the first one.  Errors: StaleHandle for a network that was freed.
        """
        with self._lock:
            if self._freed:
                raise StaleHandle(f"{self!r} was freed; load the model again")
            return MemoryUse(self._memory_terms(), process_memory(), str(self.file.path))

    def _memory_terms(self):
        adapters = [b for a in self.weights.adapters for b in a.buffers]
        inputs = {id(b): b for step in self._steps.plans() for b in step.ctx.buffers}
        return [term_of("weights", [b._arena for b in self.weights.buffers], about=MAPPED),
                *terms_of_buffers("weights", self.weights.moved),
                *terms_of_buffers("repacked weights", self.weights.repack_buffers, MAPPED * self.weights.maps_layout),
                *terms_of_buffers("adapters", adapters), *self._kept_terms(),
                *terms_of_buffers("compute", self._compute_buffers()),
                term_of(WORK, work_memory(), about=OF_ALL),
                term_of("inputs", unique_memory([b._arena for b in inputs.values() if b._arena is not None])),
                term_of("logits", self._handed_out.arrays(), about="in use by the caller"),
                self.growth_of_text.term(TOKENIZER), *self._code.terms_with_free("code", self._before),
                process_term(self._before)]

    def _kept_buffers(self):
        """Buffers that keep state of texts, such as KV caches."""
        return ()

    def _kept_terms(self):
        return terms_of_buffers("KV cache", self._kept_buffers())

    def expected_kept(self):
        """[MemoryTerm] of what will be kept of texts; for a network on the NULL device."""
        return expected_in("KV cache", self._kept_buffers(), self)

    def _compute_buffers(self):
        memory = self.scheduler.memory if self.scheduler is not None else self._allocator._memory
        return [b for chunks in memory.chunks for b in chunks]

    def _compute_memory(self):
        return term_of("compute", [b._arena for b in self._compute_buffers() if b._arena is not None])

    def free(self):
        """Give weights, caches and plans back; waits for a computation.  A second call does nothing."""
        with self._lock:
            self._hooks.refuse_nesting()
            self._freed = True
            self._steps.clear()
            (self.scheduler or self._allocator).free()
            for part in (*self.weights.adapters, self.weights):
                part.free()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.free()

    def __repr__(self):
        return f"<{type(self).__name__} {printable(self.file.path)} on {self.scheduler or self.backend!r}>"

    def _check_vocabulary(self):
        """`vocab_size` is the number of rows of the embedding; there are not more words than rows."""
        size = self.file.arch_get("vocab_size", self.n_vocab, int)
        words = self.file.get("tokenizer.ggml.tokens", (), StringArray)
        if size != self.n_vocab or len(words) > self.n_vocab:
            raise ModelError(f"{self.file.path}: {self.file.arch}.vocab_size = {size} and {len(words)} words, but "
                             f"token_embd.weight has {self.n_vocab} rows; convert the model again")

    def _finite(self, values, what):
        """`values`, or the error that `generate` gives for weights that are not numbers."""
        if not np.isfinite(values.max()):               # of NaN and others it is NaN
            raise BrokenValues(f"{what} hold NaN or infinity: the weights or the computation are broken; "
                               f"{FIND_BROKEN}")
        return values

    def _repr_html_(self):
        return model_html(self)

    def __dir__(self):
        """For `m.<TAB>`: what users call, and nothing of the machinery."""
        return sorted(name for name in PUBLIC if hasattr(type(self), name) or name in self.__dict__)

    def __reduce__(self):
        raise TypeMismatch(f"{type(self).__name__} of {self.file.path} cannot be copied or pickled: its weights are "
                           f"mapped in this process; pass the path on, and load_model it there")

    def kv(self, layer):
        raise NotSupported(f"{self.file.arch} models keep no keys and values; load a llama model")

    # ------------------------------------------------------------ looking inside
    names, capture, capturing, patch = inside.names, inside.capture, inside.capturing, inside.patch
    attention, hidden_states, logit_lens = inside.attention, inside.hidden_states, inside.logit_lens
    attribution = inside.attribution
    _named, _spec = inside.named_in, inside.spec_of

    def _compared_shapes(self):
        """Shapes of three graphs, from which the axes of named tensors are told: of one token, of two tokens, and of
        one token that looks at two cache rows."""
        raise NotSupported(f"{type(self).__name__} has no named tensors")

    @property
    def _flash(self):
        """May one kernel compute attention in the graph that is built now?"""
        wanted = self._hooks.wanted
        return self.flash and (wanted is None or wanted.flash)

    def quantize(self, type, keep=()):
        """The same model with its matrices in another type, in memory: to compare types without writing files.

            perplexity(m.quantize("Q4_0"), text)            # or a type of gg.define_type

        type: one that needs no importances.  keep: a regular expression, or several, of names of tensors that stay as
        they are; so do vectors, norms, routers, and rows that are no multiple of the type's block.  What is quantised
        already is quantised again.  This model stays as it is; adapters and control vectors are those it has now.
        Errors: ParamError, TypeMismatch, OutOfMemory.
        """
        file, lora = quantized_file(self.file, type, keep), [a.again for a in self.weights.adapters]
        other = self.__class__(file, dataclasses.replace(self.options, lora=lora, started=time.perf_counter(),
                                                         process=taken_now()))
        other._take_control(self)
        return other

    # ------------------------------------------------------------ texts as vectors and scores
    embed, rerank = vectors.embed, vectors.rerank
