"""Machine code of a kernel: LTO-IR (frontend.py) -> nvJitLink -> cubin.  Needs an extra (choice.py), but no GPU and
no driver.

    kernel(node: int64)     one 8-byte parameter, so every launch looks alike (engine/cuda/cuda_plan.py)

Cubins are kept like the CPU's objects: one file a kernel in the cache folder, named by the content of the sources, the
versions of the compilers and the compute capability.  Neither Python nor the processor matters, so what was compiled
on one machine serves another.
"""
import contextlib
import dataclasses
import hashlib
import json
import re

import cuda.core
from cuda.bindings import nvrtc
from cuda.core import Linker, LinkerOptions, ObjectCode

from ggjit.ops.core.errors import NotSupported
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.cuda.compiler import frontend
from ggjit.ops.cuda.compiler.choice import EXTRA
from ggjit.ops.native import cache_files
from ggjit.ops.native.cache_files import cache_dir
from ggjit.ops.native.jit import sources_digest

WITH_WARPGROUPS = 9, 0
REGISTERS, MAX_REGISTERS = 1 << 16, 255         # of a multiprocessor, of a thread
LET_SPILL = 32                  # bytes of a thread of a walker: what sines of large angles take anyway


@dataclasses.dataclass(frozen=True)
class Binary:
    """A kernel's cubin, its symbol, and what ptxas says about it."""
    cubin: bytes
    symbol: str
    registers: int
    spill_nbytes: int
    shared_nbytes: int
    pieces: tuple = ()          # of a walker: bytes of shared memory of a team, for each body


@contextlib.contextmanager
def _toolkit(what):
    """Errors of the toolkit's libraries become NotSupported: a library is absent, or versions do not fit."""
    try:
        yield
    except Exception as e:
        raise NotSupported(f"the CUDA toolkit of this installation does not {what} ({e}); "
                           f"pip install -U --force-reinstall 'ggjit[{EXTRA}]'") from e


def _served():
    """The toolkit's compute capabilities, e.g. 90."""
    status, *found = nvrtc.nvrtcGetSupportedArchs()
    if status:
        raise RuntimeError(status.name)
    return found[-1]


def compile_kernel(func, cc, registers=0):
    """Binary of the kernel function for compute capability `cc`, e.g. (9, 0), of at most so many registers a thread, 0:
    as many as it takes.  Errors: NotSupported."""
    _check_served(cc)
    with _toolkit("compile kernels"):
        codes = frontend.ltoir(func, cc)
    return _linked(codes, cc, max_register_count=registers or None)


def compile_walker(walker, cc):
    """Binary of a Walker (ops/cuda/native/walk.py): each body is compiled for its teams, then linked into one kernel.
    Errors: NotSupported."""
    _check_served(cc)
    names, codes, pieces = [], [], []
    with _toolkit("compile kernels"):
        for i, (body, threads) in enumerate(walker.bodies()):
            code, nbytes = frontend.body(body, f"ggjit_body_{i}", threads, cc)
            names.append(f"ggjit_body_{i}")
            codes += code
            pieces.append(nbytes)
        codes += frontend.ltoir(walker.make([frontend.extern(name) for name in names]), cc)
    return dataclasses.replace(_linked_for_most_blocks(codes, cc, walker.threads), pieces=tuple(pieces))


def _linked_for_most_blocks(codes, cc, threads):
    """For two blocks of a multiprocessor, if nothing is spilled then; else for one."""
    for n_blocks in (2, 1):
        most = min(REGISTERS // (threads * n_blocks) // 8 * 8, MAX_REGISTERS)
        built = _linked(codes, cc, max_register_count=most)
        if built.spill_nbytes <= LET_SPILL:
            break
    return built


def _check_served(cc):
    with _toolkit("load"):
        known = _served()
    if 10 * cc[0] + cc[1] not in known:
        raise NotSupported(f"this CUDA toolkit has no compiler for compute capability {cc[0]}.{cc[1]}; "
                           f"pip install -U 'ggjit[{EXTRA}]'")


def _architecture(cc):
    """Of 9.0 with what is its alone: products of warpgroups (warpgroups.py)."""
    return f"sm_{cc[0]}{cc[1]}{'a' * (cc == WITH_WARPGROUPS)}"


def _linked(codes, cc, **options):
    with _toolkit("link kernels"):
        objects = [ObjectCode.from_ltoir(c) if isinstance(c, bytes) else c for c in codes]
        linker = Linker(*objects, options=LinkerOptions(arch=_architecture(cc), link_time_optimization=True,
                                                        verbose=True, ptxas_options=["-v"], **options))
        cubin = linker.link("cubin").code
        log = linker.get_info_log()
    return _described(cubin, log)


def _described(cubin, log):
    def number(pattern, missing=0):
        found = re.search(pattern, log)
        return int(found.group(1)) if found else missing
    # every kernel has a constant bank of its own, named after it: the log is empty where the driver links
    symbol = re.search(rb"\.nv\.constant0\.([^\0]+)\0", cubin).group(1).decode()
    return Binary(cubin, symbol, number(r"Used (\d+) registers"),
                  number(r"(\d+) bytes stack frame") + number(r"(\d+) bytes spill stores"),
                  number(r"(\d+) bytes smem"))


def binary(launch, cc):
    """The Binary of a Launch, from the cache folder or compiled."""
    path = _path(launch.name, (launch.module,), cc)
    return _load(path) or _save(path, compile_kernel(launch.make(), cc, launch.registers))


def walker_binary(walker, cc):
    """The Binary of a Walker, from the cache folder or compiled."""
    name = hashlib.sha256(walker.name.encode()).hexdigest()[:20]
    path = _path(f"walker-{len(walker.launches)}-{name}", walker.modules, cc)
    return _load(path) or _save(path, compile_walker(walker, cc))


def _path(name, modules, cc):
    sources = sources_digest((__name__, *modules))
    h = hashlib.sha256(f"{sources} {frontend.VERSION} {cuda.core.__version__} {cc}".encode()).hexdigest()[:20]
    return cache_dir() / "cuda" / f"{name}-sm{cc[0]}{cc[1]}-{h}.bin"


def _load(path):
    try:
        payload = cache_files.read(path)
        if payload is None:
            return None
        facts, cubin = cache_files.unpack(payload, 2)
    except (cache_files.Unusable, OSError):             # the cached cubin cannot be used: compile again
        return None
    facts = parse_json(facts)
    return Binary(cubin=cubin, **facts | {"pieces": tuple(facts["pieces"])})


def _save(path, built):
    facts = dataclasses.asdict(built)
    cubin = facts.pop("cubin")
    with contextlib.suppress(OSError):          # an unwritable place: compiled in every process
        cache_files.write(path, cache_files.pack(json.dumps(facts).encode(), cubin))
    return built
