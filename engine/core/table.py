"""The tensor table: one process-wide array of records, one row per tensor; a tensor is its row number.

        id   type op flags gen | ne nb params | src ids            | view_src offs | buffer offs | ctx
        0    F32  NONE  0   1  | ...          | -1 -1 ...          | -1       0    | 3      4096 | 0
        1    F32  MUL   2   1  | ...          |  0  5 -1 ...       | -1       0    | -1        0 | 0
        ...                                                          (layout: ops/core/record.py)

Why one table: jitted passes (allocators, scheduler, planning) walk ids in flat memory instead of chasing Python
objects, and tensors of different contexts (weights, KV cache, compute) refer to each other by plain integers.

The table never moves.  Address space for all rows is reserved once and pages appear when they are first written, so
nogil code may hold its address; growing by copy loses the writes of running threads.  A full table is an OutOfMemory.

A row lives as long as the handle on it (engine/tensors/tensor.py): variables of the program, nodes that read the tensor
and graphs hold it.  Rows are recycled.  `generation` counts the lives of a row; a handle remembers the
generation it was made in, so a handle whose context was freed is noticed.

Handles die at any time, even inside a table operation: weak references to them are only appended to a queue, by C code,
and the next allocation recycles.
"""
import collections
import functools
import struct

import numpy as np

from ggjit.ops.core.address_space import AddressSpace
from ggjit.ops.core.errors import OutOfMemory, ParamError
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.core.record import MAX_PARAMS, MAX_SRC, T_BUFFER, T_FLAGS, T_GEN, T_OFFS, T_SRC, T_WORDS, TENSOR, WORD
from ggjit.ops.core.weak import NumberedRef

FREED = -2                      # buffer word of a tensor whose buffer was freed; -1: never had one
CAPACITY = 1 << 21              # rows; 640 MB of address space, used page by page

_ROW = struct.Struct(f"4q4q4q{MAX_PARAMS}i{MAX_SRC}q5q")         # a row is written in one go
_ROW_NBYTES = T_WORDS * WORD
_AT_ONCE = 64                   # rows that are made ready, or recycled, in one go
NO_SRC = (-1,) * MAX_SRC
NO_PARAMS = (0,) * MAX_PARAMS


class RowTemplate:
    """What rows of nodes that differ in their sources have in common, from row `row`: op, type, shape, parameters.

    write(memory, at, head, generation, body, *ids of the sources, rest, ctx id); of a view, `rest` is
    missing ids, view_src, view_offs, unplaced
    """
    __slots__ = ("head", "body", "no_src", "unplaced", "write")

    def __init__(self, memory, row, n_src, view):
        at = row * T_WORDS * WORD
        self.head = bytes(memory[at:at + T_GEN * WORD])
        self.body = bytes(memory[at + (T_GEN + 1) * WORD:at + T_SRC * WORD])
        self.no_src = b"\xff" * (WORD * (MAX_SRC - n_src))              # id -1 for every missing source
        self.unplaced = struct.pack("2q", -1, 0)
        if not view:
            self.no_src += 2 * self.unplaced                            # no view_src, no buffer
        rest = f"{len(self.no_src)}s2q{2 * WORD}s" if view else f"{len(self.no_src)}s"
        self.write = _format(f"={T_GEN * WORD}sq{len(self.body)}s{n_src}q{rest}q").pack_into


_format = functools.cache(struct.Struct)


def _no_handle():
    """Stands for the handle on a free row: no tensor."""
    return None


class Table:
    """Rows, their recycling, and the version by which plans notice that tensors moved."""

    def __init__(self, capacity=CAPACITY):
        self.capacity = capacity
        self._space = AddressSpace(capacity * _ROW_NBYTES)
        self._memory = self._space.memory
        self.records = np.frombuffer(self._memory, TENSOR)              # the rows as records, by field name
        # the rows as words, for jitted code
        self.words = np.frombuffer(self._memory, np.int64).reshape(capacity, T_WORDS)
        self.cells = self._memory.cast("q")                             # the same, flat: one word costs 50 ns
        self.placement_version = 0          # goes up whenever any tensor or buffer may have moved
        self._top = 0                       # all rows below have been used at some time
        self._free = []                     # rows with no buffer
        self.handles = []                   # NumberedRef of the handle on each row
        self._strays = []                   # weak references to handles on rows that were given back before they died
        self.strays_version = 0             # goes up with every such handle
        self._dead = collections.deque()    # NumberedRefs of handles and contexts that are gone
        self.note_dead = self._dead.append
        self._contexts = {}                 # id of a context -> (its NumberedRef, those of its tensors)
        self._lock = ForkLock()

    def new(self, type_id, op, flags, ne, nb, params, src, view_src, view_offs, buffer, offs, ctx_id):
        """Write one row; returns its id and generation.  Sequences are full length (NO_SRC, NO_PARAMS for none)."""
        row = self._row()
        generation, at = self.cells[row * T_WORDS + T_GEN], row * T_WORDS * WORD
        try:
            self._memory[at:at + _ROW.size] = _ROW.pack(type_id, op, flags, generation, *ne, *nb, *params, *src,
                                                        view_src, view_offs, buffer, offs, ctx_id)
        except struct.error:
            self._free.append(row)
            raise ParamError(f"a size, stride, offset (64 bits) or parameter (32 bits) is too large: ne {list(ne)},"
                             f" nb {list(nb)}, view offset {view_offs}, params {list(params)}") from None
        return row, generation

    def like(self, template, src, ctx_id, view_src=-1, view_offs=0):
        """Write one row as `template` says, with these sources; returns its id and generation."""
        if len(self._dead) > _AT_ONCE:
            self._recycle_now()
        try:
            row = self._free.pop()          # needs no lock: list.pop is one step of C code
        except IndexError:
            row = self._new_row()
        generation = self.cells[row * T_WORDS + T_GEN]
        if view_src < 0:
            template.write(self._memory, row * _ROW_NBYTES, template.head, generation, template.body, *src,
                           template.no_src, ctx_id)
        else:
            template.write(self._memory, row * _ROW_NBYTES, template.head, generation, template.body, *src,
                           template.no_src, view_src, view_offs, template.unplaced, ctx_id)
        return row, generation

    def _row(self):
        """A row that is free."""
        if len(self._dead) > _AT_ONCE:
            self._recycle_now()
        try:
            return self._free.pop()
        except IndexError:
            return self._new_row()

    def _recycle_now(self):
        with self._lock:
            self._recycle()

    def _new_row(self):
        with self._lock:
            if self._top == self.capacity:
                self._recycle()
                try:
                    return self._free.pop()
                except IndexError:
                    raise OutOfMemory(f"the tensor table is full ({self.capacity} tensors alive); free a Context, or "
                                      f"replay one plan instead of building a graph per step") from None
            first, top = self._top, min(self._top + _AT_ONCE, self.capacity)
            self._space.commit(top * _ROW_NBYTES)
            self._top = top
            self.words[first:self._top, T_BUFFER] = -1
            self.handles += [_no_handle] * (self._top - first)
            self._free[:0] = range(self._top - 1, first, -1)
            return first

    def template(self, row, n_src, view):
        return RowTemplate(self._memory, row, n_src, view)

    def refs(self, ctx):
        """A list for the NumberedRefs of a new context's tensors, each NumberedRef(t, TABLE.note_dead) with its row as
        number.

        The table holds the list until the context is gone: Python calls no weak reference that only garbage holds.
        """
        ref, mine = NumberedRef(ctx, self.note_dead), []
        ref.number = -1 - ctx.id            # rows are 0 and more
        self._contexts[ctx.id] = ref, mine
        return mine

    def release(self, refs):
        """Let these rows be used again, though handles on them may be left."""
        with self._lock:
            left = [ref for ref in refs if ref() is not None]
            if left:
                self._strays = [ref for ref in self._strays if ref() is not None] + left
                self.strays_version += 1
            self._recycle(refs)
            refs.clear()
            self.placement_version += 1     # plans of these tensors notice that they are gone

    def _recycle(self, dead=()):
        dead, rows = [*dead, *(self._dead.popleft() for _ in range(len(self._dead)))], []
        for ref in dead:
            number = getattr(ref, "number", None)           # None: the row was given back already, or not yet taken
            ref.number = None
            if number is not None:
                if number >= 0:
                    rows.append(number)
                else:
                    del self._contexts[-1 - number]
        if len(rows) > _AT_ONCE // 4:
            self.words[rows, T_GEN] += 1
            self.words[rows, T_BUFFER] = -1
        else:                               # plain Python is faster than NumPy for a row
            for row in rows:
                self.cells[row * T_WORDS + T_GEN] += 1
                self.cells[row * T_WORDS + T_BUFFER] = -1
        for row in rows:
            self.handles[row] = _no_handle
        self._free.extend(rows)

    def has_strays(self):
        """Is there a handle on a row that was given back?"""
        if self._strays:
            with self._lock:                # other threads drop them, too
                while self._strays and self._strays[-1]() is None:
                    self._strays.pop()
        return bool(self._strays)

    @property
    def n_rows(self):
        """Rows that were used so far."""
        return self._top

    def n_alive(self):
        """Rows in use."""
        with self._lock:
            self._recycle()
            return self._top - len(self._free)

    def place(self, row, buffer_id, offs):
        """Set the memory of a leaf."""
        with self._lock:
            self.cells[row * T_WORDS + T_BUFFER] = buffer_id
            self.cells[row * T_WORDS + T_OFFS] = offs
            self.placement_version += 1

    def unplace_all(self, buffer_id):
        """A buffer was freed: its tensors are marked FREED.

        Other threads run between the look and the write.  With the lock no row is placed or recycled meanwhile, and a
        free row, which they may take, has no buffer.
        """
        with self._lock:
            placed = self.words[:self._top, T_BUFFER]
            placed[placed == buffer_id] = FREED
            self.placement_version += 1

    def flag(self, row, flag, on=True):
        self.words[row, T_FLAGS] = (int(self.words[row, T_FLAGS]) & ~flag) | (flag if on else 0)


TABLE = Table()
