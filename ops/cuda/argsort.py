"""argsort and top_k of rows (ops/reductions/argsort.py): an element's place is the number of elements before it.

n comparisons an element: right for the rows of experts and samplers; longer rows than MAX_ROW are left to the CPU.
"""
from ggjit.ops.core.record import OP
from ggjit.ops.core.types import F32
from ggjit.ops.cuda.compiler.core import block, device, ld_i32, n_blocks, n_threads, st_i32, thread
from ggjit.ops.cuda.native.launch import dense, over_rows
from ggjit.ops.cuda.native.views import DST, SRC0, n_rows, nb, ne, param_i32, row_addr, row_index

MAX_ROW = 8192


@device
def key_of(x, descending):
    """The float at x as an integer that sorts like it: -0 equals 0, NaN above all."""
    bits = ld_i32(x) & 0xFFFFFFFF
    if bits == 0x80000000:
        bits = 0
    key = bits ^ 0x80000000
    if bits >> 31:
        key = bits ^ 0xFFFFFFFF
    if bits & 0x7FFFFFFF > 0x7F800000:
        key = 0xFFFFFFFF
    return key ^ 0xFFFFFFFF if descending else key


def _make(op_is_top_k):
    def kernel(node):
        a, d = node + SRC0, node + DST
        n, k, step = ne(a, 0), ne(d, 0), nb(a, 0)
        descending = op_is_top_k or param_i32(node, 0) == 1
        r = block()
        while r < n_rows(d):
            i1, i2, i3 = row_index(d, r)
            x, to = row_addr(a, i1, i2, i3), row_addr(d, i1, i2, i3)
            i = thread()
            while i < n:
                mine, place = key_of(x + i * step, descending), 0
                for j in range(n):
                    other = key_of(x + j * step, descending)
                    if other < mine or (other == mine and j < i):
                        place += 1
                if place < k:
                    if op_is_top_k and place < 2 and k > 1:
                        place = 1 - place       # as in ggml, where the order is undefined
                    st_i32(to + 4 * place, i)
                i += n_threads()
            r += n_blocks()
    return kernel


def _argsort(t):
    a = t.src[0]
    if a.type is not F32 or a.ne[0] > MAX_ROW or not dense(t):
        return None
    return over_rows(t.op.name.lower(), lambda: _make(t.op == OP.TOP_K), t.ne[1] * t.ne[2] * t.ne[3], a.ne[0])


CUDA = {OP.ARGSORT: _argsort, OP.TOP_K: _argsort}
