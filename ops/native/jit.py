"""The native layer: jitted code by address, with an object cache keyed by content.

Numba's own `cache=True` is keyed by one file (editing a callee elsewhere leaves stale machine code) and never hits for
functions made by factories.  Here the key of a function is the hash of the sources of its module and of every ggjit
module those import, of Numba, llvmlite and the CPU; the value is the finished object code.  A hit costs
0.3 ms.

    @inline                       a helper, inlined into its callers
    @exact                        the same without fastmath (quantisers: byte equality)
    @native("i64(i64, f64)")      an entry point: callable from Python with the GIL released, and by address

Only scalars and addresses cross the boundary; `i64s(addr, n)` and its kin make array views inside jitted code.
Nothing that holds a process address (a global array, a ctypes object) may be captured by jitted code: the object would
be reloaded in another process.
"""
import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import time

import llvmlite
import numba
import numpy as np
from llvmlite import binding as llvm
from numba import carray, cfunc, njit, types
from numba.core import bytecode
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from ggjit.ops.core.errors import TypeMismatch
from ggjit.ops.core.interrupts import defer_interrupts
from ggjit.ops.core.settings import asked_isa
from ggjit.ops.core.traits import is_kept
from ggjit.ops.core.user_warnings import warn
from ggjit.ops.native import cache_files, forks, isa, waiting
from ggjit.ops.native.compiler import HelperCompiler, KernelCompiler, by_type, codegen, runtime_functions, unknown
from ggjit.ops.native.kernel_pack import SHIPPED

# nnan and ninf stay out: they turn isnan, isinf and comparisons with -inf (masks) into constants.
FASTMATH = {"reassoc", "contract", "nsz"}
_OPTIONS = dict(nogil=True, error_model="numpy", boundscheck=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _helper(**options):
    jit = njit(**options, **_OPTIONS, pipeline_class=HelperCompiler)
    return lambda func: by_type(jit(func))


inline = _helper(fastmath=FASTMATH)
exact = _helper(fastmath=False)                  # a function that sets no fastmath itself is compiled with its caller's
# a helper called per tensor with a table of arrays: a real call would hand over every array in seven words
inlined = _helper(fastmath=False, forceinline=True)


def ir_function(emit):
    """A function for jitted code that takes int64 values and returns nothing: emit(b, *values) builds its LLVM IR."""
    signature = inspect.signature(emit)         # its first parameter stands where Numba passes the typing context

    def typing(context, *_):
        def codegen(context, b, sig, args):
            emit(b, *args)
            return context.get_dummy_value()
        return types.void(*(types.int64,) * (len(signature.parameters) - 1)), codegen
    typing.__signature__ = signature
    return intrinsic(functools.update_wrapper(typing, emit))


# Numba numbers functions 1, 2, 3... in every process and puts the number into the symbol; objects of different
# processes loaded together would clash, and the first symbol wins silently (numba issue 10486).
def _number_functions():
    bytecode.FunctionIdentity._unique_ids = iter(range(int.from_bytes(os.urandom(6), "little") << 8, 1 << 63))


_number_functions()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_number_functions)

_SCALARS = {"i64": (types.int64, ctypes.c_int64), "f64": (types.float64, ctypes.c_double),
            "void": (types.void, None)}


def _parse(signature):
    m = re.fullmatch(r"\s*(\w+)\s*\(([\w\s,]*)\)\s*", signature)
    ret, args = m.group(1), [a.strip() for a in m.group(2).split(",") if a.strip()]
    return ret, args


# ---------------------------------------------------------------- arrays inside jitted code
def array_maker(numba_type):
    """view(addr, n) for jitted code: the n elements at an address as an array."""
    @intrinsic
    def pointer(typingctx, addr):
        def codegen(context, builder, sig, args):
            return builder.inttoptr(args[0], context.get_value_type(sig.return_type))
        return types.CPointer(numba_type)(types.int64), codegen

    @exact
    def view(addr, n):
        return carray(pointer(addr), n)
    return view


i64s, i32s, u8s = array_maker(types.int64), array_maker(types.int32), array_maker(types.uint8)


# ---------------------------------------------------------------- content keys
_IMPORT = re.compile(r"\n[ \t]*(?:from|import) (ggjit[\w.]*)(?: import (\([^)]*\)|[^\n#]*))?")


_STARTED = time.time()


@functools.cache
def _source(module):
    """(path, text) of a ggjit module, or None if there is no such module."""
    loaded = sys.modules.get(module)
    spec = loaded.__spec__ if loaded is not None else None
    if spec is None:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:             # `from ggjit.ops.native.simd import ldf`: ldf is a name
            return None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    return spec.origin, pathlib.Path(spec.origin).read_bytes()


@functools.cache
def _imports(module):
    """Names of the ggjit modules that `module` imports, anywhere in its text."""
    found = set()
    for base, names in _IMPORT.findall(f"\n{_source(module)[1].decode()}"):
        found.update([base], (f"{base}.{name}" for name in re.findall(r"\w+", names) if _is_module(base, name)))
    return frozenset(m for m in found if _source(m))


def _is_module(base, name):
    """Is `name`, imported from `base`, a module or folder of that package?"""
    path = _source(base)[0] if _source(base) else ""
    if not path.endswith("__init__.py"):
        return False
    inside = os.path.join(os.path.dirname(path), name)
    return f"{base}.{name}" in sys.modules or os.path.exists(inside + ".py") or os.path.isdir(inside)


@functools.cache
def _digest(module):
    """Hash of the name and text of a module."""
    path, text = _source(module)
    # edited since this process imported it: the process runs older code than the file holds
    edited = os.urandom(8) if os.stat(path).st_mtime >= _STARTED else b""
    return hashlib.sha256(module.encode() + b"\0" + text + edited).digest()


@functools.cache
def sources_digest(modules):
    """Hash of the sources of `modules` and of all ggjit modules they reach by imports: the same on every machine."""
    seen, todo = set(), list(modules)
    while todo:
        m = todo.pop()
        if m not in seen:
            if _source(m) is None:
                raise LookupError(f"a kernel depends on {m!r}, which is not a module of ggjit")
            seen.add(m)
            todo += _imports(m)
    return hashlib.sha256(b"".join(map(_digest, sorted(seen)))).hexdigest()


@functools.cache
def sources_key(modules):
    """As sources_digest, with everything else that machine code depends on: compilers, Python, processor."""
    machine = f"{numba.__version__} {llvmlite.__version__} {sys.version_info[:2]} {isa.code_key()}"
    return hashlib.sha256(f"{sources_digest(modules)} {machine}".encode()).hexdigest()[:20]


# ---------------------------------------------------------------- the cache
@contextlib.contextmanager
def _no_collection():
    """Context without garbage collection.  Numba makes a million objects for a kernel, most of which live until it is
    compiled; collecting would take a twelfth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def shortfall():
    """A line about what this machine lacks; "" where it has what kernels and threads are written for, or where the
    generic kernels were asked for."""
    lacks = []
    if isa.ISA == "generic" and asked_isa() != "generic":
        sets = ", ".join(name for name in isa.NAMES if name != "generic")
        lacks.append(f"the processor ({isa.PROCESSOR}) has none of {sets}: kernels are the generic ones")
    if not waiting.WAY:
        lacks.append(f"{sys.platform} has no way to sleep on a word that ggjit knows: idle threads wait in Python")
    return f"{'; '.join(lacks)}; all results are right, and slower" if lacks else ""


class _ObjectCache:
    """Object code on disk, one file a function; unwritable places degrade to compiling, with one warning."""

    def __init__(self):
        self.lock = forks.kernel_lock           # Numba's compiler lock is global anyway
        self.addresses = {}                     # (name, modules) -> code address, in this process
        self.keep = []                          # libraries must outlive the addresses taken from them
        self.compiled = self.loaded = 0
        self.compile_seconds = 0.0
        self.on_compile = None                  # progress hook: called with the name before a compilation
        self._warned = False

    @functools.cached_property
    def _names_known(self):
        """The functions that objects refer to, known to LLVM by name; it aborts without them."""
        if shortfall():
            warn(shortfall())
        for name in ("PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_CheckSignals"):
            llvm.add_symbol(name, ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value)
        for name, address in (*runtime_functions().items(), *waiting.SYMBOLS.items()):
            llvm.add_symbol(name, address)
        return True

    @functools.cached_property
    def codegen(self):
        """What compiles; Numba's own runtime is compiled first, which loading does without."""
        from numba.core.runtime import rtsys
        rtsys.initialize(cpu_target.target_context)
        _ = self._names_known
        return codegen()

    @functools.cached_property
    def engine(self):
        """Where cached objects are loaded.  Numba's own way reads a library's bitcode too: 4 ms instead of 0.4."""
        _ = self._names_known
        machine = llvm.Target.from_default_triple().create_target_machine(codemodel="jitdefault", jit=True)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        if numba.config.ENABLE_PROFILING:
            engine.enable_jit_events()
        return engine

    def address(self, name, signature, make, modules):
        """Code address of the function that `make()` returns (called on a miss only)."""
        found = self.addresses.get((name, modules))
        if found is not None:
            return found
        kept = is_kept(modules)
        key = sources_key(tuple(sorted(modules))) if kept else "own"
        with self.lock, defer_interrupts():     # one that is kept comes in between two steps of the compiler
            path = cache_files.cache_dir() / "kernels" / f"{name}-{key}.o" if kept else None
            found = self._load(path) if kept else None
            if found is None:
                found = self._compile(path, name, key, signature, make())
            self.addresses[name, modules] = found
            return found

    def _parts(self, path):
        """(symbol, names it refers to, code) of a kernel in the cache or in the shipped pack, or None."""
        try:
            payload = cache_files.read(path)
            if payload is not None:
                return cache_files.unpack(payload, 3)
        except cache_files.Unusable as e:       # LLVM aborts on damaged objects
            self._warn(path, str(e))
        except OSError as e:
            self._warn(path, f"a file that cannot be read ({e.strerror}), compiled again")
        payload = SHIPPED.payload(path.name)
        return None if payload is None else cache_files.unpack(payload, 3)

    def _load(self, path):
        parts = self._parts(path)
        if parts is None:
            return None
        symbol, externals, code = parts
        engine = self.engine
        if unknown(externals.decode().splitlines()):                 # a library that is not loaded here
            return None
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self.loaded += 1
        return engine.get_function_address(symbol.decode())

    def _compile(self, path, name, key, signature, func):
        if self.on_compile:
            self.on_compile(name)
        t0 = time.perf_counter()
        _ = self.codegen
        ret, args = _parse(signature)
        func.__name__ = func.__qualname__ = re.sub(r"\W", "_", f"{name}_{key}")
        sig = _SCALARS[ret][0](*(_SCALARS[a][0] for a in args))
        with _no_collection():
            cf = cfunc(sig, nopython=True, error_model="numpy", fastmath=FASTMATH, pipeline_class=KernelCompiler)(func)
        self.keep.append(cf)
        self.compiled += 1
        self.compile_seconds += time.perf_counter() - t0
        if path is None:                        # a user's functions are in it
            return cf.address
        # the bitcode part serves callers that link this; it is not stored
        _, _, (code, _) = cf._library.serialize_using_object_code()
        self._save(path, cache_files.pack(cf._wrapper_name.encode(), "\n".join(cf._library.externals).encode(), code))
        return cf.address

    def _save(self, path, payload):
        try:
            cache_files.write(path, payload)
        except OSError as e:
            self._warn(path, f"cannot be written ({e.strerror}); compiling in every process")

    def _warn(self, path, what):
        if not self._warned:
            self._warned = True
            warn(f"kernel cache {path.parent}: {what}; GGJIT_CACHE_DIR chooses another place")


CACHE = _ObjectCache()


class Native:
    """A jitted entry point; compiled or loaded at the first call.  Arrays are passed as their addresses."""

    def __init__(self, func, signature, gil):
        self.func, self.signature, self.gil = func, signature, gil
        self.modules = (func.__module__,)
        self.name = f"{func.__module__.removeprefix('ggjit.')}.{func.__name__}"
        functools.update_wrapper(self, func)

    @functools.cached_property
    def address(self):
        return CACHE.address(self.name, self.signature, lambda: self.func, self.modules)

    @functools.cached_property
    def _call(self):
        ret, args = _parse(self.signature)
        proto = (ctypes.PYFUNCTYPE if self.gil else ctypes.CFUNCTYPE)(_SCALARS[ret][1], *(_SCALARS[a][1] for a in args))
        return proto(self.address)

    def __call__(self, *args):
        return self._call(*[address_of(a) if isinstance(a, np.ndarray) else a for a in args])


def native(signature, gil=False):
    """Decorator: see the module's text.  `gil=True` keeps the GIL and lets Python errors set inside come out."""
    return lambda func: Native(func, signature, gil)


def address_of(a):
    """Address of a C-contiguous array's first byte."""
    if not a.flags.c_contiguous:
        raise TypeMismatch(f"jitted code takes C-contiguous arrays, got strides {a.strides} for shape {a.shape}")
    return a.__array_interface__["data"][0]


KERNEL_SIGNATURE = "i64(i64, i64, i64, i64)"        # status = kernel(node, ith, nth, sync)


def kernel_address(name, make, modules):
    """Address of a kernel `make()` returns: a plain function (node, ith, nth, sync) -> status."""
    return CACHE.address(name, KERNEL_SIGNATURE, make, modules)
