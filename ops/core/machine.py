"""Facts about this machine: the processor's name, the cores a process may use, the free memory.

Each fact is asked of Linux, macOS and Windows in its own way.  What a system does not tell, or has no function for, is
0, "" or None: these functions raise no errors (`_unless_told`).  Limits of a container (control groups) count as the
machine's own.
"""
import ctypes
import functools
import math
import os
import pathlib
import platform
import sys

_CPUS = pathlib.Path("/sys/devices/system/cpu")
_INTEL_CORES = pathlib.Path("/sys/devices/cpu_core/cpus")
_CGROUPS = pathlib.Path("/sys/fs/cgroup")


def _unless_told(unknown):
    """Decorator: `unknown` where the system lacks the function, or its answer has an unknown form."""
    def of(question):
        @functools.wraps(question)
        def asked():
            try:
                return question()
            except (AttributeError, ImportError, LookupError, OSError, TypeError, ValueError):
                return unknown
        return asked
    return of


def _text(path):
    """The text of a small file, "" where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _sysctl(name):
    """The bytes of a macOS sysctl, b"" where it is unknown."""
    libc = ctypes.CDLL(None)
    size = ctypes.c_size_t(0)
    if libc.sysctlbyname(name.encode(), None, ctypes.byref(size), None, 0):
        return b""
    value = ctypes.create_string_buffer(size.value)
    return b"" if libc.sysctlbyname(name.encode(), value, ctypes.byref(size), None, 0) else value.raw[:size.value]


def _cgroup_files(name):
    """The texts of a file in the control groups of this process, the nearest group first (version 2)."""
    groups = _text(pathlib.Path("/proc/self/cgroup")).splitlines()
    own = next((line[3:] for line in groups if line.startswith("0::")), "/")
    folder = _CGROUPS / own.lstrip("/")
    folders = [folder, *folder.parents] if _CGROUPS in (folder, *folder.parents) else [_CGROUPS]
    for at in folders:
        yield at, _text(at / name)
        if at == _CGROUPS:
            return


# ---------------------------------------------------------------- the processor
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18         # x86-64 Linux


@functools.cache
@_unless_told("the system has no function that permits tiles")
def tiles_refused():
    """Why this process may not use the tiles of AMX, "" where it may.

    Asked once, of Linux: the permission is that of all threads, and children that are forked inherit it.  Where a
    thread's signal stack is too small for tiles, Linux refuses them.
    """
    if sys.platform != "linux":
        return "tiles are asked for on Linux alone"
    words = [ctypes.c_long(x) for x in (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA)]
    libc = ctypes.CDLL(None, use_errno=True)
    return "" if libc.syscall(*words) == 0 else f"Linux does not permit tiles: {os.strerror(ctypes.get_errno())}"


@functools.cache
@_unless_told("")
def processor_name():
    """In the system's words; "" where it does not tell (Linux on ARM)."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode(errors="replace")
    if sys.platform == "win32":
        return _windows_processor_name()
    for line in _text(pathlib.Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _windows_processor_name():
    import winreg
    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, r"HARDWARE\DESCRIPTION\System\CentralProcessor\0") as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    except OSError:
        return platform.processor()


# Features of ARM processors that products use: the bit of Linux's AT_HWCAP or, from 64 on, AT_HWCAP2; macOS's name;
# Windows's number, which has none for fp16fml: processors with i8mm have it; LLVM's words
_ARM_FEATURES = (
    (10, "FEAT_FP16", 67, ("fullfp16",)), (20, "FEAT_DotProd", 43, ("dotprod",)), (23, "FEAT_FHM", None, ("fp16fml",)),
    (64 + 13, "FEAT_I8MM", 66, ("i8mm", "fp16fml")), (64 + 14, "FEAT_BF16", 68, ("bf16",)),
    (8, "FEAT_LSE", 34, ("lse",)), (15, "FEAT_LRCPC", 45, ("rcpc",)))


@_unless_told(frozenset())
def arm_features():
    """Features of this ARM processor in LLVM's words, from the system: LLVM itself finds few of them."""
    if sys.platform == "win32":
        ask = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return frozenset(word for *_, n, words in _ARM_FEATURES if n is not None and ask(n) for word in words)
    if sys.platform == "darwin":
        return frozenset(words[0] for _, name, _, words in _ARM_FEATURES if any(_sysctl(f"hw.optional.arm.{name}")))
    capabilities = _linux_capabilities()
    return frozenset(words[0] for bit, _, _, words in _ARM_FEATURES if capabilities >> bit & 1)


def _linux_capabilities():
    """AT_HWCAP and, above it, AT_HWCAP2; 0 where the C library does not tell."""
    ask = getattr(ctypes.CDLL(None), "getauxval", None)
    if ask is None:
        return 0
    ask.argtypes, ask.restype = [ctypes.c_ulong], ctypes.c_ulong
    return ask(16) | ask(26) << 64


# ---------------------------------------------------------------- cores
def available_cores():
    """How many cores this process may use at once: its affinity mask, and at most the quota of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _quota()))


def performance_cores():
    """Those of `available_cores` that are worth a thread each: without the efficiency cores of hybrid processors, for
    which the others would wait."""
    fast = _fast_cores()
    if fast is None:
        return available_cores()
    if isinstance(fast, set):
        fast = len(fast & os.sched_getaffinity(0))
    return min(fast, available_cores()) or available_cores()


def _quota():
    """Cores' worth of time the container gives; infinite without a limit."""
    least = math.inf
    for _, text in _cgroup_files("cpu.max"):
        quota, _, period = text.partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            least = min(least, math.ceil(int(quota) / int(period)))
    return least


@functools.cache
@_unless_told(None)
def _fast_cores():
    """The performance cores of a hybrid processor: a set of core numbers, a count, or None where all are alike."""
    if sys.platform == "darwin":
        return int.from_bytes(_sysctl("hw.perflevel0.logicalcpu"), sys.byteorder) or None
    if sys.platform == "win32":
        classes = _windows_core_classes()
        return classes.count(max(classes)) if classes else None
    intel = _text(_INTEL_CORES)
    if intel:
        return core_list(intel)
    capacity = {int(p.parent.name[3:]): int(_text(p) or 0) for p in _CPUS.glob("cpu[0-9]*/cpu_capacity")}
    fast = {core for core, c in capacity.items() if 2 * c >= max(capacity.values())}
    return fast if len(fast) < len(capacity) else None


def core_list(text):
    """{0, 1, 2, 3, 8} of Linux's "0-3,8"."""
    ranges = [part.partition("-") for part in text.split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def _windows_core_classes():
    """The efficiency class of each logical processor: a higher one is faster."""
    ask = ctypes.windll.kernel32.GetSystemCpuSetInformation
    size = ctypes.c_ulong(0)
    ask(None, 0, ctypes.byref(size), None, 0)
    buffer = ctypes.create_string_buffer(size.value)
    if not size.value or not ask(buffer, size, ctypes.byref(size), None, 0):
        return []
    classes, at = [], 0
    while at + 18 < size.value:                         # SYSTEM_CPU_SET_INFORMATION: Size at 0, EfficiencyClass at 18
        classes.append(buffer.raw[at + 18])
        at += int.from_bytes(buffer.raw[at:at + 4], "little") or size.value
    return classes


# ---------------------------------------------------------------- memory
def available_nbytes():
    """Bytes that programs may take without swapping: free, or holding files that can be read again; 0: unknown."""
    free = _system_memory()[0]
    for folder, text in _cgroup_files("memory.max"):
        used = _text(folder / "memory.current")
        if text.isdigit() and used.isdigit():
            statistics = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            left = int(text) - int(used) + int(statistics.get("inactive_file", 0))
            free = min(free or left, max(left, 0))
    return free


@functools.cache
def total_nbytes():
    """Bytes of memory of this machine, or of the container it is; 0: unknown."""
    limits = [int(text) for _, text in _cgroup_files("memory.max") if text.isdigit()]
    total = _system_memory()[1]
    return min([total, *limits]) if total else 0


@_unless_told((0, 0))
def _system_memory():
    """(available, all) bytes of the machine."""
    if sys.platform == "win32":
        return _windows_memory()
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    if sys.platform == "darwin":
        return page * _macos_free_pages(), total
    for line in _text(pathlib.Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) << 10, total
    return page * os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else 0, total


def _macos_free_pages():
    """Pages that are free or inactive: words 0 and 2 of vm_statistics64."""
    libc = ctypes.CDLL(None)
    words, n_words = (ctypes.c_uint32 * 64)(), ctypes.c_uint32(38)
    failed = libc.host_statistics64(libc.mach_host_self(), 4, words, ctypes.byref(n_words))
    return 0 if failed else words[0] + words[2]


@_unless_told(0)
def resident_nbytes():
    """Bytes of this process that are in memory; 0: unknown."""
    if sys.platform == "darwin":
        words = (ctypes.c_uint64 * 12)()                # proc_taskinfo: virtual size, resident size, ...
        nbytes = ctypes.sizeof(words)
        told = ctypes.CDLL(None).proc_pidinfo(os.getpid(), 4, ctypes.c_uint64(0), words, nbytes)
        return words[1] if told == nbytes else 0
    if sys.platform == "win32":
        kernel = ctypes.windll.kernel32
        counters = (ctypes.c_size_t * 9)()              # PROCESS_MEMORY_COUNTERS: two 32-bit words, peak, working set
        counters[0] = ctypes.sizeof(counters)
        this = ctypes.c_void_p(-1)                      # GetCurrentProcess()
        return counters[2] if kernel.K32GetProcessMemoryInfo(this, counters, ctypes.sizeof(counters)) else 0
    return int(_text(pathlib.Path("/proc/self/statm")).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _windows_memory():
    status = (ctypes.c_uint64 * 8)()                    # MEMORYSTATUSEX: two 32-bit words, then total, available, ...
    ctypes.cast(status, ctypes.POINTER(ctypes.c_uint32))[0] = ctypes.sizeof(status)
    return (status[2], status[1]) if ctypes.windll.kernel32.GlobalMemoryStatusEx(status) else (0, 0)
