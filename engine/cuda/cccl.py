"""Sorts of long rows by CCCL's radix sort, through cuda-cccl's cuda.compute (the extra `cccl`); NumPy in the simulator.

    Cccl(device).prepare(sort)              compiles, makes room; Errors: MissingExtra, NotSupported, OutOfMemory
    Cccl(device).sort(sort, work, stream)   rows of words at `work`, to behind them; work of the stream, also captured

NVRTC compiles it once, for some 20 seconds; CACHE/cuda/cccl-sm90-VERSION.bin keeps it.  A call submits kernels and
fills of temporary memory and waits for nothing.  That memory is the backend's, one piece for each length of rows, and
is kept: a captured graph holds its address.

Sums and scans are left to our own kernels: CCCL adds in an order of its own, so that the bits would depend on what was
measured, and its scans of float32 give other bits from run to run.
"""
import contextlib
import importlib.metadata
import re
import threading

import numpy as np

from ggjit.cuda.driver import driver
from ggjit.cuda.memory import CUDABuffer
from ggjit.ops.core.errors import NotSupported, extra
from ggjit.ops.cuda.compiler.choice import SIMULATED
from ggjit.ops.native import cache_files

KEY_BITS = 32, 64               # of a word; the sort keeps words with equal keys in order


class DeviceWords:
    """n words at a device address, as cuda.compute takes arrays."""
    dtype = np.dtype(np.uint64)

    def __init__(self, address, n):
        self.nbytes = n * self.dtype.itemsize
        self.__cuda_array_interface__ = {"shape": (n,), "typestr": self.dtype.str, "data": (address, False),
                                         "strides": None, "version": 3}


class CcclStream:
    """A stream by its handle, as cuda.compute takes them."""

    def __init__(self, handle):
        self.handle = int(handle)

    def __cuda_stream__(self):
        return 0, self.handle


class Cccl:
    """The sorter of one backend and its temporary memory."""

    def __init__(self, device):
        self.device, self.temporary = device, {}        # {length of a row: (buffer, DeviceWords)}
        self._one_at_a_time = threading.RLock()         # the sorter holds the addresses it was called with
        with self._working():
            self.api = extra("cuda.compute", "cccl")
            self.sorter = self._load() or self._compile()

    @contextlib.contextmanager
    def _working(self):
        """Context: any error of the library becomes NotSupported, since it may not fit this toolkit or GPU."""
        self.device.use()
        try:
            with self._one_at_a_time:
                yield
        except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as e:
            raise NotSupported(f"CCCL does not sort ({e}); GGJIT_CCCL=0 does without it") from e

    @property
    def _path(self):
        major, minor = self.device.compute_capability
        version = re.sub("[^a-zA-Z0-9.]+", "-", importlib.metadata.version("cuda-cccl"))
        return cache_files.cache_dir() / "cuda" / f"cccl-sm{major}{minor}-{version}.bin"

    def _load(self):
        with contextlib.suppress(cache_files.Unusable, OSError, ValueError):    # compiled again
            kept = cache_files.read(self._path)
            return kept and self.api.deserialize(kept)

    def _compile(self):
        like = self.api.ProxyArray(DeviceWords.dtype)
        made = self.api.make_radix_sort(d_in_keys=like, d_out_keys=like, d_in_values=None, d_out_values=None,
                                        order=self.api.SortOrder.ASCENDING,
                                        compute_capability=self.device.compute_capability)
        with contextlib.suppress(OSError):      # an unwritable place: compiled in every process
            cache_files.write(self._path, self.api.serialize(made))
        return made

    def _call(self, temporary, at, to, n, stream):
        begin, end = KEY_BITS
        return self.sorter(temp_storage=temporary, d_in_keys=DeviceWords(at, n), d_out_keys=DeviceWords(to, n),
                           d_in_values=None,
                           d_out_values=None, num_items=n, begin_bit=begin, end_bit=end, stream=stream)

    def prepare(self, sort):
        if sort.n in self.temporary:
            return
        with self._working():
            # a first call tells the bytes of temporary memory
            nbytes = int(self._call(None, 0, 0, sort.n, None))
        buffer = CUDABuffer(self.device.buffer_type(), nbytes)
        self.temporary[sort.n] = buffer, DeviceWords(buffer.base, -(-nbytes // DeviceWords.dtype.itemsize))

    def sort(self, sort, work, stream):
        self.prepare(sort)
        row_nbytes = sort.n * DeviceWords.dtype.itemsize
        with self._working():
            for r in range(sort.n_rows):
                at = work + r * row_nbytes
                self._call(self.temporary[sort.n][1], at, at + sort.n_rows * row_nbytes, sort.n, CcclStream(stream))


def cccl(device):
    """The sorter of one backend of `device`."""
    return driver().api.SimulatedCccl() if SIMULATED else Cccl(device)
