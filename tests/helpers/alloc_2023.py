"""ggml's allocators of November 2023 in plain words, to compare with: lists instead of flat memory."""
from ggjit.alloc import IN_PLACE_2023
from ggjit.ops.core.record import T_BUFFER, T_NB, T_NE, T_OP, T_SRC, T_TYPE, T_VIEW_OFFS, T_VIEW_SRC


class Blocks:
    """Free memory: a list of [offs, size], sorted by offset when one is put in."""

    def __init__(self, size):
        self.blocks, self.max_size = [[0, size]], 0

    def alloc(self, need):
        holes = [(size, -i) for i, (_, size) in enumerate(self.blocks[:-1]) if size >= need]
        i = -min(holes)[1] if holes else len(self.blocks) - 1
        offs = self.blocks[i][0]
        self.blocks[i] = [offs + need, self.blocks[i][1] - need]
        if not self.blocks[i][1]:
            del self.blocks[i]
        self.max_size = max(self.max_size, offs + need)
        return offs

    def free(self, offs, size):
        for i, b in enumerate(self.blocks):
            if b[0] + b[1] == offs:
                b[1] += size
                self._join(i)
                return
            if offs + size == b[0]:
                b[:] = offs, b[1] + size
                if i:
                    self._join(i - 1)
                return
        at = next((i for i, b in enumerate(self.blocks) if b[0] >= offs), len(self.blocks))
        self.blocks.insert(at, [offs, size])

    def _join(self, i):
        """With the next one, where they touch."""
        if i + 1 < len(self.blocks) and sum(self.blocks[i]) == self.blocks[i + 1][0]:
            self.blocks[i][1] += self.blocks.pop(i + 1)[1]


class Graph:
    """`place(nodes)`: where tensors lie, and the bytes at most; sizes: of each tensor, padded."""

    def __init__(self, table, sizes):
        self.rows, self.sizes, n = table, sizes, len(table)
        self.view = [int(r[T_VIEW_SRC]) for r in table]
        self.view_offs = [int(r[T_VIEW_OFFS]) for r in table]
        self.data = ["elsewhere" if r[T_BUFFER] >= 0 else None for r in table]
        self.kids, self.views, self.memory, self.room = [0] * n, [0] * n, Blocks(1 << 60), {}

    def sources(self, i):
        for s in self.rows[i][T_SRC:T_SRC + 10]:
            if s < 0:                           # the first absent source ends the list
                return
            yield int(s)

    def place(self, nodes):
        for i in nodes:
            if self.view[i] >= 0:
                self.views[self.view[i]] += 1
            for s in self.sources(i):
                self.kids[s] += 1
        for i in nodes:
            for t in (*self.sources(i), i):
                self._allocate(t, i)
            for s in self.sources(i):
                self._release(s)
        return self.data, self.memory.max_size

    def _allocate(self, t, node):
        if self.data[t] is not None:
            return
        if self.view[t] < 0 and t == node and IN_PLACE_2023[self.rows[t][T_OP]]:
            self._reuse(t)
        if self.view[t] >= 0:
            base = self.data[self.view[t]]
            self.data[t] = base if base == "elsewhere" else base + self.view_offs[t]
        else:
            self.data[t], self.room[t] = self.memory.alloc(self.sizes[t]), self.sizes[t]

    def _reuse(self, t):
        """The node becomes a view of a source that dies with it, or of what that source views from the start."""
        for p in self.sources(t):
            root = p if self.view[p] < 0 else self.view[p]
            if self.data[p] in (None, "elsewhere") or self.kids[p] != 1 or self.views[p] or not self._alike(t, p):
                continue
            if root == p or (self.views[root], self.kids[root]) == (1, 0) and self.data[root] == self.data[p]:
                self.view[t], self.view_offs[t], self.room[t] = root, 0, self.room[root]
                self.views[root] += 1
                return

    def _alike(self, a, b):
        a, b = self.rows[a], self.rows[b]
        return a[T_TYPE] == b[T_TYPE] and all((a[w:w + 4] == b[w:w + 4]).all() for w in (T_NE, T_NB))

    def _release(self, s):
        self.kids[s] -= 1
        if self.kids[s] or self.views[s]:
            return
        root = s if self.view[s] < 0 else self.view[s]
        if root != s:
            self.views[root] -= 1
        if not self.views[root] and not self.kids[root] and self.data[root] != "elsewhere":
            # its own bytes, which may be fewer than those of what it took the place of; ggml gives back more, too
            self.memory.free(self.data[root], min(self.sizes[root], self.room[root]))
