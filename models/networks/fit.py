"""gg.fit: the best settings of a model within a memory limit, planned without trying them.

    found = fit("model.gguf", memory="8G")
    found.options                       # for load_model: context, batch, cache type, repacking, layers by device
    print(found)                        # the choice, and of every other setting why not
    found.plot()                        # bytes by context, and the limit

What is preferred, first to last:

    context     the one that is asked for; else the longest that the model was trained for and that fits
    cache       F16, then Q8_0, then Q4_0, which round keys and values
    weights     in memory; last of all streamed: mapped, and read again from the file for every token
    devices     all layers there; all but experts; as many layers as fit
    repacked    matrices in the layout that products read faster, where that pays
    batch       512 tokens, then less: prompts are read slower

With flash attention, which takes less and is faster.
"""
import dataclasses
import functools
import gc
import html
import itertools
import math
import os

from ggjit.alloc.plots import unit_of
from ggjit.alloc.report import mib
from ggjit.api.measure_memory import kernel_work_nbytes
from ggjit.api.rematerialize import BudgetError
from ggjit.core.arguments import nbytes_of, typed_call
from ggjit.core.config import MAX_THREADS, default_threads
from ggjit.core.kernels_ahead import missing
from ggjit.core.process_memory import give_back_heap, resident_now
from ggjit.cpu.cpu_plan import likely_parts, needs
from ggjit.models.core.checks import integer, known_options
from ggjit.models.networks.base.memory import MemoryUse, expected, process_term
from ggjit.models.networks.load import ARCHITECTURES
from ggjit.models.networks.peak import arenas, device_sizes, model_file, null_network
from ggjit.ops.core.errors import OutOfMemory, ParamError, extra
from ggjit.ops.core.progress import busy

BATCHES = 512, 256, 128, 64, 32, 16, 8
KV_TYPES = "F16", "Q8_0", "Q4_0"
LEAST_CTX = 256
OPTIONS = "strict", "lora", "override_tensor", "arena", "vision", "pooling", "n_seqs", "n_cells"    # of load_model
MOST = (1 << 31) - 1                    # tokens
COMPILING_NBYTES = 100 << 20            # memory of compiling, where kernels are not in the cache (`ggjit warm-up`)
SLACK, SLACK_NBYTES = 0.01, 4 << 20     # how far the real use may exceed the predicted one
AGAIN_NBYTES = 2 << 20                  # how far processes that do the same differ


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run a model; the fields are load_model's options, but `streamed`: weights are not kept in memory."""
    n_ctx: int
    n_batch: int = BATCHES[0]
    flash: bool = True
    kv_type: str = KV_TYPES[0]
    repack: bool | None = None
    n_gpu_layers: int | None = None
    cpu_moe: bool = False
    streamed: bool = False

    def __str__(self):
        words = [f"context {self.n_ctx:,}", f"batch {self.n_batch}", f"{self.kv_type} cache",
                 {None: "repacked where it pays", True: "repacked", False: "not repacked"}[self.repack]]
        if self.n_gpu_layers is not None:
            words.append("all layers on devices" if self.n_gpu_layers < 0 else f"{self.n_gpu_layers} layers on devices")
        return ", ".join(words + ["experts in host memory"] * self.cpu_moe + ["weights streamed"] * self.streamed +
                         ["no flash attention"] * (not self.flash))


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A Setting with the memory it needs.  nbytes: of this process, `compiling` of them while kernels are compiled;
    devices: {name: bytes}; why: why it was not chosen."""
    setting: Setting
    nbytes: int
    memory: MemoryUse
    devices: dict
    compiling: int = 0
    why: str = ""

    @property
    def running_nbytes(self):
        """nbytes without the memory that is taken once, for compiling."""
        return self.nbytes - math.ceil(self.compiling * (1 + SLACK))

    @property
    def compiled(self):
        """The same once its kernels are there."""
        return dataclasses.replace(self, nbytes=self.running_nbytes, compiling=0)


class Fit:
    """What `fit` found.  `.setting`, `.options` for load_model, `.memory` (a MemoryUse), `.nbytes`, `.limit`, and
    `.others`: [Candidate], each with `.why` it was not chosen."""

    def __init__(self, chosen, others, limit, title, search):
        self.setting, self.memory, self.nbytes, self.devices = chosen.setting, chosen.memory, chosen.nbytes, \
            chosen.devices
        self._running_nbytes = chosen.running_nbytes
        self.others, self.limit, self.title, self._search = others, limit, title, search

    @property
    def options(self):
        """Keyword arguments of load_model: the setting, and what `fit` was given besides."""
        given = self._search.given | dataclasses.asdict(self.setting)
        del given["streamed"]
        return {name: value for name, value in given.items() if value is not None and not (name == "cpu_moe" and
                                                                                          not value)}

    def frontier(self):
        """{cache type: [(context, bytes)]} at the chosen batch, up to twice the limit; memory for compiling, which is
        taken once, is not in it.  The file is opened again."""
        try:
            return self._search.frontier(self.setting)
        finally:
            self._search.let_go()

    def plot(self, ax=None):
        """Bytes by context for each type of the cache, the limit, and the choice, on matplotlib axes."""
        plt = extra("matplotlib.pyplot", "plots")
        ax = plt.subplots(figsize=(7, 4))[1] if ax is None else ax
        unit, name = unit_of(self.limit)
        for kind, points in self.frontier().items():
            ax.plot([n for n, _ in points], [b / unit for _, b in points], marker="o", markersize=3,
                    label=f"{kind} cache")
        ax.axhline(self.limit / unit, color="black", linestyle="--", linewidth=1)
        ax.annotate(f"limit {mib(self.limit)}", (0.01, self.limit / unit), xycoords=("axes fraction", "data"),
                    va="bottom")
        ax.plot([self.setting.n_ctx], [self._running_nbytes / unit], marker="*", markersize=14, color="black",
                linestyle="none", label="chosen")
        ax.set(xlabel="context (tokens)", ylabel=f"memory once compiled ({name})", title=os.path.basename(self.title))
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
        ax.set_ylim(0, 1.15 * max(ax.get_ylim()[1], self.limit / unit))
        ax.legend(fontsize="small", frameon=False, loc="lower right")
        return ax

    def __str__(self):
        lines = [f"{self.title}: {self.setting}", f"takes {mib(self.nbytes)} of {mib(self.limit)}"]
        lines += [f"  {name}: {mib(n)}" for name, n in self.devices.items()]
        return "\n".join([*lines, "", "not chosen:", *(f"  {c.setting}: {c.why}" for c in self.others)])

    def __repr__(self):
        return f"<Fit {self.setting}: {mib(self.nbytes)} of {mib(self.limit)}>"

    def _repr_html_(self):
        left = "style='text-align:left'"
        rows = "".join(f"<tr><td {left}>{html.escape(str(c.setting))}</td><td style='white-space:nowrap'>"
                       f"{mib(c.nbytes)}</td><td {left}>{html.escape(c.why)}</td></tr>" for c in self.others)
        return (f"<b>{html.escape(self.title)}</b><p>{html.escape(str(self.setting))}: {mib(self.nbytes)} of "
                f"{mib(self.limit)}</p><table><tr><th {left}>not chosen</th><th>takes</th><th {left}>why</th></tr>"
                f"{rows}</table>")


class _Search:
    """Candidates of one model, measured when they are asked for."""

    def __init__(self, model, limit, devices, n_threads, options):
        self.model, self.limit, self.more, self.given = model, limit, options, options | {"n_threads": n_threads}
        self.n_threads = default_threads() if n_threads is None else n_threads
        self.sizes = device_sizes(devices)
        self.measured, self._missing = {}, {}
        self.near = None                        # the last number of layers that was found, as a place's number

    @functools.cached_property
    def file(self):
        return model_file(self.model)

    @property
    def takes_n_ctx(self):
        """Can the context be chosen?"""
        return getattr(ARCHITECTURES.get(self.file.arch), "CAUSAL", True)

    def let_go(self):
        """Whoever keeps what was found keeps no vocabulary; the file is opened again when it is needed."""
        vars(self).pop("file", None)

    def __call__(self, setting):
        if setting not in self.measured:
            self.measured[setting] = self._measure(setting)
        return self.measured[setting]

    def _measure(self, s):
        # experts and layers that do not fit a device are seen by their sizes, so devices are made without a limit here
        given = dataclasses.asdict(s)
        streamed = given.pop("streamed")
        with null_network(self.file, dict.fromkeys(self.sizes, 1 << 62), **given, **self.more) as m:
            graph = m.largest_graph()
            work = kernel_work_nbytes(graph, self.n_threads, m.weights.repacked)
            terms = expected(m, graph, arenas(m, graph), work, m.n_rows_held, (0, 0))
            layer = max((sum(t.nbytes for t in group) for group in _by_layer(m)), default=0)
            compiling = COMPILING_NBYTES if self._compiles(m, graph, s) else 0
        use = MemoryUse([*terms, process_term(self.base)], None)
        nbytes = use.total + compiling
        if streamed:                            # the system may drop pages of the file at any time
            nbytes -= max(use.terms.get("weights", 0) - layer, 0)
        return Candidate(s, int(nbytes * (1 + SLACK)) + SLACK_NBYTES, use,
                         {name: sum(use.devices.get(name, {}).values()) for name in self.sizes}, compiling)

    @functools.cached_property
    def kinds(self):
        """Types that the cache of this model can have."""
        return [kind for kind in KV_TYPES if kind == KV_TYPES[0] or self._takes(kind)]

    def _takes(self, kind):
        try:
            return bool(self(Setting(min(self.contexts), BATCHES[-1], True, kind, False)))
        except ParamError:                      # the type's block does not divide the heads' sizes
            return False

    @functools.cached_property
    def base(self):
        """(anonymous, file) bytes of the process.  It is read after a first setting was planned, which loads what all
        others find."""
        gc.collect()
        give_back_heap()
        return resident_now()

    def enough(self, nbytes):
        """A limit within which a candidate of so many bytes is found, when it is asked for after this search."""
        before = sum(self.base)
        del self.base
        return nbytes + int(max(sum(self.base) - before, 0) * (1 + SLACK)) + AGAIN_NBYTES

    def _compiles(self, m, graph, setting):
        """Is a kernel missing in the cache that reading a text needs?  Neither the context's length nor the number of
        layers on devices changes a kernel."""
        repacked = frozenset(m.weights.repacked)
        key = dataclasses.replace(setting, n_ctx=0, n_gpu_layers=None, cpu_moe=False), bool(repacked)
        if key not in self._missing:
            graphs = [m.graph(*shape) for shape in m._text_shapes()] or [graph]
            self._missing[key] = any(missing(needs(likely_parts(g, self.n_threads, repacked))) for g in graphs)
        return self._missing[key]

    def over_devices(self, c):
        """Why a device does not hold its share of a candidate; "" where all do."""
        return next((f"{name} would hold {mib(n)}, {mib(n - self.sizes[name])} more than it has"
                     for name, n in c.devices.items() if n > self.sizes[name]), "")

    def over(self, c):
        """Why a candidate does not fit; "" where it does."""
        return self.over_devices(c) or self.over_limit(c)

    def over_limit(self, c):
        if c.nbytes <= self.limit:
            return ""
        compiling = f", {mib(c.compiling)} of it to compile kernels" if c.compiling else ""
        after = "; it fits once another process has read a batch with it" * (c.compiled.nbytes <= self.limit)
        return f"takes {mib(c.nbytes)}{compiling}, {mib(c.nbytes - self.limit)} above the limit{after}"

    def frontier(self, chosen):
        out = {}
        for kind in dict.fromkeys((*self.kinds, chosen.kv_type)):
            points = []
            for n in self.contexts[::-1]:
                c = self(dataclasses.replace(chosen, kv_type=kind, n_ctx=n, n_batch=min(chosen.n_batch, n)))
                points.append((n, c.running_nbytes))
                if c.running_nbytes > 2 * self.limit:
                    break
            out[kind] = points
        return out


def _by_layer(m):
    """[[weights of a layer that stay in the file], ...]."""
    groups = {}
    for t in m.weights.ctx.tensors:
        if t.buffer in m.weights.buffers and ".exps" not in t.name:
            groups.setdefault(t.name.split(".")[1] if t.name.startswith("blk.") else t.name, []).append(t)
    return groups.values()


@typed_call
def fit(model=None, memory=None, n_ctx=None, devices=(), n_batch=None, kv_type=None, repack=None, n_threads=None,
        **options):
    """The best Setting of a model that stays within `memory` bytes of this process: a Fit.

        found = gg.fit("model.gguf", memory="8G", n_ctx=16384)
        m = load_model("model.gguf", **found.options)

    model: a GGUF path, or a shape of `ggjit peak`; None: the small model of the package.  memory: bytes, or a text:
    "8G", "8GiB", "512 MB"; of everything that the process holds, Python included.  devices: {name: bytes} of GPUs for
    layers.  n_ctx, n_batch, kv_type, repack: settings that are not to be changed.  n_threads, options: others of
    load_model, such as override_tensor; `.options` has them, too.
    Nothing is allocated and no weight is read; what is proposed stays below the limit by what announcements may be off.
    Errors: BudgetError with `.minimum`, the least bytes that are enough; ParamError.
    """
    if memory is None:
        raise ParamError('fit: memory is needed: bytes that the process may take, such as memory="8G"')
    limit = nbytes_of(memory, "fit: memory")
    known_options("fit", options, OPTIONS)
    if n_batch is not None:
        integer("n_batch", n_batch, 1, MOST)
    if n_threads is not None:
        integer("n_threads", n_threads, 1, MAX_THREADS)
    search = _Search(model, limit, devices, n_threads, options)
    try:
        with busy("planning settings"):
            return _found(search, n_ctx, n_batch, kv_type, repack)
    finally:
        search.let_go()


def _found(search, n_ctx, n_batch, kv_type, repack):
    search.contexts = _contexts(search, n_ctx)
    kinds = search.kinds if kv_type is None else (str(kv_type).upper(),)
    tried = []
    for kind, n, streamed in _that_may_fit(search, kinds, tried, n_batch, repack):
        batches, repacks = _ways(n, n_batch, repack, streamed)
        for place in _lean(search, n, kind, streamed, tried, batches[-1], repacks[-1]):
            for packed, batch in itertools.product(repacks, batches):
                c = search(dataclasses.replace(place, n_batch=batch, repack=packed))
                if not search.over(c):
                    c = _longer(search, c, tried)
                    return Fit(c, _others(search, c, tried), search.limit, str(search.file.path), search)
                tried.append(c)
    raise _too_little(search, _least(search, n_batch, kinds, repack))


def _contexts(search, n_ctx):
    """Contexts to try, the longest first."""
    trained = integer("n_ctx", max(int(search.file.arch_get("context_length", 4096, int)), 1), 1, MOST)
    if n_ctx is not None:
        integer("n_ctx", n_ctx, 1, MOST)
        if not search.takes_n_ctx and n_ctx != trained:
            raise ParamError(f"fit: n_ctx is for decoders; {search.file.path} reads texts of up to {trained:,} tokens "
                             f"whatever n_ctx is: leave n_ctx out")
        return [n_ctx]
    return _halves(trained) if search.takes_n_ctx else [trained]


def _that_may_fit(search, kinds, tried, n_batch, repack):
    """Yield (cache type, context, streamed), best first.  Where the shortest context does not fit, no longer one is
    planned; where the smallest type does not, no other one."""
    def may(kind, streamed):
        n = search.contexts[-1]
        batches, repacks = _ways(n, n_batch, repack, streamed)
        return _lean(search, n, kind, streamed, tried, batches[-1], repacks[-1])
    for streamed in (False, True):
        if len(kinds) == 1 or may(kinds[-1], streamed):
            for kind in kinds:
                if len(search.contexts) == 1 or may(kind, streamed):
                    yield from ((kind, n, streamed) for n in search.contexts)


def _lean(search, n, kind, streamed, tried, batch, repack):
    """Settings of the least memory, one for each place in which such a setting stays within the limit."""
    first = search(Setting(n, batch, True, kind, repack, *_places(search)[0], streamed))
    if search.over_limit(first.compiled):
        tried.append(first)
        return []
    places = [search(s) for s in _places_that_hold(search, first.setting, tried)]
    tried += [c for c in places if search.over_limit(c.compiled)]
    return [c.setting for c in places if not search.over_limit(c.compiled)]


def _too_little(search, least):
    """The BudgetError that names the least limit."""
    enough = search.enough(least.nbytes)
    return BudgetError(f"fit: {mib(search.limit)} are too little for {search.file.path}: the least is {mib(enough)} "
                       f"({least.setting}); use memory={enough} or more, or a smaller model", enough)


def _ways(n, n_batch, repack, streamed):
    """(batches, values of `repack`) to try within a context of n tokens, best first."""
    batches = [b for b in (BATCHES if n_batch is None else (n_batch,)) if b <= n] or [n]
    return batches, (False,) if streamed else (None, False) if repack is None else (repack,)


def _halves(n):
    """n, n / 2, ... down to LEAST_CTX."""
    out = [n]
    while out[-1] // 2 >= LEAST_CTX:
        out.append(out[-1] // 2)
    return out


def _places(search):
    """[(n_gpu_layers, cpu_moe)], most on devices first."""
    if not search.sizes:
        return [(None, False)]
    n_layer = int(search.file.arch_get("block_count", 0, int))
    experts = [(-1, True)] if search.file.arch_get("expert_count", 0, int) else []
    return [(-1, False), *experts, *((n, False) for n in range(n_layer, -1, -1))]


def _places_that_hold(search, lean, tried):
    """`lean` in each place that its devices can hold, best first; of numbers of layers the largest alone, since fewer
    leave more to the host."""
    def held(place):
        c = search(dataclasses.replace(lean, n_gpu_layers=place[0], cpu_moe=place[1]))
        if search.over_devices(c):
            tried.append(c)
            return False
        return True
    places = _places(search)
    whole = [place for place in places if place[0] in (None, -1)]
    some = places[len(whole):]
    found = [place for place in whole if held(place)]
    if some:
        search.near = _near(search, lean, len(some)) if search.near is None else search.near
        search.near = _first(lambda k: held(some[k]), len(some), search.near)
        found.append(some[search.near])
    return [dataclasses.replace(lean, n_gpu_layers=n, cpu_moe=moe) for n, moe in found]


def _near(search, lean, n_places):
    """About where the number of layers is that devices hold, by the bytes of all layers."""
    whole = sum(search(dataclasses.replace(lean, n_gpu_layers=-1, cpu_moe=False)).devices.values())
    return min(int(n_places * max(1 - sum(search.sizes.values()) / max(whole, 1), 0)), n_places - 1)


def _least(search, n_batch, kinds, repack):
    """Of the candidates of the shortest context that devices hold, the one that takes the least: the kernels of another
    batch, cache or layout may be there."""
    n, least, anew = search.contexts[-1], None, set()   # anew: kernels that are to be compiled
    for streamed, kind in itertools.product((True, False), kinds):
        batches, repacks = _ways(n, n_batch, repack, streamed)
        lean = Setting(n, batches[-1], True, kind, repacks[-1], streamed=streamed)
        for place in _places_that_hold(search, lean, []):
            if least is not None and search(place).running_nbytes >= least.nbytes:
                continue
            for packed in repacks:
                for batch in batches[::-1]:             # a larger one takes more, but for compiling
                    kernels = kind, packed, batch, place.n_gpu_layers == -1
                    if batch > batches[-1] and kernels in anew:
                        continue
                    c = search(dataclasses.replace(place, n_batch=batch, repack=packed))
                    least = min(filter(None, (least, c)), key=lambda c: (bool(search.over_devices(c)), c.nbytes))
                    if not c.compiling or c.running_nbytes > least.nbytes:
                        break
                    anew.add(kernels)
    return least


def _first(holds, n, near):
    """The first k that holds, of 0 .. n - 1; all behind it hold, the last one always does.  near: where it may be."""
    low, high, step, k = -1, n - 1, 1, near
    while high - low > 1:
        k = min(max(k, low + 1), high - 1)
        if holds(k):
            high, k = k, k - step
        else:
            low, k = k, k + step
        step *= 2
        if low >= 0 and high < n - 1:
            k = (low + high) // 2
    return high


def _longer(search, chosen, tried):
    """The same with the longest context that fits, where `chosen` has one of the halves of the longest."""
    s = chosen.setting
    longer = next((n for n in search.contexts[::-1] if n > s.n_ctx), None)
    if longer is None:
        return chosen

    def fits(k):
        c = search(dataclasses.replace(s, n_ctx=lengths[k]))
        if why := search.over(c):
            tried.append(c)
        return not why
    lengths = range(s.n_ctx, longer, LEAST_CTX)[::-1]
    each = max(search(dataclasses.replace(s, n_ctx=longer)).nbytes - chosen.nbytes, 1) / (longer - s.n_ctx)
    near = len(lengths) - 1 - int((search.limit - chosen.nbytes) / each / LEAST_CTX)
    return search(dataclasses.replace(s, n_ctx=lengths[_first(fits, len(lengths), near)]))


def _others(search, chosen, tried):
    """The settings that were tried, then those near the choice, each with the reason against it."""
    s = chosen.setting
    out = [dataclasses.replace(c, why=search.over(c)) for c in {c.setting: c for c in tried}.values()]
    near = [(dataclasses.replace(s, flash=False), "attention scores take memory, and it is slower")]
    if s.kv_type == "F16" and "Q8_0" in search.kinds:
        near.append((dataclasses.replace(s, kv_type="Q8_0"), "rounds keys and values without need"))
    if s.repack is None and not s.streamed:
        near.append((dataclasses.replace(s, repack=False), "products are slower where a layout pays"))
    if s.n_batch > BATCHES[-1]:
        near.append((dataclasses.replace(s, n_batch=s.n_batch // 2), "prompts are read slower"))
    for setting, why in near:
        try:
            c = search(setting)
        except OutOfMemory:
            continue
        if c.nbytes < chosen.nbytes:
            why = f"takes {mib(chosen.nbytes - c.nbytes)} less, but {why}"
        elif why.startswith("rounds"):
            continue
        out.append(dataclasses.replace(c, why=search.over(c) or why))
    return out
