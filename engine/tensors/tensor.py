"""Tensor: a thin handle on a row of the tensor table.

`ne` and `nb` are in ggml's order (ne0 is the fastest dimension, nb in bytes), four entries each.  The first `ndim` of
them are the axes of the tensor; `shape` is NumPy's, these reversed:

    ne = (4, 3, 1, 1)   nb = (4, 16, 48, 48)   ndim = 2          shape = (3, 4)

         ne0 ->
        +----+----+----+----+        element (i0, i1) lies at  offs + i0*nb0 + i1*nb1
    ne1 | 0  | 4  | 8  | 12 |
     |  | 16 | 20 | 24 | 28 |        (numbers: byte offsets)
     v  | 32 | 36 | 40 | 44 |
        +----+----+----+----+
"""
import contextlib
import itertools

import numpy as np

from ggjit.core.buffer import as_bytes, buffer_by_id, freed
from ggjit.core.html_repr import HtmlRepr
from ggjit.core.pending import IN_FLIGHT, wait_for_writers
from ggjit.core.table import FREED, TABLE
from ggjit.core.versions import VERSIONS, count_write
from ggjit.ops.core.errors import (
    IndexRangeError,
    NotAllocated,
    ParamError,
    ReadOnly,
    ShapeError,
    StaleHandle,
    TypeMismatch,
)
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.record import FLAG_INPUT, FLAG_OUTPUT, FLAG_PARAM, T_BUFFER, T_FLAGS, T_GEN, T_OFFS, T_WORDS
from ggjit.ops.core.shape import describe, is_contiguous
from ggjit.ops.core.types import BF16
from ggjit.ops.core.whole_numbers import whole
from ggjit.ops.types.quantize import dequantize, quantize
from ggjit.tensors.arrays import numbers
from ggjit.tensors.interop import ArrayProtocols
from ggjit.tensors.operators import Operators
from ggjit.tensors.summary import label, op_name, state, values_text


class TensorLayout:
    """What builders look at in a tensor: type, sizes, strides, number of axes.  `layout_of` makes equal ones once.

    nbytes: from the first element to the last, inclusive (ggml_nbytes: by strides, gaps counted).
    """
    __slots__ = ("type", "ne", "nb", "ndim", "nbytes")

    def __init__(self, type, ne, nb, ndim):
        row = type.nbytes + (ne[0] - 1) * nb[0] if type.block == 1 else ne[0] * nb[0] // type.block
        nbytes = row + sum([(ne[k] - 1) * nb[k] for k in (1, 2, 3)]) if min(ne) > 0 else 0
        for name, fact in zip(self.__slots__, (type, ne, nb, ndim, nbytes), strict=True):
            object.__setattr__(self, name, fact)

    def __setattr__(self, attribute, value):
        raise ReadOnly(f"a layout stays as it is: many tensors share it; .{attribute} cannot be set")


_layouts = {}
_MAX_LAYOUTS = 1 << 14          # then they are forgotten; tensors keep theirs


def layout_of(*facts):
    """The TensorLayout of type, ne, nb, ndim."""
    found = _layouts.get(facts)
    if found is None:
        if len(_layouts) >= _MAX_LAYOUTS:
            _layouts.clear()
        found = _layouts.setdefault(facts, TensorLayout(*facts))
    return found


class Tensor(Operators, ArrayProtocols, HtmlRepr):
    """A tensor: a leaf with memory of its own, a view of one, or the result of an op in a graph."""

    __slots__ = ("id", "generation", "ctx", "layout", "type", "op", "ne", "nb", "ndim", "src", "view_src", "view_offs",
                 "name", "_made_by", "_made_step", "_plan", "_holds", "__weakref__")

    def __init__(self, id, generation, ctx, op, layout, src, view_src, view_offs, name, made_by=None, made_step=0):
        self.id = id
        self.generation = generation
        self.ctx = ctx
        self.op = op
        self.layout = layout
        self.type = layout.type
        self.ne = layout.ne
        self.nb = layout.nb
        self.ndim = layout.ndim
        self.src = src
        self.view_src = view_src
        self.view_offs = view_offs
        self.name = name
        self._made_by = made_by         # code object of the program that made it, and where in it: see made_at
        self._made_step = made_step
        self._plan = None               # weak reference to the plan that computed it last
        self._holds = None              # objects that this handle keeps alive: see _hold

    def __setattr__(self, attribute, value):
        if attribute not in _SETTABLE:
            raise ReadOnly(f"{describe(self)}: .{attribute} cannot be set, a tensor stays what it was made as"
                           f"{_INSTEAD.get(attribute, '')}")
        if attribute == "name" and not isinstance(value, str):
            raise TypeMismatch(f"{describe(self)}: a name is a str, got {value!r}")
        object.__setattr__(self, attribute, value)

    def __delattr__(self, attribute):
        raise ReadOnly(f"{describe(self)}: .{attribute} cannot be deleted")

    _fixed_place = None                 # (buffer, offset) under a scheduler (engine/graphs/placed.py)

    def _hold(self, kind, thing):
        """Keep `thing` alive as long as this tensor; one of each kind.

        "memory": the buffer of a leaf.  "results": what gg.compute left of this output.  "function": a custom op's.
        """
        if self._holds is None:
            self._holds = {}
        self._holds[kind] = thing

    def _count_write(self):
        VERSIONS[self.base.id] += 1

    def _check(self):
        if not self.ctx.alive or TABLE.cells[self.id * T_WORDS + T_GEN] != self.generation:
            raise StaleHandle(f"{self.name or 'tensor'} belongs to a Context that was freed; make a new one")
        # the base's row may belong to another tensor by now
        if self.view_src is not None and not self.view_src.ctx.alive:
            raise StaleHandle(f"{self.name or 'tensor'} is a view of {self.view_src.name or 'a tensor'}, which belongs "
                              f"to a Context that was freed")

    # ------------------------------------------------------------ facts
    @property
    def shape(self):
        """NumPy order: the first `ndim` sizes of ne, reversed; () for a tensor without axes."""
        return self.ne[:self.ndim][::-1]

    @property
    def made_at(self):
        """(file, line) of the call that made it."""
        code = self._made_by
        if code is None:
            return "", 0
        line = next(itertools.islice(code.co_positions(), self._made_step // 2, None))[0]      # two bytes a step
        return code.co_filename, code.co_firstlineno if line is None else line

    @property
    def nbytes(self):
        """Bytes from the first element to the last, inclusive (ggml_nbytes: by strides, gaps counted)."""
        return self.layout.nbytes

    @property
    def flags(self):
        """Bits of FLAG_INPUT, FLAG_OUTPUT, FLAG_PARAM and FLAG_LOSS (ops/core/record.py)."""
        self._check()                   # raises for a freed tensor, whose row may belong to another
        return int(TABLE.words[self.id, T_FLAGS])

    def _mark(self, flag):
        """Set a flag of record.py; returns the tensor."""
        self._check()
        TABLE.flag(self.id, flag)
        return self

    @property
    def op_params(self):
        """The 16 int32 slots; floats are stored as their bits."""
        self._check()
        return TABLE.records["op_params"][self.id].copy()

    @property
    def param_floats(self):
        """The same slots read as float32."""
        return self.op_params.view(np.float32)

    @property
    def base(self):
        """The tensor whose memory this one uses: itself, or the end of its view chain."""
        return self if self.view_src is None else self.view_src

    @property
    def buffer(self):
        """The buffer that holds it, or None (results of ops: in the plan that ran last)."""
        where = self._where()
        return None if where is None else where[0]

    @property
    def offs(self):
        """Byte offset in `buffer.arena`: buffer.arena[t.offs : t.offs + t.nbytes] are its bytes."""
        where = self._where()
        if where is None:
            raise NotAllocated(f"{describe(self)} has no memory; use alloc_ctx_tensors or a GraphAllocator")
        return where[1]

    def _where(self):
        """(buffer, byte offset) or None."""
        self._check()
        base = self.base
        row, cells = base.id * T_WORDS, TABLE.cells
        buffer_id = cells[row + T_BUFFER]
        if buffer_id >= 0:
            return buffer_by_id(buffer_id, base), cells[row + T_OFFS] + self.view_offs
        plan = self._plan() if self._plan is not None else None
        if plan is None and buffer_id == FREED:
            raise freed(base)
        return plan.where(self) if plan is not None else None

    def __repr__(self):
        op = "" if not self.op else f" = {op_name(self)}({', '.join(map(label, self.src))})"
        return f"<{describe(self)}{op}, {state(self)}>"

    def __str__(self):
        """The values as NumPy prints them, where they can be read; else the repr, which says why not."""
        return values_text(self)

    def __reduce__(self):
        raise TypeMismatch(f"{describe(self)} cannot be pickled by itself; copy.copy(t) is a leaf; "
                           f"pickle its Graph, or save the values with ggjit.models.save_gguf")

    # ------------------------------------------------------------ data
    def _checked_range(self, offset=0, nbytes=None):
        """(buffer, number of bytes) of a byte range, checked: IndexRangeError, NotAllocated, Overwritten."""
        offset = whole(offset, "offset")
        nbytes = self.nbytes - offset if nbytes is None else whole(nbytes, "nbytes")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise IndexRangeError(f"bytes {offset}..{offset + nbytes} are outside {describe(self)} "
                                  f"({self.nbytes} bytes)")
        plan = self._plan() if self._plan is not None else None
        if plan is not None and TABLE.words[self.base.id, T_BUFFER] < 0:
            plan.check_intact(self)
        where = self._where()
        if where is None:
            how = "use alloc_ctx_tensors and set it" if not self.op else \
                "compute it first; if it was, keep the plan that did in a variable, or use gg.compute"
            raise NotAllocated(f"{describe(self)} has no memory; {how}")
        if not where[0].is_bound(self):
            raise NotAllocated(f"{describe(self)} has a place in {where[0]!r}, which has not bound it to memory yet")
        return where[0], nbytes

    def _bytes_view(self, offset=0, nbytes=None):
        """uint8 array of the tensor's bytes: the memory itself where it is host memory, else a copy."""
        buf, nbytes = self._checked_range(offset, nbytes)
        if IN_FLIGHT:
            wait_for_writers(buf)
        if buf.buft.is_host():
            return buf.host_bytes(self.offs + offset, nbytes)
        return np.frombuffer(buf.get_tensor(self, offset, nbytes), np.uint8)

    def bytes(self, offset=0, nbytes=None):
        """A copy of its raw bytes (for a view with gaps: from the first element to the last)."""
        with oom_guard("bytes of", self):
            return self._bytes_view(offset, nbytes).tobytes()

    def set_bytes(self, data, offset=0):
        """Write raw bytes at byte `offset` of the tensor."""
        with oom_guard("set_bytes", self):
            raw = as_bytes(data)
            self._checked_range(offset, raw.size)[0].set_tensor(self, raw, offset)

    def set(self, array):
        """Write `array` (NumPy order; same number of elements per dimension), converted or quantised to the type."""
        with oom_guard("set", self):
            self._set(array)

    def _set(self, array):
        a = numbers(array, f"set {describe(self)}")
        want = tuple(reversed(self.ne))
        if a.ndim > 4 or (1,) * (4 - a.ndim) + a.shape != want:
            raise ShapeError(f"set: {describe(self)} has shape {self.shape}, the array {a.shape}")
        buf, nbytes = self._checked_range()
        a = a.reshape(want)
        contiguous = is_contiguous(self)
        if self.type.block > 1 or self.type is BF16:
            if not contiguous:
                raise ShapeError(f"set: {describe(self)} is a strided view; set rows of its base {describe(self.base)}")
            buf.set_tensor(self, quantize(self.type, a).reshape(-1), 0)
        elif self.type.dtype.kind == "i" and a.dtype.kind == "f":
            raise TypeMismatch(f"set: cannot store {a.dtype} values in {describe(self)}; round them to integers first")
        elif self.type.dtype.kind == "i" and a.size and not _in_range(a, self.type.dtype):
            raise ParamError(f"set: values from {a.min()} to {a.max()} do not fit {describe(self)}; use a wider "
                             f"type, or clip them")
        elif buf.buft.is_host():
            self._elements(buf.host_bytes(self.offs, nbytes, write=True))[...] = a
            count_write(self)
        else:
            raw = np.empty(nbytes, np.uint8) if contiguous else np.frombuffer(buf.get_tensor(self), np.uint8).copy()
            self._elements(raw)[...] = a
            buf.set_tensor(self, raw, 0)

    @contextlib.contextmanager
    def write(self):
        """The values as a writable array in NumPy order (scalar types), for the length of a `with` block.

            with t.write() as a:
                a[0] = 1

        On a device without host memory it is a copy that is sent back at the end.  Errors: TypeMismatch for
        quantised types and BF16 (use set).
        """
        if self.type.block > 1 or self.type is BF16:
            raise TypeMismatch(f"write: {describe(self)} is not an array of numbers; use set, which converts")
        buf, nbytes = self._checked_range()
        host = buf.buft.is_host()
        if IN_FLIGHT:
            wait_for_writers(buf)
        with oom_guard("write", self):
            raw = buf.host_bytes(self.offs, nbytes, write=True) if host else self._bytes_view().copy()
        a = self._elements(raw).reshape(self.shape)         # only axes of length 1 go: never a copy
        a = buf.write_view(a) if host else a
        count_write(self)
        try:
            yield a
        finally:
            a.flags.writeable = False
            if host:
                count_write(self)
            else:
                buf.set_tensor(self, raw, 0)

    def numpy(self):
        """A copy of the values in NumPy order: float16 for F16; BF16 and quantised types come as float32.

        Waits for schedulers whose asynchronous work may still write them.
        """
        run = self._plan() if self._plan is not None else None
        with oom_guard("numpy", self):
            if run is not None and TABLE.words[self.base.id, T_BUFFER] < 0:
                return run.values(self)
            return self._decoded(self._bytes_view())

    def _decoded(self, raw):
        """The values encoded in the bytes `raw`, as a copy."""
        if self.type.block > 1 or self.type is BF16:
            return self._dequantized(raw)
        return self._elements(raw).reshape(self.shape).copy()

    def _elements(self, raw, dtype=None):
        """Strided NumPy view of scalar elements, 4 dimensions in NumPy order (BF16: pass the dtype of its bits)."""
        dtype = dtype or self.type.dtype
        if raw.size == 0:
            return np.empty(tuple(reversed(self.ne)), dtype)
        return np.ndarray(tuple(reversed(self.ne)), dtype, raw.data, 0, tuple(reversed(self.nb)))

    def _dequantized(self, raw):
        if self.type is BF16:                   # the upper halves of float32, at any strides
            bits = self._elements(raw, np.uint16).astype(np.uint32) << 16
            return bits.view(np.float32).reshape(self.shape)
        row = self.type.row_nbytes(self.ne[0])
        if self.nb[0] != self.type.nbytes:
            raise ShapeError(f"numpy: elements of {describe(self)} are not side by side in a row; use gg.cont first")
        shape = (*reversed(self.ne[1:]), row)
        if not raw.size:
            return np.empty(self.shape, np.float32)
        rows = np.ndarray(shape, np.uint8, raw.data, 0, (*reversed(self.nb[1:]), 1))
        return dequantize(self.type, np.ascontiguousarray(rows), self.shape)


_SETTABLE = frozenset(["name", "_plan", "_holds"])
_INSTEAD = {             # the remedy in the error, by attribute
    **dict.fromkeys(("ne", "nb", "shape", "view_src", "view_offs"), "; gg.reshape_4d, gg.view_4d and gg.permute give "
                                                                    "views of another shape"),
    "type": "; gg.cast gives another type", **dict.fromkeys(("op", "src", "op_params"), "; build another node"),
    **dict.fromkeys(("buffer", "offs"), "; gg.alloc_ctx_tensors and allocators place tensors"),
    "flags": "; use gg.set_input, gg.set_output or gg.set_param"}


class NewTensor(Tensor):
    """A tensor under construction: attributes are set without Tensor's checks, then its class becomes Tensor."""
    __slots__ = ()
    __setattr__, __delattr__ = object.__setattr__, object.__delattr__


def _in_range(a, dtype):
    limits = np.iinfo(dtype)
    return limits.min <= int(a.min()) and int(a.max()) <= limits.max


def set_input(t):
    """Mark a leaf as an input: allocators place inputs first and never let other tensors overlap them.  Returns it.

        x = gg.set_input(ctx.new_tensor(gg.F32, (64,)))

    Source: ggml_set_input.
    """
    return t._mark(FLAG_INPUT)


def set_output(t):
    """Mark a result as an output: its memory is never reused, so it can be read after the compute.  Returns it.

        h = gg.set_output(gg.rms_norm(t, 1e-5))

    Source: ggml_set_output.
    """
    t._mark(FLAG_OUTPUT)
    if t.view_src is not None:              # a view has no memory of its own: keep that of its base
        t.view_src._mark(FLAG_OUTPUT)
    return t


def set_param(t):
    """Mark a leaf as a trainable parameter, for `build_backward_expand`.  Returns it.

        w = gg.set_param(gg.tensor([[1.0, 2.0]]))

    Source: ggml_set_param.
    """
    return t._mark(FLAG_PARAM)


def set_name(t, name):
    """Give the tensor a name (shown in errors, plans and reports); returns it.

        gg.set_name(gg.add(t, t), "twice")

    Source: ggml_set_name.
    """
    t.name = str(name)
    return t

