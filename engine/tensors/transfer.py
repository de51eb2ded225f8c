"""Moving tensor data: between host and tensors, between tensors.

    tensor_set / tensor_get / tensor_memset, *_async, *_2d       bytes in and out, with exact bounds
    tensor_copy, tensor_copy_async                               one tensor to another of the same layout
    view_init                                                    is a view usable, and where does it lie

Whole graphs: graphs/copying.py.  Names are ggml's without `ggml_backend_`.
"""
import sys

from ggjit.core.buffer import as_bytes
from ggjit.core.config import debug
from ggjit.core.pending import wait_for_writers
from ggjit.core.table import TABLE
from ggjit.ops.core.errors import IndexRangeError, NotAllocated, ParamError, ShapeError
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.record import T_BUFFER
from ggjit.ops.core.shape import describe
from ggjit.ops.core.whole_numbers import is_whole, whole

_MAX_GAPS_NBYTES = 1 << 30      # between the blocks that a 2-D read returns


# ---------------------------------------------------------------- bytes in and out
def tensor_set(t, data, offset=0):
    """Write raw bytes, or an array's, at byte `offset` of t; waits for work that still uses them.

        gg.tensor_set(t, np.float32([5, 6]), 4)

    Errors: NotAllocated, IndexRangeError, ParamError (read-only memory).  Source: ggml_backend_tensor_set.
    """
    t.set_bytes(data, offset)


def tensor_get(t, offset=0, nbytes=None):
    """`nbytes` raw bytes from byte `offset` of t on, by default all that follow.

        np.frombuffer(gg.tensor_get(t, 4, 8), np.float32)

    Errors: NotAllocated, Overwritten, IndexRangeError.  Source: ggml_backend_tensor_get.
    """
    return t.bytes(offset, nbytes)


def tensor_memset(t, value, offset=0, nbytes=None):
    """Fill `nbytes` bytes from byte `offset` of t on, by default all that follow, with a byte 0 to 255.

        gg.tensor_memset(t, 0)

    Errors: NotAllocated, IndexRangeError, ParamError.  Source: ggml_backend_tensor_memset.
    """
    if not is_whole(value, 0, 255):
        raise ParamError(f"memset value must be a byte 0..255, got {value!r}")
    buf, nbytes = t._checked_range(offset, nbytes)
    buf.memset_tensor(t, int(value), offset, nbytes)


def tensor_set_async(backend, t, data, offset=0):
    """tensor_set in `backend`'s order; `data` must stay as it is until it synchronizes.

        gg.tensor_set_async(cpu, t, data)
        cpu.synchronize()

    Errors as `tensor_set`.  Source: ggml_backend_tensor_set_async.
    """
    raw = as_bytes(data)
    t._checked_range(offset, raw.size)
    backend.set_tensor_async(t, raw, offset)


def tensor_get_async(backend, t, offset=0, nbytes=None):
    """tensor_get after everything submitted to `backend`; complete once it synchronizes.

        raw = gg.tensor_get_async(cpu, t)
        cpu.synchronize()

    Errors as `tensor_get`.  Source: ggml_backend_tensor_get_async.
    """
    _, nbytes = t._checked_range(offset, nbytes)
    with oom_guard("tensor_get_async", t):
        return backend.get_tensor_async(t, offset, nbytes)


def tensor_set_2d(t, data, offset, nbytes, n_copies, stride, data_stride):
    """Write n_copies blocks of nbytes bytes: block i goes from data[i * data_stride] to byte offset + i * stride.

        data    |#####---|#####---|#####---|          #: nbytes,   |..|: data_stride
        tensor  ..offset..|#####-|#####-|#####-|                   |..|: stride

        gg.tensor_set_2d(t, data, 0, 4, 2, t.nb[1], 4)      # the first F32 of each of two rows

    Sizes and strides are in bytes.  Errors: NotAllocated, IndexRangeError, ParamError.  Source:
    ggml_backend_tensor_set_2d.
    """
    raw = as_bytes(data)
    buf = _check_2d(t, offset, nbytes, n_copies, stride, data_stride, raw.size)
    if buf is not None:
        buf.set_tensor_2d(t, raw, offset, nbytes, n_copies, stride, data_stride)


def tensor_get_2d(t, offset, nbytes, n_copies, stride, data_stride):
    """Read the blocks of `tensor_set_2d`; block i lies at byte i * data_stride of the result, gaps are zero.

        gg.tensor_get_2d(t, 0, 4, 2, t.nb[1], 4)            # the first F32 of each of two rows

    Errors: NotAllocated, IndexRangeError, ParamError.  Source: ggml_backend_tensor_get_2d.
    """
    buf = _check_2d(t, offset, nbytes, n_copies, stride, data_stride)
    if buf is None:
        return b""
    wait_for_writers(buf)
    with oom_guard("tensor_get_2d", t):
        return buf.get_tensor_2d(t, offset, nbytes, n_copies, stride, data_stride)


def tensor_set_2d_async(backend, t, data, offset, nbytes, n_copies, stride, data_stride):
    """tensor_set_2d in `backend`'s order; `data` must stay as it is until it synchronizes.

        gg.tensor_set_2d_async(cpu, t, data, 0, 4, 2, t.nb[1], 4)
        cpu.synchronize()

    Errors as `tensor_set_2d`.  Source: ggml_backend_tensor_set_2d_async.
    """
    raw = as_bytes(data)
    if _check_2d(t, offset, nbytes, n_copies, stride, data_stride, raw.size) is not None:
        backend.set_tensor_2d_async(t, raw, offset, nbytes, n_copies, stride, data_stride)


def tensor_get_2d_async(backend, t, offset, nbytes, n_copies, stride, data_stride):
    """tensor_get_2d after everything submitted to `backend`; complete once it synchronizes.

        raw = gg.tensor_get_2d_async(cpu, t, 0, 4, 2, t.nb[1], 4)
        cpu.synchronize()

    Errors as `tensor_get_2d`.  Source: ggml_backend_tensor_get_2d_async.
    """
    if _check_2d(t, offset, nbytes, n_copies, stride, data_stride) is None:
        return b""
    return backend.get_tensor_2d_async(t, offset, nbytes, n_copies, stride, data_stride)


def _check_2d(t, offset, nbytes, n_copies, stride, data_stride, given=None):
    """The tensor's buffer, or None where there is nothing to copy.  given: bytes of the data; None for a read."""
    names = ("nbytes", "n_copies", "stride", "data_stride")
    sizes = [whole(n, name) for n, name in zip((nbytes, n_copies, stride, data_stride), names, strict=True)]
    if min(sizes) < 0:
        raise ParamError("2-D copies take sizes, counts and strides of zero or more")
    if nbytes and n_copies > t.nbytes:                  # possible only with strides of 0
        raise IndexRangeError(f"{n_copies} blocks are more than {describe(t)} has bytes ({t.nbytes})")
    if given is not None and n_copies and (n_copies - 1) * data_stride + nbytes > given:
        raise IndexRangeError(f"{n_copies} blocks of {nbytes} bytes, {data_stride} apart, are more than the {given} "
                              f"bytes given")
    if not nbytes or not n_copies:
        t._checked_range(offset, 0)
        return None
    if given is None and (n_copies - 1) * (data_stride - nbytes) > _MAX_GAPS_NBYTES:
        raise IndexRangeError(f"{n_copies} blocks of {nbytes} bytes, {data_stride} apart: more than "
                              f"{_MAX_GAPS_NBYTES:,} bytes of gaps; use a smaller data_stride")
    t._checked_range(offset, nbytes)
    return t._checked_range(offset + (n_copies - 1) * stride, nbytes)[0]


# ---------------------------------------------------------------- between tensors
def same_layout(a, b):
    """Are type, ne and nb of two tensors equal, so that the bytes of one mean the same in the other?

        gg.same_layout(t, gg.transpose(t))

    Source: ggml_are_same_layout.
    """
    return a.type is b.type and tuple(a.ne) == tuple(b.ne) and tuple(a.nb) == tuple(b.nb)


def tensor_copy(src, dst):
    """dst := src, bit for bit; both of the same layout, on any devices.

        gg.tensor_copy(t, other)

    Tries the direct ways first: host source, host destination, the destination's buffer; else by way of the host.
    Waits for schedulers whose asynchronous work may still write src.
    Errors: ShapeError (layouts that differ), NotAllocated, Overwritten.  Source: ggml_backend_tensor_copy.
    """
    if not same_layout(src, dst):
        raise ShapeError(f"tensor_copy: layouts differ: {describe(src)} nb {list(src.nb)} and {describe(dst)} nb "
                         f"{list(dst.nb)}")
    if src is not dst:
        wait_for_writers(src._checked_range()[0])
        copy_bytes(src, dst)


def copy_bytes(src, dst):
    """Copy between tensors of the same layout; nothing is checked or waited for."""
    (from_buf, nbytes), (to_buf, _) = src._checked_range(), dst._checked_range()
    with oom_guard("a copy of", src):
        if from_buf.buft.is_host():
            to_buf.set_tensor(dst, from_buf.host_bytes(src.offs, nbytes), 0)
        elif not to_buf.copy_tensor(src, dst):
            if "copies" in debug:
                print(f"slow copy of {describe(src)} from {from_buf.buft.name} to {to_buf.buft.name}: {nbytes:,} bytes "
                      f"by way of the host", file=sys.stderr)
            to_buf.set_tensor(dst, from_buf.get_tensor(src, 0, nbytes), 0)


def tensor_copy_async(src_backend, dst_backend, src, dst):
    """tensor_copy in the order of both streams; where a backend cannot do that, it waits for both and blocks.

        gg.tensor_copy_async(cpu, cpu, t, other)
        cpu.synchronize()

    Errors as `tensor_copy`.  Source: ggml_backend_tensor_copy_async.
    """
    if not same_layout(src, dst):
        raise ShapeError(f"tensor_copy_async: layouts differ: {describe(src)} and {describe(dst)}")
    if src is dst:
        return
    src._checked_range()
    dst._checked_range()
    if not dst_backend.copy_tensor_async(src, dst, src_backend):
        src_backend.synchronize()
        dst_backend.synchronize()
        tensor_copy(src, dst)


def view_init(t):
    """Check the view t, and call its buffer's init_view.  Views need no placing here.

        gg.view_init(gg.transpose(t))

    Errors: ParamError (no view), NotAllocated, IndexRangeError.  Source: ggml_backend_view_init.
    """
    if t.view_src is None:
        raise ParamError(f"{describe(t)} is not a view")
    if int(TABLE.words[t.view_src.id, T_BUFFER]) < 0:
        raise NotAllocated(f"{describe(t)} views {describe(t.view_src)}, which has no memory; allocate it first")
    if t.view_offs + t.nbytes > t.view_src.nbytes:
        raise IndexRangeError(f"{describe(t)} ends at byte {t.view_offs + t.nbytes}, past {describe(t.view_src)}")
    t.buffer.init_view(t)


def set_zero(t):
    """All bytes of t from its first element to its last become 0; returns t.  NumPy: t[...] = 0.

        gg.set_zero(t).numpy()

    As in ggml this includes what lies in the gaps of a strided view.  Zero bytes are zeros in every type.
    Errors: NotAllocated, StaleHandle, ParamError (read-only memory).  Source: ggml_set_zero.
    """
    if min(t.ne) > 0:
        tensor_memset(t, 0)
    return t
