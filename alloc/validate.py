"""Independent check of memory plans: it shares no code with the planners.

Two ways of looking, both by sweeping over time with the live buffers in a list sorted by address.
"""
import bisect

from ggjit.ops.core import record as rec
from ggjit.ops.core.errors import GgjitError
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.spec import in_place_table


class InvalidPlan(GgjitError, AssertionError):
    """A plan that would corrupt memory; the message names both tensors or buffers."""


@oom_guard("the check of a layout")
def check_layout(lower, upper, size, offsets, alignment=1, capacity=None):
    """Raise InvalidPlan unless no two buffers that meet in time overlap and every offset is aligned and in bounds.

        check_layout([0, 1], [2, 3], [64, 32], [0, 64])     # both live at step 1, side by side

    lower, upper: half-open steps; size, offsets: bytes.  Empty buffers may lie anywhere.
    """
    n = len(offsets)
    if not len(lower) == len(upper) == len(size) == n:
        raise InvalidPlan(f"{n} offsets for {len(lower)}, {len(upper)}, {len(size)} lowers, uppers and sizes")
    events = []
    for i in range(n):
        o, z = int(offsets[i]), int(size[i])
        if o < 0 or (capacity is not None and o + z > capacity):
            raise InvalidPlan(f"buffer {i}: [{o}, {o + z}) is outside [0, {capacity})")
        if o % alignment:
            raise InvalidPlan(f"buffer {i}: offset {o} is not a multiple of {alignment}")
        if z > 0:
            events += [(int(lower[i]), 1, i), (int(upper[i]), 0, i)]
    live = []                                   # (offset, end, buffer), disjoint, by offset
    for _, birth, i in sorted(events):
        o = int(offsets[i])
        at = bisect.bisect_left(live, (o, -1, -1))
        if not birth:
            assert live[at][2] == i
            del live[at]
            continue
        end = o + int(size[i])
        for k in (at - 1, at):
            if 0 <= k < len(live) and live[k][0] < end and o < live[k][1]:
                raise InvalidPlan(f"buffers {live[k][2]} and {i} are live together and overlap: "
                                  f"[{live[k][0]}, {live[k][1]}) and [{o}, {end})")
        live.insert(at, (o, end, i))
    return max((int(o) + int(z) for o, z in zip(offsets, size, strict=True)), default=0)


def validate_plan(plan, alignment=1):
    """check_layout for every chunk of a GraphPlan's allocations; a trimmed tail counts until it was given back."""
    boxes = [[*map(int, row)] for row in zip(plan.a_lo, plan.a_hi, plan.a_size, plan.a_offs, plan.a_buffer,
                                             plan.a_chunk, strict=True)]
    for kind, a, keep, step in plan.events.tolist():
        if kind == 2:
            lo, _, size, offs, *where = boxes[a]
            boxes.append([lo, max(step, lo + 1), size - keep, offs + keep, *where])
            boxes[a][2] = keep
    for b, chunks in enumerate(plan.chunk_sizes):
        for c, capacity in enumerate(chunks):
            rows = [r[:4] for r in boxes if r[4:] == [b, c]]
            if rows:
                check_layout(*zip(*rows, strict=True), alignment, capacity)


class _Memory:
    """What the bytes of one chunk hold: disjoint (start, end, tag) by address."""

    def __init__(self, size):
        self.size, self.parts = size, []

    def write(self, start, end, tag):
        kept = []
        for a, b, t in self.parts:
            if a < start:
                kept.append((a, min(b, start), t))
            if b > end:
                kept.append((max(a, end), b, t))
        self.parts = sorted([p for p in kept if p[0] < p[1]] + ([(start, end, tag)] if start < end else []))

    def holds(self, start, end, tag):
        at = start
        for a, b, t in self.parts:
            if t == tag and a <= at < b:
                at = b
        return at >= end

    def owners(self, start, end):
        return sorted({t for a, b, t in self.parts if a < end and start < b})


class _Run:
    """Executes a plan on tags instead of numbers: every tensor that is computed writes its own tag over its bytes."""

    def __init__(self, request, plan, in_place):
        self.t, self.plan, self.in_place, sizes = request.table, plan, in_place, request.sizes
        ids = [*map(int, request.node_ids), *map(int, request.leaf_ids)]
        self.nbytes = dict(zip(ids, map(int, [*sizes[0], *sizes[1]]), strict=True))
        cols = [[*map(int, getattr(plan, f"node_{k}")), *map(int, getattr(plan, f"leaf_{k}"))]
                for k in ("buffer", "chunk", "offs")]
        self.place = {i: (b, c, o) for i, b, c, o in zip(ids, *cols, strict=True)}
        self.mem = [[_Memory(s) for s in chunks] for chunks in plan.chunk_sizes]
        for i, (b, c, o) in self.place.items():
            if b < 0:
                continue
            if self.root(i) == i and o % request.alignment[b]:
                raise InvalidPlan(f"tensor {i}: offset {o} is not a multiple of {request.alignment[b]}")
            if self.root(i) == i and o + self.nbytes[i] > self.mem[b][c].size:
                raise InvalidPlan(f"tensor {i}: [{o}, {o + self.nbytes[i]}) ends beyond chunk {c} of buffer {b}")
            self._check_view(i)

    def root(self, i):
        while self.t[i, rec.T_VIEW_SRC] >= 0:
            i = int(self.t[i, rec.T_VIEW_SRC])
        return i

    def _check_view(self, i):
        root = self.root(i)
        if root == i:
            return
        offs, j = 0, i
        while j != root:
            offs, j = offs + int(self.t[j, rec.T_VIEW_OFFS]), int(self.t[j, rec.T_VIEW_SRC])
        b, c, o = self.place[i]
        if (b, c, o - offs) != self.place[root]:
            raise InvalidPlan(f"view {i} is at {self.place[i]}, its source {root} at {self.place[root]} + {offs}")
        ne, nb = (self.t[i, w:w + 4].tolist() for w in (rec.T_NE, rec.T_NB))
        extent = sum((n - 1) * s for n, s in zip(ne[1:], nb[1:], strict=True)) + nb[0]
        if min(ne) > 0 and offs + extent > self.nbytes[root]:
            raise InvalidPlan(f"view {i} ends at byte {offs + extent} of its source {root} of {self.nbytes[root]}")

    def span(self, i):
        """(memory, start, end, tag) of the storage tensor i lives in, None outside the plan."""
        root = self.root(i)
        if root not in self.place or self.place[root][0] < 0:
            return None
        b, c, o = self.place[root]
        return self.mem[b][c], o, o + self.nbytes[root], root

    def write(self, i):
        at = self.span(i)
        if at:
            at[0].write(*at[1:])

    def read(self, i, reader):
        at = self.span(i)
        if at and not at[0].holds(*at[1:]):
            raise InvalidPlan(f"{reader} reads tensor {i}, whose bytes [{at[1]}, {at[2]}) now hold "
                              f"{at[0].owners(at[1], at[2])}")

    def step(self, i):
        row, mine = self.t[i], self.span(i)
        view = row[rec.T_VIEW_SRC] >= 0
        for s in row[rec.T_SRC:rec.T_SRC + rec.MAX_SRC].tolist():
            if s < 0 or s == i:
                continue
            self.read(s, f"node {i}")
            at = self.span(s)
            if view or not mine or not at or at[0] is not mine[0] or not (at[1] < mine[2] and mine[1] < at[2]):
                continue
            same = all((row[w:w + 4] == self.t[s, w:w + 4]).all() for w in (rec.T_NE, rec.T_NB))
            if not (self.in_place[row[rec.T_OP]] and same and self.place[s] == self.place[i]):
                raise InvalidPlan(f"node {i} writes [{mine[1]}, {mine[2]}) over its source {s}, "
                                  "and may not work in place there")
        if not view:
            self.write(i)


@oom_guard("the check of a memory plan")
def check_graph_plan(request, plan, in_place=None, leafs_first=True):
    """Run the graph of a PlanRequest on tags: raise InvalidPlan when a node reads bytes that another tensor overwrote.

        check_graph_plan(request, plan_graph(request))

    Also: offsets aligned and inside their chunk, views inside their source, in-place only with the same layout and an
    op that may, outputs (flagged, in `request.outputs`, and the last node) intact at the end.  A flag on a view alone
    protects nothing in ggml: the caller marks its source as well.  in_place: bool by op number, default today's ops.
    leafs_first: leafs are written before node 0 (modern ggml); else when first used (2023, where the caller places
    inputs beforehand).
    """
    run = _Run(request, plan, in_place_table() if in_place is None else in_place)
    table, nodes, leafs = request.table, [*map(int, request.node_ids)], [*map(int, request.leaf_ids)]
    fresh = set(leafs)
    if leafs_first:
        for i in leafs:
            if run.root(i) == i:
                run.write(i)
        fresh = set()
    for i in nodes:
        for s in table[i, rec.T_SRC:rec.T_SRC + rec.MAX_SRC].tolist():
            if s in fresh:
                fresh.discard(s)
                run.write(s)
        run.step(i)
    for i in nodes:
        if leafs_first and (i in request.outputs or table[run.root(i), rec.T_FLAGS] & rec.FLAG_OUTPUT):
            run.read(i, "the caller, after the run,")
    if nodes:
        run.read(nodes[-1], "the caller, after the run,")
