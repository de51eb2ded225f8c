"""Address space that is reserved whole and gets memory as it is used, at an address that stays.

    space = AddressSpace(1 << 30)
    space.commit(4096)                  # before the first 4096 bytes are used
    space.memory[0:8] = bytes(8)        # a memoryview of all bytes; those not committed must not be touched

Linux and macOS give pages when they are first written, and `commit` has nothing to do.  Windows charges a mapping to
the page file when it is made, used or not: there the addresses are reserved alone, and memory is charged in steps.
"""
import ctypes
import mmap

from ggjit.ops.core.errors import OutOfMemory

_RESERVE, _COMMIT, _NO_ACCESS, _READ_WRITE = 0x2000, 0x1000, 0x01, 0x04         # flags of VirtualAlloc
_STEP = 1 << 20                                         # bytes that are committed at a time
_LAST = 1 << 16                                         # bytes at the end that are committed from the beginning


def _virtual_alloc():
    """Windows' VirtualAlloc, None on other systems."""
    if not hasattr(ctypes, "windll"):
        return None
    function = ctypes.WinDLL("kernel32", use_last_error=True).VirtualAlloc
    function.restype = ctypes.c_void_p
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint32
    return function


class AddressSpace:
    """`.memory`: nbytes of zeros as a memoryview, of which the first `commit(n)` and the last 64 KiB may be used.

    The last ones: index -1, which is "none" in tables, reads the last row, whatever becomes of the value.
    Errors: OutOfMemory, from `commit` too; what was committed stays.
    """

    def __init__(self, nbytes, virtual_alloc=None):
        self.nbytes, self._alloc = nbytes, virtual_alloc or _virtual_alloc()
        if self._alloc is None:
            try:
                self._committed, self._mapping = nbytes, _mapping(nbytes)
            except OSError as e:
                raise OutOfMemory(f"{nbytes:,} bytes of addresses: {e.strerror}; raise the limit of address space "
                                  f"(ulimit -v)") from e
            self.memory = memoryview(self._mapping)
            return
        self.address = self._take(None, nbytes, _RESERVE, _NO_ACCESS)
        self._committed = 0
        last = min(_LAST, nbytes)
        self._take(self.address + nbytes - last, last, _COMMIT, _READ_WRITE)
        self.memory = memoryview((ctypes.c_uint8 * nbytes).from_address(self.address)).cast("B")

    def commit(self, nbytes):
        """Commit the first nbytes, so that they may be used."""
        if nbytes > self._committed:
            upto = min(max(nbytes, self._committed + _STEP), self.nbytes)
            self._take(self.address + self._committed, upto - self._committed, _COMMIT, _READ_WRITE)
            self._committed = upto

    def _take(self, address, nbytes, kind, protection):
        found = self._alloc(address, nbytes, kind, protection)
        if not found:
            raise OutOfMemory(f"Windows does not give {nbytes:,} more bytes; close programs or models, or enlarge the "
                              f"page file")
        return found


def _mapping(nbytes):
    if hasattr(mmap, "MAP_ANONYMOUS"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    return mmap.mmap(-1, nbytes)
