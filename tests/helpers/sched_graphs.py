"""Random graphs for scheduler tests, and the assignment rules of three ggml versions once more in plain Python.

`random_graph(seed, place)` draws the same graph for the same seed; `place(ctx, ...)` decides where leaves lie, so that
the single-device run and the scheduled run differ in nothing else.
"""
import numpy as np

import ggjit as gg
from ggjit.core.table import TABLE
from ggjit.ops.core.record import OP, T_BUFFER

NE = (8, 8)
VIEWS = {OP.VIEW, OP.RESHAPE, OP.PERMUTE, OP.TRANSPOSE}


class Drawn:
    """A graph with its leaves by kind: weights, inputs, caches (written by the graph)."""

    def __init__(self, graph, weights, inputs, caches):
        self.graph, self.weights, self.inputs, self.caches = graph, weights, inputs, caches

    @property
    def leaves(self):
        return [*self.weights, *self.inputs, *self.caches]

    def fill(self, seed, only=None):
        """Values for leaves; the same seed gives the same values."""
        rng = np.random.default_rng(seed)
        for t in self.leaves:
            values = rng.standard_normal((8, 8), dtype=np.float32) * np.float32(0.5)
            if (only is None or t in only) and t.buffer is not None:       # one that nothing reads has no memory
                t.set(values)


def random_graph(seed, place, n_ops=None, writes=True):
    rng = np.random.default_rng(seed)
    ctx = gg.Context()
    new = lambda kind, n: [ctx.new_tensor(gg.F32, NE, f"{kind}{i}") for i in range(n)]       # noqa: E731
    weights, inputs, caches = (new(k, int(rng.integers(1, 4))) for k in ("w", "x", "c"))
    place(ctx, weights, inputs, caches)
    live = [*inputs]
    n_ops = n_ops or int(rng.integers(4, 30))
    for _ in range(n_ops):
        a, b = (live[int(rng.integers(max(0, len(live) - 6), len(live)))] for _ in range(2))
        w = weights[int(rng.integers(len(weights)))]
        c = caches[int(rng.integers(len(caches)))]
        kind = int(rng.integers(14 if writes else 9))
        if kind <= 1:
            y = gg.rms_norm(gg.mul_mat(w, a), 1e-5)
        elif kind == 2:
            y = gg.silu(a)
        elif kind == 3:
            y = gg.scale(gg.add(a, b), 0.5)
        elif kind == 4:
            y = gg.mul(a, w)
        elif kind == 5:
            y = gg.cont(gg.transpose(a))
        elif kind == 6:
            y = gg.add(gg.reshape_2d(gg.view_1d(a, 32, 64), 8, 4), gg.view_2d(b, 8, 4, b.nb[1], 32)) \
                if a.nb[0] == 4 and b.nb[0] == 4 else gg.silu(b)
            y = gg.add(y, gg.view_2d(w, 8, 4, w.nb[1], 0))
            y = gg.concat(y, y, 1)
        elif kind == 7:
            y = gg.soft_max(gg.sub(a, b))
        elif kind == 8:
            y = gg.add(gg.mul_mat(a, b), c)
        elif kind == 9:                             # other nodes may read `a` before and after this one
            y = gg.scale_inplace(a if a.base.op else gg.silu(a), 0.75)
        elif kind == 10:
            y = gg.add_inplace(gg.mul(a, b), w)
        elif kind == 11:
            y = gg.add(gg.cpy(a, c), b)
        elif kind == 12:
            y = gg.add(gg.cpy(gg.view_2d(a, 8, 2, a.nb[1], 64), gg.view_2d(c, 8, 2, c.nb[1], 128)),
                       gg.view_2d(b, 8, 2, b.nb[1], 0))
            y = gg.concat(gg.concat(y, y, 1), gg.concat(y, y, 1), 1)
        else:
            y = gg.mul(c, a)
        live.append(y)
    changed = {t.view_src.id for t in live if t.view_src is not None}       # worked on in place later
    outputs = [live[-1], *(t for t in live[len(inputs):-1] if rng.random() < 0.1 and t.base.id not in changed)]
    return Drawn(gg.Graph(*outputs), weights, inputs, caches)


# ---------------------------------------------------------------- the rules again, in plain Python
class GgmlAborts(Exception):
    """The real ggml ends the process on this graph."""


class Reference:
    """Assignments, splits and inputs by the text of the sources.  Backends are numbers; devices answer questions.

    supports(b, node), reads(b, buft), wants(b, node): the devices.  home(buft): the backend a buffer belongs to.
    """

    def __init__(self, graph, rules, bufts, supports, reads, home, wants=lambda b, t: False, pins=None):
        self.graph, self.bufts, self.n = graph, bufts, len(bufts)
        self.supports, self.reads, self.home, self.wants = supports, reads, home, wants
        self.at = dict(pins or {})
        self.copies = set()
        getattr(self, f"assign_{rules}")()
        self.splits = self.cut(rules)

    def buffer(self, t):
        return t.buffer if int(TABLE.words[t.id, T_BUFFER]) >= 0 else None

    def memory(self, t):
        return self.buffer(t.base)

    def get(self, t):
        return self.at.get(t.id, -1)

    def put(self, t, b):
        if b >= 0:
            self.at[t.id] = b

    # ---- 2023
    def assign_2023(self):
        g = self.graph
        home = lambda t: self.home(self.buffer(t).buft) if self.buffer(t) else -1       # noqa: E731
        for t in g.leafs:
            if self.get(t) < 0:
                self.put(t, home(t) if home(t) >= 0 else home(t.base))
        for stage in (home, self.get):
            for t in g.nodes:
                if self.get(t) >= 0:
                    continue
                if stage is home and home(t) >= 0:
                    self.put(t, home(t))
                    continue
                if stage is home and t.view_src is not None and home(t.view_src) >= 0:
                    self.put(t, home(t.view_src))
                    continue
                prio, size, found = 1 << 30, 0, -1
                for s in t.src:
                    b = stage(s)
                    if b >= 0 and b < prio and s.nbytes >= size:
                        prio, size, found = b, s.nbytes, b
                self.put(t, found)
        for t in g.nodes:
            for s in t.src:
                if self.get(s) < 0:
                    self.put(s, self.get(t))

    # ---- 2024
    def current_2024(self, t):
        for x in (t, t.view_src):
            if x is not None and self.buffer(x):
                return self.home(self.buffer(x).buft)
        for s in t.src:
            if self.buffer(s) and self.buffer(s).usage == gg.USAGE_WEIGHTS:
                return self.home(self.buffer(s).buft)
        return -1

    def assign_2024(self):
        g = self.graph
        for t in g.leafs:
            if self.get(t) < 0:
                self.put(t, self.current_2024(t))
        for t in g.nodes:
            if self.get(t) < 0:
                self.put(t, self.current_2024(t))
                for s in t.src:
                    if self.get(s) < 0:
                        self.put(s, self.current_2024(s))
        self.spread((reversed, iter), lambda cur, t: True)
        self.follow()

    def spread(self, orders, may):
        """Nodes without a backend get that of the last one in each order: of accelerators first, then of all."""
        for accelerators in (True, False):
            for order in orders:
                cur = -1
                for t in order(self.graph.nodes):
                    if t.op in VIEWS:
                        continue
                    if self.get(t) >= 0:
                        cur = -1 if accelerators and self.get(t) == self.n - 1 else self.get(t)
                    elif may(cur, t):
                        self.put(t, cur)

    def follow(self, last=False):
        for t in self.graph.nodes:
            if t.view_src is not None and self.get(t) < 0:
                self.put(t, self.get(t.view_src))
            for s in t.src:
                if self.get(s) < 0:
                    self.put(s, self.get(s.view_src) if s.view_src is not None else self.get(t))
            if last and self.get(t) < 0:
                able = [b for b in range(self.n) if self.supports(b, t)]
                if not able:
                    raise GgmlAborts(f"no backend can compute {t}")
                self.put(t, able[0])

    # ---- modern
    def from_buffer(self, t, op):
        buf = self.memory(t)
        return next((b for b in range(self.n) if buf and self.reads(b, buf.buft) and self.supports(b, op)), -1)

    def current_modern(self, t):
        b = self.from_buffer(t, t)
        if b >= 0:
            return b
        if self.memory(t) is not None:
            raise GgmlAborts(f"no backend can compute {t} where it lies")
        if t.flags & 1:
            return self.n - 1
        for s in t.src:
            if t.op not in (OP.ROPE, OP.FLASH_ATTN_EXT) and self.buffer(s) and \
                    self.buffer(s).usage == gg.USAGE_WEIGHTS:
                b = self.from_buffer(s, t)
                if b == self.n - 1 and self.buffer(s).buft.is_host():
                    for a in range(b):
                        if self.supports(a, t) and self.wants(a, t):
                            return a
                return b
        return -1

    def readable(self, t, b):
        buf = self.memory(t)
        if buf:
            return self.reads(b, buf.buft)
        at = self.get(t) if self.get(t) >= 0 or t.view_src is None else self.get(t.view_src)
        return at >= 0 and self.reads(b, self.bufts[at])

    def assign_modern(self):
        g = self.graph
        for t in (*g.leafs, *g.nodes):
            if self.get(t) < 0:
                self.put(t, self.current_modern(t))
        self.spread((iter, reversed), lambda cur, t: cur >= 0 and self.supports(cur, t))
        for t in g.nodes:
            if t.op in VIEWS:
                continue
            if self.get(t) < 0:
                counts = [sum(self.readable(s, b) for s in t.src) if self.supports(b, t) else -1
                          for b in range(self.n)]
                self.put(t, int(np.argmax(counts)) if max(counts) >= 0 else -1)
            else:
                for b in range(self.get(t)):
                    if self.bufts[b] is self.bufts[self.get(t)] and self.supports(b, t) and \
                            all(self.readable(s, b) for s in t.src):
                        self.put(t, b)
                        break
        self.follow(last=True)

    # ---- cutting
    def cut(self, rules):
        nodes = self.graph.nodes
        is_first = (lambda t: t.view_src is None) if rules == "2023" else (lambda t: t.op not in VIEWS)
        cur = next((self.get(t) for t in nodes if is_first(t)), -1)
        splits = [[cur, 0, None, []]]
        for i, t in enumerate(nodes):
            if t.op in VIEWS:
                continue
            b = self.get(t)
            new = False
            if rules == "modern" and b == cur and splits[-1][3]:
                new = any(self.buffer(s) and self.buffer(s).usage == gg.USAGE_WEIGHTS and self.get(s) != cur
                          and not self.readable(s, cur) for s in t.src)
            if b != cur or new:
                splits[-1][2] = i
                splits.append([b, i, None, []])
                cur = b
            for s in t.src:
                if self.get(s) != cur and (rules != "modern" or not self.readable(s, cur)):
                    if rules == "2023" or (s.id, cur) not in self.copies:
                        splits[-1][3].append(s)
                    self.copies.add((s.id, cur))
        splits[-1][2] = len(nodes)
        return splits
