"""A kernel function as LTO-IR or PTX, by the compiler of this process (choice.py).  Needs neither GPU nor driver.

    ltoir(func, cc)     what nvJitLink makes a cubin of (build.py)
    ptx(func, cc)       text, the linked functions not inlined
    body(func, name, threads, cc)       a function of an integer for teams (teams.py), and what they share
    extern(name)        the same as a function that kernels call
    VERSION             of the compiler: cubins of another are not used

Both compilers ask the current GPU for its capability although it was given, so the question is answered here.
"""
import contextlib

from ggjit.ops.core.interrupts import defer_interrupts
from ggjit.ops.core.locks import ForkLock
from ggjit.ops.cuda.compiler.choice import NAME

_one_at_a_time = ForkLock()


@contextlib.contextmanager
def _answering(module, name, answer):
    """Inside the block `module.name` is replaced by `answer`."""
    with _one_at_a_time, defer_interrupts():        # an interrupt could be lost inside the compiler
        before = getattr(module, name)
        setattr(module, name, answer)
        try:
            yield
        finally:
            setattr(module, name, before)


if NAME == "numba-cuda-mlir":
    from numba_cuda_mlir import cuda, tools, types
    from numba_cuda_mlir._version import __version__

    VERSION = f"numba-cuda-mlir {__version__}"

    def _compiled(func, cc, output):
        with _answering(tools, "_cached_cc", cc):
            return cuda.compile(func, types.void(types.int64), device=False, abi="numba", cc=cc, output=output)[0]

    def ltoir(func, cc):
        return [_compiled(func, cc, "ltoir")]
else:
    import llvmlite
    import numba
    import numba_cuda
    from numba import cuda, types
    from numba.cuda import dispatcher

    from ggjit.ops.cuda.compiler import alike, teams

    VERSION = f"{numba_cuda.__version__} {numba.__version__} {llvmlite.__version__}"

    _BODY = types.int64(types.int64)

    def _answered(compile, cc, *args, **options):
        device = type("Device", (), {"compute_capability": cc})
        with _answering(dispatcher, "get_current_device", lambda: device):
            return compile(*args, cc=cc, **options)[0]

    def _compiled(func, cc, output):
        compile = cuda.compile_all if output == "ltoir" else cuda.compile
        return _answered(compile, cc, func, types.void(types.int64), device=False, abi="numba", output=output)

    def ltoir(func, cc):
        return _compiled(func, cc, "ltoir")

    @contextlib.contextmanager
    def _in_teams(threads):
        """Inside the block device functions are compiled for teams of so many threads."""
        def switch(threads):
            teams.THREADS = threads
            teams.pieces.clear()
            for function in list(alike.made):
                function.overloads.clear()
        with _one_at_a_time:
            switch(threads)
            try:
                yield
            finally:
                switch(0)

    def body(func, name, threads, cc):
        """(LTO-IR, bytes of shared memory of a team)"""
        with _in_teams(threads):
            code = _answered(cuda.compile_all, cc, func, _BODY, device=True, abi="c", abi_info={"abi_name": name},
                             output="ltoir")
            return code, teams.pieces.get(None, 0)

    def extern(name):
        return cuda.declare_device(name, _BODY, abi="c")


def ptx(func, cc):
    return _compiled(func, cc, "ptx")
