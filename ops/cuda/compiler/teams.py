"""Teams: threads of a walker's block that together act as one block of a kernel (ops/cuda/native/walk.py).

    threads of a block      |0 ... T-1|T ... 2T-1|...           T = THREADS of the body that is compiled, whole warps
    dynamic shared memory   |words of team 0|words of team 1|...|pieces of team 0|pieces of team 1|...
                             x y z n_blocks pieces row b        which block the team acts as, where its pieces begin

`thread`, `block`, `sync` and `shared` of a body are the team's.  THREADS is 0 while an ordinary kernel is compiled, and
they are the block's.  A change of THREADS compiles all device functions anew (frontend.py).
"""
from llvmlite import ir
from numba import cuda, types
from numba.cuda.extending import intrinsic

from ggjit.ops.cuda.compiler import alike
from ggjit.ops.cuda.compiler.alike import device
from ggjit.ops.cuda.compiler.intrinsics import I8, I32, I64, SHARED, lds_i64, st_i32, sts_i64

ALIGNED = 16
THREADS = 0                     # of a team in the code that is compiled, 0: no teams
pieces = {}                     # of the body that is compiled: see `laid_out`
WORDS_NBYTES, PIECES_AT, ROW_AT = 64, 32, 40
MAX_TEAMS = 32


def laid_out(piece, nbytes):
    """Where a piece of shared memory lies behind the first byte of its team's."""
    begin = pieces.get(piece)
    if begin is None:
        begin = pieces[piece] = pieces.get(None, 0)
        pieces[None] = begin + -(-nbytes // ALIGNED) * ALIGNED          # None: bytes of all
    return begin


def _dynamic(module):
    """The dynamic shared memory: the same in all functions of a kernel."""
    held = module.globals.get("ggjit_dynamic")
    if held is None:
        held = ir.GlobalVariable(module, ir.ArrayType(I8, 0), "ggjit_dynamic", addrspace=SHARED)
        held.linkage, held.align = "external", ALIGNED
    return held


@intrinsic
def dynamic(typingctx):
    return types.int64(), lambda context, b, sig, args: b.ptrtoint(_dynamic(b.module), I64)


def shared(nbytes, aligned=ALIGNED):
    """Shared memory of one kernel: `piece = shared(512)` outside the kernel, `piece()` its address, a multiple of
    `aligned` (16 in teams).

    Call it in one function and pass the address on: every device function is compiled as a module with variables of its
    own, so a second caller would get a second piece.
    """
    @intrinsic
    def piece(typingctx):
        def codegen(context, b, sig, args):
            if THREADS:
                return b.add(_pieces_of_team(b), ir.Constant(I64, laid_out(piece, nbytes)))
            name = f"shared_{nbytes}_{id(piece):x}"
            held = b.module.globals.get(name)
            if held is None:
                held = ir.GlobalVariable(b.module, ir.ArrayType(I8, nbytes), name, addrspace=SHARED)
                held.linkage, held.align = "internal", aligned
                held.initializer = ir.Constant(held.type.pointee, ir.Undefined)
            return b.ptrtoint(held, I64)
        return types.int64(), codegen
    return piece


@intrinsic
def _thread_here(typingctx):
    """Number of the thread in its block, read anew each time.

    Otherwise what depends on it is computed before the first body of a walker, and lies in registers through them all.
    """
    def codegen(context, b, sig, args):
        read = ir.InlineAsm(ir.FunctionType(I32, []), "mov.u32 $0, %tid.x;", "=r", side_effect=True)
        return b.zext(b.call(read, ()), I64)
    return types.int64(), codegen


@device
def team():
    return _thread_here() // THREADS


@device
def _words():
    return dynamic() + WORDS_NBYTES * team()


def _pieces_of_team(b):
    """The word that says where the team's pieces begin, for an intrinsic."""
    number = b.call(b.module.declare_intrinsic("llvm.nvvm.read.ptx.sreg.tid.x", (), ir.FunctionType(I32, [])), ())
    at = b.mul(b.udiv(number, ir.Constant(I32, THREADS)), ir.Constant(I32, WORDS_NBYTES))
    words = b.add(b.ptrtoint(_dynamic(b.module), I64), b.add(b.zext(at, I64), ir.Constant(I64, PIECES_AT)))
    return b.load(b.inttoptr(words, I64.as_pointer(SHARED)), align=8)


# ---------------------------------------------------------------- who am I
def _or_teams(of_block, of_team):
    """The function of ordinary kernels, of_team() in the bodies of a walker."""
    @device
    def answer():
        if THREADS:
            return of_team()
        return of_block()
    return answer


def _told(i):
    @device
    def told():
        return lds_i64(_words() + 8 * i)
    return told


@device
def _thread_of_team():
    return _thread_here() % THREADS


@device
def _threads_of_team():
    return types.int64(THREADS)


thread, n_threads = _or_teams(alike.thread, _thread_of_team), _or_teams(alike.n_threads, _threads_of_team)
block, block_y, block_z, n_blocks = (_or_teams(f, _told(i)) for i, f in enumerate((
    alike.block, alike.block_y, alike.block_z, alike.n_blocks)))


# ---------------------------------------------------------------- barriers
def _instruction(text, constraints, result, parameter):
    """A PTX instruction of one operand as a function; it orders memory and stays where it is."""
    @intrinsic
    def call(typingctx, operand):
        def codegen(context, b, sig, args):
            returns = ir.VoidType() if result is types.void else context.get_value_type(result)
            ft = ir.FunctionType(returns, [context.get_value_type(parameter)])
            made = b.call(ir.InlineAsm(ft, text(), constraints, side_effect=True), args, attrs=("convergent",))
            return context.get_dummy_value() if result is types.void else made
        return result(parameter), codegen
    return call


_team_barrier = _instruction(lambda: f"bar.sync $0, {THREADS};", "r,~{memory}", types.void, types.int32)
_add_one = _instruction(lambda: "{ fence.acq_rel.gpu; atom.add.acq_rel.gpu.global.u32 $0, [$1], 1; }",
                        "=r,l,~{memory}", types.int32, types.int64)
_seen = _instruction(lambda: "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l,~{memory}", types.int32, types.int64)
_fetch = _instruction(lambda: "prefetch.global.L2 [$0];", "l", types.void, types.int64)


@device
def sync():
    """All threads of the block, in a body of the team, are here; what they wrote is seen by all of them."""
    if THREADS == 0:
        cuda.syncthreads()
    elif THREADS == 32:
        cuda.syncwarp()
    else:
        _team_barrier(types.int32(1 + team()))


@device
def enter(x, y, z, n, pieces_nbytes, row, b):
    """The team acts as block (x, y, z) of n in x from here on; all its threads call it.

    entered_row, entered_block: row and b.  The compiler does not know them, or it would keep all words of the row in
    registers.
    """
    if thread() == 0:
        words = _words()
        sts_i64(words, x)
        sts_i64(words + 8, y)
        sts_i64(words + 16, z)
        sts_i64(words + 24, n)
        sts_i64(words + PIECES_AT, dynamic() + MAX_TEAMS * WORDS_NBYTES + team() * pieces_nbytes)
        sts_i64(words + ROW_AT, row)
        sts_i64(words + ROW_AT + 8, b)
    sync()


@device
def entered_row():
    return lds_i64(_words() + ROW_AT)


@device
def entered_block():
    return lds_i64(_words() + ROW_AT + 8)


@device
def whole_block():
    """Number of the block that the team is part of."""
    return alike.block()


@device
def whole_blocks():
    return alike.n_blocks()


# ---------------------------------------------------------------- the blocks of a walker wait for each other
@device
def arrive(counter):
    """This block has done its part; what it wrote is seen by those that await it."""
    cuda.syncthreads()
    if alike.thread() == 0:
        _add_one(counter)


@device
def await_all(counter, n):
    """Wait for n arrivals since the launch began."""
    if alike.thread() == 0:
        while _seen(counter) < n:
            pass
    cuda.syncthreads()


@device
def leave(counter, n):
    """As the last of n arrivals, leave the counter as it was when the launch began."""
    cuda.syncthreads()
    if alike.thread() == 0 and _add_one(counter) == n - 1:
        st_i32(counter, types.int32(0))


@device
def prefetch(address):
    """A line of memory into the second-level cache."""
    _fetch(address)
