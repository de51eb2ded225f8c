"""gg.pareto: memory against time, for one text read within arenas of several sizes.

    found = gg.pareto("model.gguf", "a long text ...")
    print(found)                        # a table: arena, how the graphs are arranged, seconds, equal bits
    found.plot()                        # seconds over bytes; what a notebook shows

The arena holds the results of nodes (networks/base/arena.py); weights, cache and inputs lie outside.
"""
import base64
import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Iterable

import numpy as np

from ggjit.alloc.report import MeasureReport, mib
from ggjit.api.remat_graph import Rematerialized
from ggjit.api.rematerialize import BudgetError
from ggjit.core.arguments import typed_call
from ggjit.core.html_repr import PlotRepr, escape
from ggjit.display.html import table
from ggjit.graphs.graph import Graph
from ggjit.models.core.checks import integer, number
from ggjit.models.networks.inside import inside
from ggjit.models.networks.load import load_model
from ggjit.ops.core.errors import ParamError, TypeMismatch, extra
from ggjit.ops.core.progress import work
from ggjit.ops.core.user_warnings import GgjitWarning
from ggjit.ops.core.whole_numbers import is_whole

SHARES = 1.0, 0.84, 0.5, 0.3, 0.25
DRAWN, MOST_DRAWN = 512, 1 << 24                # tokens of a text that is drawn: where nothing is said, at most
LEAST_CTX = 256
NEAR = 0.08                     # points of a picture so near each other, as a part of its width, have one label


@dataclasses.dataclass(frozen=True)
class ArenaPoint:
    """A text read in one arena.  share: of the bytes without a limit, None: no limit; nbytes: of the arena that was
    taken; how: what was done to stay inside; seconds: of a reading; same_bits: are all results those without a limit?
    An arena that is too small has no seconds; nbytes is then the least that is enough."""
    share: float | None
    nbytes: int
    how: str
    seconds: float | None = None
    same_bits: bool = False


class ArenaPareto(PlotRepr, list):
    """What `gg.pareto` found: [ArenaPoint], the one without a limit first."""

    def __init__(self, points, title):
        super().__init__(points)
        self.title = title

    def plot(self, axes=None):
        """Seconds of a reading over the bytes of its arena, on matplotlib axes.  Errors: MissingExtra."""
        if axes is None:
            axes = extra("matplotlib.pyplot", "plots").subplots(figsize=(6, 3.2))[1]
        read = sorted((p for p in self if p.seconds is not None), key=lambda p: (p.nbytes, -p.seconds))
        x, y = [p.nbytes / 2 ** 20 for p in read], [1e3 * p.seconds for p in read]
        axes.plot(x, y, marker="o")
        groups = []                     # points that one label stands below, since theirs would overlap
        for k in range(len(read)):
            near = groups and x[k] - x[groups[-1][0]] < NEAR * x[-1]
            groups[-1].append(k) if near else groups.append([k])
        for group in groups:
            lowest = min(group, key=y.__getitem__)
            axes.annotate(", ".join(_share(read[k]) for k in group), (x[lowest], y[lowest]), (0, -6), ha="center",
                          va="top", textcoords="offset points", fontsize="small")
        least = max((p.nbytes for p in self if p.seconds is None), default=None)
        if least is not None:
            axes.axvline(least / 2 ** 20, color="black", linestyle="--", linewidth=1)
            axes.annotate(f"the least: {mib(least)} ", (least / 2 ** 20, 1), xycoords=("data", "axes fraction"),
                          xytext=(0, -4), textcoords="offset points", ha="right", va="top", fontsize="small")
        axes.set(xlabel="arena, MiB", ylabel="a reading, ms", title=self.title)
        axes.set_xlim(0, 1.15 * x[-1])
        axes.set_ylim(0, 1.15 * max(y))
        axes.grid(alpha=0.3)
        return axes

    def _table(self):
        """Lines of texts, the head first."""
        base, lines = self[0].seconds, [("arena", "takes", "a reading", "", "bits", "how")]
        for p in self:
            lines.append((_share(p), "", "", "", "", f"too small: {mib(p.nbytes)} are enough") if p.seconds is None else
                         (_share(p), mib(p.nbytes), f"{1e3 * p.seconds:.1f} ms", f"{p.seconds / base - 1:+.1%}",
                          "equal" if p.same_bits else "DIFFERENT", p.how))
        return lines

    def __str__(self):
        lines = self._table()
        width = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join([self.title, *("  ".join(map(str.ljust, line, width)).rstrip() for line in lines)])

    def _repr_html_(self):
        """The table, with the picture below it where matplotlib is installed."""
        head, *lines = self._table()
        picture = self._repr_png_()
        shown = "" if picture is None else \
            f"<img src='data:image/png;base64,{base64.b64encode(picture).decode()}' style='max-width:100%'>"
        return f"<div><b>{escape(self.title)}</b>{table(lines, head, numbers=(1, 2, 3))}{shown}</div>"

    __repr__ = __str__


def _share(p):
    return "no limit" if p.share is None else f"{p.share:.0%}"


@typed_call
def pareto(model=None, text=None, shares=SHARES, repeats=3, clock=None, **options):
    """The ArenaPareto of a model: one text, read within arenas of some shares of the bytes that it takes without a
    limit.  Bits are compared, seconds are measured.

        gg.pareto("model.gguf", 1024)
        gg.pareto(None, "It was a truth universally acknowledged", shares=(0.5, 0.25))

    model: a GGUF path, None: the model of the package.  text: a text, token ids, or a number of tokens, which are
    drawn; None: 512, or as many as the model's context holds.  seconds: the least of `repeats` readings, all arenas by
    turns; clock: time.process_time counts processor time.  options: of load_model.  A decoder reads the text in one
    batch, where the arena lets it.
    Errors: ParamError, TypeMismatch, those of load_model.
    """
    if isinstance(model, Graph | MeasureReport):
        raise TypeMismatch(f"gg.pareto reads a text with a model, got {type(model).__name__}; "
                           f"gg.measure(graph).pareto() tries budgets of a graph")
    integer("repeats", repeats, 1, 1 << 20)
    shares = list(shares) if isinstance(shares, Iterable) else [shares]
    if not all(0 < number("shares", share) <= 1 for share in shares):
        raise ParamError(f"shares are parts of the arena without a limit, such as 0.5, got {shares!r}")
    if clock is not None and not callable(clock):
        raise TypeMismatch(f"clock is a function that returns seconds, such as time.process_time, got {clock!r}")
    if "arena" in options:
        raise ParamError("pareto tries arenas itself; say with shares which ones, and leave arena out")
    with _untold(), load_model(model, **options) as m:
        title, ids = os.path.basename(str(m.file.path)), _ids(m, text)
        if m.CAUSAL:
            options = {"n_ctx": max(len(ids), LEAST_CTX), "n_batch": len(ids), **options}
    with contextlib.ExitStack() as stack, work("reading within arenas", len(shares) + 1) as step:
        def read_within(share, nbytes):
            return stack.enter_context(contextlib.closing(_Reader(model, ids, share, nbytes, options, clock)))
        readers = [read_within(None, None)]                 # what load_model warns of is told here
        stack.enter_context(_untold())
        peak = readers[0].m.compute_nbytes
        for share in shares:
            step()
            try:
                readers.append(read_within(share, max(int(share * peak), 1)))
            except BudgetError as e:
                readers.append(ArenaPoint(share, e.minimum, "too small"))
        for _ in range(repeats):
            for x in readers:
                if isinstance(x, _Reader):
                    x.again()
        points = [x.point(readers[0].values) if isinstance(x, _Reader) else x for x in readers]
    return ArenaPareto(points, f"{title}, {len(ids):,} token{'s' * (len(ids) > 1)}")


@contextlib.contextmanager
def _untold():
    """Warnings of the library are not shown: the same network is loaded several times."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GgjitWarning)
        yield


def _ids(m, text):
    text = min(DRAWN, m.n_ctx) if text is None else text
    if is_whole(text):
        integer("text: the number of tokens", text, 1, MOST_DRAWN)
        return np.random.default_rng(0).integers(0, m.n_vocab, m.n_ctx if not m.CAUSAL and text > m.n_ctx else text)
    ids = inside.ids_of(m, text)
    if not len(ids):
        raise ParamError("pareto: the text is empty; give a text, token ids or a number of tokens")
    return ids


class _Reader:
    """A network within an arena, None: without a limit, that has read the ids once."""

    def __init__(self, model, ids, share, arena, options, clock):
        self.ids, self.share, self.clock, self.seconds = ids, share, clock or time.perf_counter, []
        self.m = load_model(model, arena=arena, **options)
        try:
            self.values = self._read()                      # plans, and compiles what is missing
        except BaseException:
            self.m.free()
            raise

    def _read(self):
        if not self.m.CAUSAL:
            return self.m.embed_ids(self.ids)
        self.m.reset()
        return self.m.decode(self.ids)

    def again(self):
        t0 = self.clock()
        self._read()
        self.seconds.append(self.clock() - t0)

    def point(self, want):
        return ArenaPoint(self.share, self.m.compute_nbytes, self._how(), min(self.seconds),
                          np.array_equal(self.values, want, equal_nan=True))

    def _how(self):
        m, graph = self.m, self.m.within_arena(self.m.largest_graph())
        words = [f"{m.n_batch} token{'s' * (m.n_batch > 1)} at once"] if m.CAUSAL else []
        if not isinstance(graph, Rematerialized):
            return ", ".join([*words, "ggml's plan"])
        words += ["best's plan"] if not graph.n_again and graph.n_chunks == 1 else []
        words += [f"{graph.n_again} results made again, {graph.extra:.1%} more"] if graph.n_again else []
        words += [f"the largest in {graph.n_chunks} chunks"] if graph.n_chunks > 1 else []
        return ", ".join(words)

    def close(self):
        self.m.free()
