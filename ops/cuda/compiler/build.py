"""Machine code of a kernel by numba-cuda: Numba -> LTO-IR -> nvJitLink -> cubin.  Needs the extra `gpu`, but no GPU
and no driver.

    kernel(node: int64)     one 8-byte parameter, so every launch looks alike (engine/cuda/plan.py)

Cubins are kept like the CPU's objects: one file a kernel in the cache folder, named by the content of the sources, the
versions of the compilers and the compute capability.  Neither Python nor the processor matters, so what was compiled
on one machine serves another.
"""
import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import threading

import numba_cuda
from cuda.core import Linker, LinkerOptions, ObjectCode
from numba import cuda, types
from numba.cuda import dispatcher
from numba.cuda.cudadrv import nvrtc

from ggjit.ops.core.errors import NotSupported
from ggjit.ops.native import cache_files
from ggjit.ops.native.cache_files import cache_dir
from ggjit.ops.native.jit import sources_digest

SIGNATURE = types.void(types.int64)
_one_at_a_time = threading.RLock()


@dataclasses.dataclass(frozen=True)
class Binary:
    """A kernel's cubin, its symbol, and what ptxas says about it."""
    cubin: bytes
    symbol: str
    registers: int
    spill_nbytes: int
    shared_nbytes: int


@contextlib.contextmanager
def _compiling_for(cc):
    """Numba asks the current GPU for its capability when a kernel calls a device function, although `cc` was given.

    Kernels are compiled where there is no GPU, and for other GPUs than the current one, so the question is answered
    here.  tests/engine/cuda/test_cuda_compile.py fails when Numba no longer asks.
    """
    class Device:
        compute_capability = cc
    with _one_at_a_time:
        asked, dispatcher.get_current_device = dispatcher.get_current_device, lambda: Device
        try:
            yield
        finally:
            dispatcher.get_current_device = asked


@contextlib.contextmanager
def _toolkit(what):
    """Whatever the toolkit's libraries raise: they are absent, or of versions that do not fit each other."""
    try:
        yield
    except Exception as e:
        raise NotSupported(f"the CUDA toolkit of this installation does not {what} ({e}); "
                           f"pip install -U --force-reinstall 'ggjit[gpu]'") from e


def compile_kernel(func, cc):
    """Binary of the kernel function for compute capability `cc`, e.g. (9, 0).  Errors: NotSupported."""
    with _toolkit("load"):
        known = nvrtc.get_supported_ccs()
    if cc not in known:
        raise NotSupported(f"this CUDA toolkit has no compiler for compute capability {cc[0]}.{cc[1]}; "
                           f"pip install -U 'ggjit[gpu]'")
    with _compiling_for(cc):
        codes, _ = cuda.compile_all(func, SIGNATURE, device=False, abi="numba", cc=cc, output="ltoir")
    with _toolkit("link kernels"):
        objects = [ObjectCode.from_ltoir(c) if isinstance(c, bytes) else c for c in codes]
        linker = Linker(*objects, options=LinkerOptions(arch=f"sm_{cc[0]}{cc[1]}", link_time_optimization=True,
                                                        verbose=True, ptxas_options=["-v"]))
        cubin = linker.link("cubin").code
        log = linker.get_info_log()
    return _described(cubin, log)


def assembly(func, cc):
    """PTX of the kernel function, the linked functions not inlined: for tests and for reading."""
    with _compiling_for(cc):
        text, _ = cuda.compile(func, SIGNATURE, device=False, abi="numba", cc=cc, output="ptx")
    return text


def _described(cubin, log):
    def number(pattern, missing=0):
        found = re.search(pattern, log)
        return int(found.group(1)) if found else missing
    # every kernel has a constant bank of its own, named after it: the log is empty where the driver links
    symbol = re.search(rb"\.nv\.constant0\.([^\0]+)\0", cubin).group(1).decode()
    return Binary(cubin, symbol, number(r"Used (\d+) registers"),
                  number(r"(\d+) bytes stack frame") + number(r"(\d+) bytes spill stores"),
                  number(r"(\d+) bytes smem"))


@functools.cache
def _versions():
    import cuda.core
    import llvmlite
    import numba
    return f"{numba_cuda.__version__} {numba.__version__} {llvmlite.__version__} {cuda.core.__version__}"


def binary(launch, cc):
    """The Binary of a Launch, from the cache folder or compiled."""
    sources = sources_digest((__name__, launch.module))
    h = hashlib.sha256(f"{sources} {_versions()} {cc}".encode()).hexdigest()[:20]
    path = cache_dir() / "cuda" / f"{launch.name}-sm{cc[0]}{cc[1]}-{h}.bin"
    return _load(path) or _save(path, compile_kernel(launch.make(), cc))


def _load(path):
    try:
        payload = cache_files.read(path)
        if payload is None:
            return None
        facts, cubin = cache_files.unpack(payload, 2)
    except (cache_files.Unusable, OSError):             # compiled again
        return None
    return Binary(cubin=cubin, **json.loads(facts))


def _save(path, built):
    facts = dataclasses.asdict(built)
    cubin = facts.pop("cubin")
    with contextlib.suppress(OSError):          # an unwritable place: compiled in every process
        cache_files.write(path, cache_files.pack(json.dumps(facts).encode(), cubin))
    return built
