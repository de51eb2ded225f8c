"""Kernel launches of a node, which makers return, and the table of ops that have makers."""
import dataclasses
import functools
from collections.abc import Callable

from ggjit.ops.core.discovery import declared, modules_below
from ggjit.ops.core.errors import OutOfMemory
from ggjit.ops.core.fusion_pattern import by_first_op
from ggjit.ops.core.shape import rows_contiguous
from ggjit.ops.cuda.compiler.choice import SMALL_BLOCKS

MAX_BLOCKS = 3 if SMALL_BLOCKS else 1 << 16        # kernels whose blocks take rows in turn never need more
MAX_THREADS = 64 if SMALL_BLOCKS else 256
ENOUGH_BLOCKS = 4 if SMALL_BLOCKS else 512         # to keep a GPU busy


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch.

    name        names the code: equal names must mean equal code
    make        () -> plain function kernel(node); called only when the cache has no such code
    grid        blocks in x, y, z
    block       threads of a block: whole warps
    work_nbytes scratch memory of the node; its launches share it
    module      where the maker is defined: the code depends on it and what it imports (`launches` fills it in)
    leaves      the form in which it leaves source 1 in scratch memory, and nothing else: a launch that would do that
                again is left out (engine/cuda/cuda_plan.py)
    leaves_result   the form in which it leaves the node's result there, too
    max_nmse    ggml's bound of the error, where the kernel rounds what the CPU's does not
    by_warpgroups   it multiplies by warpgroups: for compute capability 9.0, in no walker
    registers   most registers of a thread, so that a multiprocessor has room for more blocks; 0: as many as it takes
    coded       () -> the node's Launches that leave the 8-bit codes of its result, too (ops/cuda/matmul/with_codes.py),
                or None; of the node's last Launch, where its maker has them
    added       () -> the Launch that adds source 2 to the result, or None (ops/cuda/fused/added.py); of the last, too
    """
    name: str
    make: Callable
    grid: tuple
    block: int
    work_nbytes: int = 0
    module: str = ""
    max_nmse: float = 0.0
    leaves: str = ""
    leaves_result: str = ""
    by_warpgroups: bool = False
    registers: int = 0
    coded: Callable = lambda: None
    added: Callable = lambda: None


@dataclasses.dataclass(frozen=True)
class NodeKernel:
    """The launches of a node, as engine/graphs/graph_plan.py sees a kernel."""
    name: str
    launches: tuple
    work_nbytes: int
    cost: float = 0.0


def node_kernel(launches):
    return NodeKernel("+".join(x.name for x in launches), launches, max(x.work_nbytes for x in launches))


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One dense product by cuBLAS: result (n rows of m float32) = b (n rows of k) times the transpose of a (m rows).

    type            of a and b
    lda, ldb, ldc   elements from row to row of a, b and the result
    a_offs, b_offs  bytes into scratch memory; None: a is source 0, b is source 1
    """
    type: object
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldc: int
    a_offs: int | None
    b_offs: int | None
    max_nmse: float = 0.0
    name: str = "cublas"
    work_nbytes: int = 0        # its Launches say what scratch memory they take
    leaves = leaves_result = ""


@dataclasses.dataclass(frozen=True)
class Sort:
    """Rows of 64-bit words put in the order of their upper halves, equal ones as they stand, by CCCL.

    The first n_rows x n words of scratch memory, into the same number of words behind them.
    """
    n: int
    n_rows: int
    name: str = "cccl"
    work_nbytes: int = 0        # its Launches say what scratch memory they take
    max_nmse: float = 0.0
    leaves = leaves_result = ""


def threads_for(n, most=MAX_THREADS):
    """Whole warps for n elements."""
    return min(most, max(32, (n + 31) // 32 * 32))


def over_rows(name, make, n_rows, row_length, work_nbytes=0):
    """A launch whose blocks take rows in turn."""
    return Launch(name, make, (max(1, min(n_rows, MAX_BLOCKS)), 1, 1), threads_for(row_length), work_nbytes)


def over_pieces(name, make, n_rows, row_length, work_nbytes=0, leaves=""):
    """A launch whose blocks take rows in turn, or pieces of them where there are few: see `views.piece`."""
    threads, n_rows = threads_for(row_length), max(1, n_rows)
    pieces = min(-(-row_length // threads), -(-ENOUGH_BLOCKS // n_rows)) or 1
    return Launch(name, make, (n_rows * pieces if pieces > 1 else min(n_rows, MAX_BLOCKS), 1, 1), threads, work_nbytes,
                  leaves=leaves)


def over_elements(name, make, n):
    """A launch whose threads take elements in turn."""
    threads = threads_for(n)
    return Launch(name, make, (max(1, min(-(-n // threads), MAX_BLOCKS)), 1, 1), threads)


@dataclasses.dataclass(frozen=True)
class NodeWays:
    """The ways of an op's nodes, among which engine/cuda/libraries.py chooses.

    own(t), piped(t)        the launches of our own kernels; None: they do not serve the node
    by_warpgroups(t)        the same of a device of compute capability 9.0
    library                 (name, decided): of the one whose calls `launches` has; decided(): must it be used?
    class_of(t)             name of the class of shapes
    again(t, *leaves)       the node made anew of leaves like its sources
    unmeasured              the way where one of `forgiven` kept it from being measured
    """
    own: Callable
    class_of: Callable
    again: Callable
    library: tuple = ("", None)
    piped: Callable | None = None
    by_warpgroups: Callable | None = None
    unmeasured: str = "own"
    forgiven: tuple = (OutOfMemory,)


def rounded(n):
    """The least power of two from n on: sizes of one class of shapes."""
    return 1 << (n - 1).bit_length()


def _tables(name):
    """{OP: entry} of the tables of this name of every file in ggjit.ops.cuda."""
    found = {}
    for module in modules_below("ggjit.ops.cuda", skip=("native", "compiler")):
        for op, entry in getattr(module, name, {}).items():
            assert op not in found, f"{op.name} is twice in {name}"
            found[op] = entry
    return found


@functools.cache
def makers():
    """{OP: maker} of every file in ggjit.ops.cuda."""
    return _tables("CUDA")


@functools.cache
def cuda_fusions():
    """{first OP: its fusions, longest first} of every file in ggjit.ops.cuda."""
    return by_first_op(declared("ggjit.ops.cuda", "CUDA_FUSIONS", skip=("native", "compiler")))


@functools.cache
def node_ways():
    """{OP: NodeWays} of ops whose nodes can be computed in several ways."""
    return _tables("WAYS")


def launches(t, maker=None):
    """The Launches, Gemms and Sorts of node `t`, a tuple, of its op's maker or this; None where no kernel serves it."""
    maker = maker or makers().get(t.op)
    if maker is None or not all(_aligned(x) for x in (t, *(s for s in t.src if s is not None))):
        return None
    made = maker(t)
    if made is None:
        return None
    return of_module(made if isinstance(made, tuple) else (made,), maker.__module__)


def of_module(launches, module):
    """The same, the Launches' code defined in that module."""
    return tuple(dataclasses.replace(x, module=module) if isinstance(x, Launch) else x for x in launches)


def _aligned(x):
    """Elements, and blocks of quantised types, lie at multiples of the power of two in their size."""
    size = min(x.type.nbytes & -x.type.nbytes, 16)
    return all(b % size == 0 for b in x.nb) and x.view_offs % size == 0


def dense(*tensors):
    """Elements of all rows lie side by side."""
    return all(rows_contiguous(t) for t in tensors)
