"""Arrays in and out without copies: NumPy's protocols and DLPack.

    a = np.asarray(x)               x a leaf in host memory: its bytes, read-only
    b = torch.from_dlpack(x)        any library with DLPack
    t = gg.from_dlpack(b)           and back; t computes on b's memory

Arrays of tensor memory are read-only: the engine counts writes (engine/core/versions.py), so they go through `set` and
`with t.write() as a:`.  An array keeps its memory alive, also after `buf.free()` or when the tensor is gone.  Device
memory, quantised types and BF16 are copied.  Results of a plan are copied too, because the plan's next run overwrites
them; `copy=False` gives the memory itself.
"""
import numpy as np

from ggjit.core.table import TABLE
from ggjit.ops.core.errors import GgjitError, ParamError, TypeMismatch
from ggjit.ops.core.record import T_BUFFER
from ggjit.ops.core.shape import describe

CPU_DEVICE = (1, 0)             # kDLCPU
_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"      # exports read-only arrays, takes max_version


class CannotExport(TypeMismatch, BufferError):
    """The consumer cannot use this tensor without a copy."""


def host_view(t):
    """The tensor's memory as a read-only array in NumPy order.  Errors: CannotExport, and those of reading it."""
    if t.type.dtype is None:
        raise CannotExport(f"{describe(t)} has no NumPy type; t.numpy() converts it to float32")
    buf, _ = t._checked_range()
    if not buf.buft.is_host():
        raise CannotExport(f"{describe(t)} lies in {buf!r}, which is not host memory; t.numpy() copies it")
    a = t._elements(t._bytes_view()).reshape(t.shape)
    a.flags.writeable = False
    return a


def is_stable(t):
    """Does the tensor have memory of its own?  That of results belongs to their plan, whose next run writes it."""
    return t._fixed_place is None and TABLE.words[t.base.id, T_BUFFER] >= 0


class ArrayProtocols:
    """Mixin of Tensor: the protocols of NumPy and DLPack."""
    __slots__ = ()

    @property
    def __array_interface__(self):
        """Version 3, of leaves in host memory.  `data` is an object, so that the memory lives as long as the array."""
        try:
            if is_stable(self):
                a = host_view(self)
                return {"version": 3, "shape": a.shape, "typestr": a.dtype.str, "strides": a.strides,
                        "data": self._bytes_view().data.toreadonly()}
        except GgjitError:
            pass                        # NumPy tries __array__ next, which raises the error
        raise AttributeError("__array_interface__")

    def __array__(self, dtype=None, copy=None):
        """np.asarray(t), np.array(t).  copy=False: the memory itself, or a ParamError where that cannot be."""
        if copy is False or copy is None and is_stable(self):
            try:
                a = host_view(self)
            except CannotExport as e:
                if copy is False:
                    raise ParamError(f"copy=False: {e}") from None
                a = self.numpy()
        else:
            a = self.numpy()
        if dtype is None or a.dtype == dtype:
            return a
        if copy is False:
            raise ParamError(f"copy=False: {describe(self)} would have to be converted to {np.dtype(dtype)}")
        return a.astype(dtype)

    def __dlpack_device__(self):
        """(kDLCPU, 0): exports are host memory."""
        return CPU_DEVICE

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule.  Consumers older than DLPack 1.0 cannot be told "read-only" and get a copy.

        Errors: CannotExport (a BufferError, as the protocol asks).
        """
        if dl_device is not None and tuple(dl_device) != CPU_DEVICE:
            raise CannotExport(f"{describe(self)} can be exported to the CPU (1, 0), not to device {dl_device}")
        knows_read_only = _VERSIONED and max_version is not None and max_version[0] >= 1
        if copy is False or copy is None and knows_read_only and is_stable(self):
            a = host_view(self)
            if not knows_read_only:
                raise CannotExport(f"{describe(self)} is read-only, which this consumer cannot know; drop copy=False")
        elif self.type.dtype is None:
            raise CannotExport(f"{describe(self)} has no DLPack type here; export t.numpy(), which is float32")
        else:
            a = self.numpy()
        return a.__dlpack__(max_version=max_version) if _VERSIONED else a.__dlpack__()
