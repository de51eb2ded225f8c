"""A layered layout of boxes and arrows: every arrow points down, few arrows cross.

    rank 0       [ x ]      [ w ]           ranks: the longest way from a box without sources
                    \\      /   |
    rank 1         [mul_mat]   :            an arrow over several ranks passes through points of its own,
                       |       :            which keep a lane free for it
    rank 2           [ add ] <-+

Steps: ranks, points for long arrows, order within ranks (barycentres, down and up), x positions (towards the mean of
the neighbours, apart where boxes would touch), y positions.  Source: Sugiyama, Tagawa, Toda 1981.
"""
import bisect
import collections

GAP_X, GAP_Y = 22, 34           # gaps between the boxes of a rank, and between ranks
LANE = 10                       # width an arrow takes when it passes a rank
SWEEPS = 12
MAX_LANE_POINTS = 4000          # with more points the longest arrows are drawn straight, across boxes


class LayeredLayout:
    """x, y: centre of every box; paths: {(source, target): points from the source's foot to the target's head};
    width, height of the whole."""

    def __init__(self, sizes, edges, leaves=()):
        """sizes: {box: (width, height)} in an order in which sources come first; edges: pairs of boxes, downwards.
        leaves: boxes without sources that are drawn right above the first box that reads them."""
        self.sizes, self.edges, self.leaves = dict(sizes), list(dict.fromkeys(edges)), set(leaves)
        self._rank(leaves)
        self._split_long_edges()
        self._order()
        self._place_x()
        self._place_y()
        self.paths = {e: self._path(e) for e in self.edges}

    # ------------------------------------------------------------ ranks
    def _rank(self, leaves):
        above, below = collections.defaultdict(list), collections.defaultdict(list)
        for a, b in self.edges:
            above[b].append(a)
            below[a].append(b)
        self.rank = {}
        for box in self.sizes:
            self.rank[box] = 1 + max((self.rank[a] for a in above[box] if a in self.rank), default=-1)
        for box in leaves:
            if below[box] and not above[box]:
                self.rank[box] = max(0, min(self.rank[b] for b in below[box]) - 1)

    def _split_long_edges(self):
        """self.steps: edges between neighbouring ranks; self.lanes: {edge: its points}."""
        self.steps, self.lanes, n = [], {}, 0
        spans = {(a, b): self.rank[b] - self.rank[a] - 1 for a, b in self.edges}
        longest = _longest_lane(spans.values())
        for a, b in self.edges:
            lane, last = [], a
            if spans[a, b] > longest:
                self.lanes[a, b] = lane
                continue
            for r in range(self.rank[a] + 1, self.rank[b]):
                point = ("lane", n)
                n += 1
                self.sizes[point], self.rank[point] = (LANE, 0), r
                self.steps.append((last, point))
                lane.append(point)
                last = point
            self.steps.append((last, b))
            self.lanes[a, b] = lane

    # ------------------------------------------------------------ order
    def _order(self):
        rows = collections.defaultdict(list)
        for box, r in self.rank.items():
            rows[r].append(box)
        self.rows = [rows[r] for r in sorted(rows)]
        self.up, self.down = collections.defaultdict(list), collections.defaultdict(list)
        for a, b in self.steps:
            self.up[b].append(a)
            self.down[a].append(b)
        best = None
        for neighbours, rows in self._sweeps():
            at = {box: i for row in self.rows for i, box in enumerate(row)}
            for row in rows:
                mean = {b: sum(at[x] for x in neighbours[b]) / len(neighbours[b]) if neighbours[b] else at[b]
                        for b in row}
                row.sort(key=lambda b: mean[b])         # noqa: B023
                at.update({b: i for i, b in enumerate(row)})
            crossings = self._crossings(at)
            if best is None or crossings < best[0]:
                best = crossings, [list(row) for row in self.rows]
            if not crossings:
                break
        self.rows = best[1]

    def _crossings(self, at):
        by_rank = collections.defaultdict(list)
        for a, b in self.steps:
            by_rank[self.rank[a]].append((at[a], at[b]))
        return sum(map(_inversions, by_rank.values()))

    def _sweeps(self):
        """(neighbours of every box, rows) of sweeps that go down and up in turn."""
        for sweep in range(SWEEPS):
            yield (self.up, self.rows) if sweep % 2 == 0 else (self.down, self.rows[::-1])

    # ------------------------------------------------------------ positions
    def _place_x(self):
        self.x = {}
        for row in self.rows:
            left = 0.0
            for box in row:
                self.x[box] = left + self.sizes[box][0] / 2
                left += self.sizes[box][0] + GAP_X
        for neighbours, rows in self._sweeps():
            for row in rows:
                self._spread(row, [self._wanted(b, neighbours[b]) for b in row])
        low = min(self.x[b] - self.sizes[b][0] / 2 for b in self.x)
        for box in self.x:
            self.x[box] -= low
        self.width = max(self.x[b] + self.sizes[b][0] / 2 for b in self.x)

    def _wanted(self, box, near):
        """The mean of the neighbours that matter: lanes follow lanes, so that long arrows are straight, and boxes
        follow boxes, whatever leaves they read."""
        if box[0] == "lane":
            near = [n for n in near if n[0] == "lane"] or near
        else:
            near = [n for n in near if n not in self.leaves] or near
        return sum(self.x[n] for n in near) / len(near) if near else self.x[box]

    def _weight(self, box):
        return 4.0 if box[0] == "lane" else 0.02 if box in self.leaves else 1.0

    def _spread(self, row, wanted):
        """The positions in order, far enough apart, that lie nearest to the wanted ones (weighted least squares).

        Without the distances it is isotonic regression: neighbours in the wrong order are pooled to their mean.
        """
        offset, pools = 0.0, []                 # pools: [sum of weight * position, weight, boxes]
        offsets = []
        for i, (box, x) in enumerate(zip(row, wanted, strict=True)):
            if i:
                offset += (self.sizes[row[i - 1]][0] + self.sizes[box][0]) / 2 + GAP_X
            offsets.append(offset)
            w = self._weight(box)
            pools.append([w * (x - offset), w, 1])
            while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
                last = pools.pop()
                pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
        at = iter(row)
        places = iter(offsets)
        for total, weight, n in pools:
            for _ in range(n):
                self.x[next(at)] = total / weight + next(places)

    def _place_y(self):
        self.y, top = {}, 0.0
        for row in self.rows:
            height = max(self.sizes[b][1] for b in row)
            for box in row:
                self.y[box] = top + height / 2
            top += height + GAP_Y
        self.height = top - GAP_Y

    def _path(self, edge):
        a, b = edge
        lane = [(self.x[p], self.y[p]) for p in self.lanes[edge]]
        return [(self.x[a], self.y[a] + self.sizes[a][1] / 2), *lane, (self.x[b], self.y[b] - self.sizes[b][1] / 2)]


def _longest_lane(spans):
    """Arrows that pass at most so many ranks get lanes: MAX_LANE_POINTS points for all of them."""
    total = 0
    for n, arrows in sorted(collections.Counter(spans).items()):
        total += n * arrows
        if total > MAX_LANE_POINTS:
            return n - 1
    return max(spans, default=0)


def _inversions(pairs):
    """How many pairs of pairs (a, b) are ordered one way by a and the other way by b: crossings."""
    below, n = [], 0
    for _, b in sorted(pairs):
        n += len(below) - bisect.bisect_right(below, b)
        bisect.insort(below, b)
    return n
