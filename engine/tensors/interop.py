"""Arrays in and out without copies: NumPy's protocols and DLPack.

    a = np.asarray(x)               x a leaf in host memory: its bytes, read-only
    b = torch.from_dlpack(x)        any library with DLPack
    t = gg.from_dlpack(b)           and back; t computes on b's memory

Arrays of tensor memory are read-only: the engine counts writes (engine/core/versions.py), so they go through `set` and
`with t.write() as a:`.  An array keeps its memory alive, also after `buf.free()` or when the tensor is gone.  Device
memory and quantised types are copied; BF16, which NumPy lacks, is shared by DLPack alone.  Results of a plan are copied
too, because the plan's next run overwrites them; `copy=False` gives the memory itself.
"""
import ctypes
from typing import TYPE_CHECKING

import numpy as np

from ggjit.core.arguments import nearest
from ggjit.core.other_names import of_a_tensor
from ggjit.core.table import TABLE
from ggjit.ops.core.errors import GgjitError, NoSuchAttribute, ParamError, TypeMismatch
from ggjit.ops.core.record import T_BUFFER
from ggjit.ops.core.shape import describe
from ggjit.ops.core.types import BF16

CPU_DEVICE = (1, 0)             # kDLCPU
_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"      # exports read-only arrays, takes max_version


# DLTensor inside a capsule: (bytes to it, by the capsule's name); its dtype is (code, bits, lanes) 20 bytes on
_TENSOR_AT = {b"dltensor": 0, b"dltensor_versioned": 32}
_DTYPE_AT, _UINT, _BFLOAT = 20, 1, 4
_api = ctypes.pythonapi
_api.PyCapsule_GetName.restype, _api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _dtype_of(capsule):
    """(code, bits) of a DLPack capsule, as an array over its own bytes.  NumPy has no bfloat16: its bits travel as
    unsigned numbers, and the code says what they are."""
    name = _api.PyCapsule_GetName(capsule)
    at = _api.PyCapsule_GetPointer(capsule, name) + _TENSOR_AT[name] + _DTYPE_AT
    return (ctypes.c_uint8 * 2).from_address(at)


class _Holder:
    """An object with __dlpack__, from which NumPy reads a capsule."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **asked):
        return self.capsule

    def __dlpack_device__(self):
        return CPU_DEVICE


def read_dlpack(x):
    """(array over the memory of x, are its numbers the bits of bfloat16?)  Errors: those of the protocol."""
    try:
        return np.from_dlpack(x), False
    except (BufferError, RuntimeError, TypeError):
        if tuple(x.__dlpack_device__()) != CPU_DEVICE:
            raise
        capsule = x.__dlpack__()
        dtype = _dtype_of(capsule)
        if tuple(dtype) != (_BFLOAT, 16):
            raise
        dtype[0] = _UINT
        return np.from_dlpack(_Holder(capsule)), True


class CannotExport(TypeMismatch, BufferError):
    """The consumer cannot use this tensor without a copy."""


def host_view(t, dtype=None):
    """The tensor's memory as a read-only array in NumPy order; dtype: of the bits of BF16.

    Errors: CannotExport, and those of reading it.
    """
    if t.type.dtype is None and dtype is None:
        raise CannotExport(f"{describe(t)} has no NumPy type; t.numpy() converts it to float32")
    buf, _ = t._checked_range()
    if not buf.buft.is_host():
        raise CannotExport(f"{describe(t)} lies in {buf!r}, which is not host memory; t.numpy() copies it")
    a = t._elements(t._bytes_view(), dtype).reshape(t.shape)
    a.flags.writeable = False
    return a


def is_stable(t):
    """Does the tensor have memory of its own?  That of results belongs to their plan, whose next run writes it."""
    return t._fixed_place is None and TABLE.words[t.base.id, T_BUFFER] >= 0


class ArrayProtocols:
    """Mixin of Tensor: the protocols of NumPy and DLPack."""
    __slots__ = ()

    if not TYPE_CHECKING:               # checkers would take every attribute for granted
        def __getattr__(self, name):
            """Called for attributes that a tensor lacks: t.sum() is gg.sum(t)."""
            hint = "" if name.startswith("_") else of_a_tensor(name) or nearest(name, dir(type(self)))
            raise NoSuchAttribute(f"a tensor has no attribute {name!r}{hint}", name=name, obj=self)

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
        bits = np.uint16 if self.type is BF16 else None
        if copy is False or copy is None and knows_read_only and is_stable(self):
            a = host_view(self, bits)
            if not knows_read_only:
                raise CannotExport(f"{describe(self)} is read-only, which this consumer cannot know; drop copy=False")
        elif bits:
            a = self._elements(self._bytes_view(), bits).reshape(self.shape).copy()
        elif self.type.dtype is None:
            raise CannotExport(f"{describe(self)} has no DLPack type here; export t.numpy(), which is float32")
        else:
            a = self.numpy()
        capsule = a.__dlpack__(max_version=max_version) if _VERSIONED else a.__dlpack__()
        if bits:
            _dtype_of(capsule)[0] = _BFLOAT
        return capsule
