"""Windows' functions by stand-ins, for processes of this system: what ggjit asks of Windows, answered as there.

    become()        from here on this process is Windows, as far as ggjit can see: it has no functions of POSIX, and
                    threads sleep by WaitOnAddress.  Before ggjit is imported; Numba and NumPy know the real system.
"""
import ctypes
import mmap
import os
import signal
import struct
import sys
import time
import types

TOTAL, FREE, RESIDENT = 16 << 30, 5 << 30, 300 << 20
NAME = "Snapdragon(R) X Elite"
CLASSES = [0] * 4 + [1] * 8                     # efficiency classes of logical processors: 4 slow, 8 fast
POSIX = {os: ("fork", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "sched_yield", "uname", "sysconf",
              "sysconf_names", "fchmod", "pread", "pwrite", "O_NOFOLLOW", "O_DIRECTORY",
              "O_NONBLOCK"),
         signal: ("pthread_kill", "SIGKILL", "SIGALRM", "SIGUSR1", "setitimer"),
         mmap: ("MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS", "MAP_NORESERVE", "MADV_HUGEPAGE", "MADV_DONTNEED"),
         time: ("clock_gettime", "pthread_getcpuclockid")}


_ANONYMOUS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


class VirtualAlloc:
    """Windows' function over a mapping without access rights: touching pages that are not committed ends the process,
    as on Windows."""

    def __init__(self, limit=1 << 40):
        self.charged, self.limit = 0, limit
        libc = ctypes.CDLL(None, use_errno=True)
        self._map, self._protect = libc.mmap, libc.mprotect
        self._map.restype = ctypes.c_void_p
        self._map.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
        self._protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def __call__(self, address, nbytes, kind, protection):
        if kind == 0x2000:
            assert address is None and protection == 1
            return self._map(None, nbytes, 0, _ANONYMOUS, -1, 0)
        assert kind == 0x1000 and protection == 4
        if self.charged + nbytes > self.limit:
            return None
        self.charged += nbytes
        first = address & -mmap.PAGESIZE
        assert not self._protect(first, address + nbytes - first, mmap.PROT_READ | mmap.PROT_WRITE)
        return address


class Kernel32:
    """Functions that tell of a machine with 12 processors, 8 of them fast, and 16 GiB."""

    def __init__(self):
        self.SwitchToThread = ctypes.CDLL(None).sched_yield
        self.VirtualAlloc = VirtualAlloc()

    @staticmethod
    def GlobalMemoryStatusEx(status):
        length, _ = struct.unpack_from("2I", status)
        assert length == ctypes.sizeof(status) == 64
        struct.pack_into("2Q", status, 8, TOTAL, FREE)
        return 1

    @staticmethod
    def K32GetProcessMemoryInfo(process, counters, nbytes):
        assert process.value == 2 ** 64 - 1 and struct.unpack_from("I", counters) == (nbytes,) == (72,)
        struct.pack_into("2Q", counters, 8, 2 * RESIDENT, RESIDENT)
        return 1

    @staticmethod
    def GetSystemCpuSetInformation(buffer, nbytes, needed, process, flags):
        needed._obj.value = 32 * len(CLASSES)
        if buffer is None or nbytes.value < 32 * len(CLASSES):
            return 0
        for i, efficiency in enumerate(CLASSES):    # size, type, number, group, processor, core, caches, node, class
            struct.pack_into("3IH5B", buffer, 32 * i, 32, 0, 256 + i, 0, i, i, 0, 0, efficiency)
        return 1

    @staticmethod
    def IsProcessorFeaturePresent(number):
        return number in (34, 43, 45, 66, 67)               # atomics, dot products, acquire, i8mm, half precision


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32)
def _wait_on_address(word, compared, nbytes, milliseconds):
    assert nbytes == 4 and milliseconds == 0xFFFFFFFF
    word, value = ctypes.c_uint32.from_address(word), ctypes.c_uint32.from_address(compared).value
    while word.value == value:
        time.sleep(2e-4)
    return 1


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _wake_by_address_all(word):
    """Sleepers look by themselves."""


def functions():
    """(ctypes.windll, ctypes.WinDLL, winreg) of such a machine."""
    kernel = Kernel32()
    synch = types.SimpleNamespace(WaitOnAddress=_wait_on_address, WakeByAddressAll=_wake_by_address_all)
    libraries = {"kernel32": kernel, "api-ms-win-core-synch-l1-2-0.dll": synch}

    class Key:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass
    winreg = types.SimpleNamespace(HKEY_LOCAL_MACHINE=1, OpenKey=lambda key, path: Key(),
                                   QueryValueEx=lambda key, name: ({"ProcessorNameString": f"{NAME}  "}[name], 1))
    return types.SimpleNamespace(kernel32=kernel), lambda name, **_: libraries[name], winreg


def become():
    ctypes.windll, ctypes.WinDLL, sys.modules["winreg"] = functions()
    sys.modules["fcntl"] = sys.modules["resource"] = None
    for module, names in POSIX.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    os.cpu_count, os.supports_dir_fd = (lambda: len(CLASSES)), set()
    real = ctypes.CDLL

    class Library(real):
        def __init__(self, name, *args, **options):
            if name is None:
                raise TypeError("Windows has no library of the process itself")
            super().__init__(name, *args, **options)
    ctypes.CDLL = Library
    sys.platform = "win32"
