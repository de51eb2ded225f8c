"""Offsets for one tensor at a time: ggml's best fit of 2023.

Tensors are known by id, memory by byte offsets from the buffer's base; nothing here touches memory.  The allocators
that place tensors stand on these: engine/graphs/tensor_allocators.py.

    base           aligned base                                     max_size = highest end ever, from base
    |  padding  |  a  |  b  |  free  |  c  |        tail (last resort)        |
                                                                    reset() brings back one block; max_size stays
"""
import numpy as np

from ggjit.alloc.ggml.bump import aligned_offset
from ggjit.alloc.ggml.free_list import (
    CAP_BLOCKS,
    CHUNK_HEAD,
    FULL,
    HEAD,
    MAX_BLOCKS,
    N_CHUNKS,
    UNBOUNDED,
    list_alloc,
    list_free,
    new_states,
    reset_to_block,
)
from ggjit.alloc.ggml.problem import check_alignment
from ggjit.ops.core.errors import IndexRangeError, OutOfMemory, ParamError, ShapeError
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.record import T_BUFFER, T_VIEW_SRC
from ggjit.ops.native.jit import i64s, native

MEASURE_BASE = 0x1000           # ggml_tallocr_new_measure's fake address


@native("i64(i64, i64, i64)")
def _take(state, words, size):
    return list_alloc(i64s(state, words), 0, size)[1]


@native("i64(i64, i64, i64, i64)")
def _give(state, words, offs, size):
    return 0 if list_free(i64s(state, words), 0, 0, offs, size) else 1


@native("i64(i64, i64, i64, i64)")
def _reset(state, words, offs, size):
    reset_to_block(i64s(state, words), 0, offs, size)
    return 0


class BestFit:
    """Where the `ggml_tallocr` of 2023 puts tensors: best fit with free, over one buffer.

    size        bytes of the buffer; None: it measures and never runs out
    base        address of the buffer's first byte; offsets count from it
    on_max      called with (max_size, [(id, offs, nbytes)...] by address) at every new maximum
    """

    def __init__(self, size=None, alignment=32, base=None, on_max=None):
        if size is not None and size < 0:
            raise ShapeError(f"a buffer of {size} bytes")
        self.is_measure = size is None
        self.size = UNBOUNDED if size is None else int(size)
        self.alignment = check_alignment(alignment)
        self.base = int(base) if base is not None else MEASURE_BASE if self.is_measure else 0
        self.on_max = on_max
        self.own = {}                           # id -> (offs, padded bytes) of every tensor in this buffer
        self.live = {}                          # of those, the tensors that were not given back
        self._state, self._words = new_states(1, 64, None, 1)
        self.reset()

    # ---- state
    def reset(self):
        """One free block from the aligned base; max_size stays."""
        start = aligned_offset(self.base, 0, self.alignment)
        _reset(self._state, self._words, start, self.size - (0 if self.is_measure else start))
        self.own.clear()
        self.live.clear()

    def state(self):
        """The allocator's state, for `restore`."""
        return self._state.copy(), self._words, dict(self.own), dict(self.live)

    def restore(self, state):
        """Set the allocator back to a state that `state` gave."""
        self._state, self._words, self.own, self.live = state

    @property
    def max_size(self):
        """Highest end of any allocation since creation, bytes from base."""
        return int(self._state[HEAD + 1])

    @property
    def blocks(self):
        """Free blocks as (offs, size), by address."""
        n, cap = int(self._state[HEAD]), int(self._state[CAP_BLOCKS])
        o = HEAD + CHUNK_HEAD
        return [(int(self._state[o + i]), int(self._state[o + cap + i])) for i in range(n)]

    def is_own(self, i):
        """Whether tensor i lives in this allocator's buffer."""
        return i in self.own

    def nbytes_for(self, nbytes):
        """Padded size."""
        return aligned_offset(0, int(nbytes), self.alignment)

    @oom_guard("a list of free blocks")
    def _room(self, n_blocks):
        """Make sure the list can hold n_blocks blocks; ggml stops at 256."""
        cap = int(self._state[CAP_BLOCKS])
        if n_blocks > cap:
            self._state, self._words = regrown(self._state, max(2 * cap, n_blocks))

    # ---- allocating
    def alloc(self, i, nbytes, table=None):
        """Place tensor i (nbytes bytes) and return its offset.  With the table, views and tensors that have memory
        are refused.  OutOfMemory says what is needed and what there is, and changes nothing."""
        if nbytes < 0 or nbytes > UNBOUNDED // 2:
            raise ShapeError(f"tensor {i}: {nbytes} bytes")
        if i in self.live:
            raise ParamError(f"tensor {i} has memory here already; free it or reset the allocator first")
        if table is not None and (table[i, T_VIEW_SRC] >= 0 or table[i, T_BUFFER] >= 0):
            raise ParamError(f"tensor {i} is a view or has memory already; allocate its source, or nothing")
        need = self.nbytes_for(nbytes)
        before = self.max_size
        offs = _take(self._state, self._words, need)
        if offs == FULL:
            raise OutOfMemory(f"not enough space in the buffer: tensor {i} needs {need} bytes, the largest free "
                              f"block has {max((s for _, s in self.blocks), default=0)}")
        self._place(i, int(offs), need, before)
        return int(offs)

    def _place(self, i, offs, need, before):
        self.own[i] = self.live[i] = (offs, need)
        if self.on_max and offs + need > before:
            self.on_max(offs + need, sorted(((t, *p) for t, p in self.live.items()), key=lambda p: p[1]))

    def free_id(self, i):
        """Give tensor i's bytes back; tensors of other buffers are ignored, twice is an error."""
        if i not in self.own:
            return
        if i not in self.live:
            raise IndexRangeError(f"tensor {i} was given back already")
        offs, need = self.live[i]
        self._room(len(self.live) + 2)
        assert _give(self._state, self._words, offs, need) == 0
        del self.live[i]


def regrown(state, cap):
    """A copy of one single-chunk state with room for `cap` blocks: (state, words)."""
    out, words = new_states(1, cap, None, 1)
    old = int(state[CAP_BLOCKS])
    n = int(state[HEAD])
    out[N_CHUNKS], out[MAX_BLOCKS] = state[N_CHUNKS], state[MAX_BLOCKS]
    out[HEAD:HEAD + CHUNK_HEAD] = state[HEAD:HEAD + CHUNK_HEAD]
    o = HEAD + CHUNK_HEAD
    out[o:o + n] = state[o:o + n]
    out[o + cap:o + cap + n] = state[o + old:o + old + n]
    return out, words


def stacked(tallocs, room):
    """States of several allocators side by side, each with `room` spare blocks: (states, words)."""
    cap = max(int(t._state[HEAD]) for t in tallocs) + room
    parts = [regrown(t._state, cap) for t in tallocs]
    return np.concatenate([p for p, _ in parts]), parts[0][1]
