"""Kernels of the node before a product with quantised weights, which leave its result's 8-bit codes, too.

    h = mul x w | quantise h | q = Wq h | ...       ->      h = mul x w, quantise h | q = Wq h | ...

A launch less for each column, and the persistent kernel's blocks meet less often.  Result and codes are those of the
two kernels: a warp takes 32 values, as in quantize_columns.py.  An attention leaves the codes of all heads of a query,
which a product reads as one column.
"""
from ggjit.ops.core.record import GLU, OP
from ggjit.ops.core.shape import is_contiguous
from ggjit.ops.core.types import F32
from ggjit.ops.cuda import quantize_columns
from ggjit.ops.cuda.compiler import core
from ggjit.ops.cuda.glu import GATES
from ggjit.ops.cuda.native.launch import Launch, dense, launches, of_module
from ggjit.ops.cuda.native.views import (
    DST,
    SRC0,
    SRC1,
    n_rows,
    ne,
    param_f32,
    param_i32,
    row_addr,
    row_addr_mod,
    row_index,
    work,
)

MAX_ROWS = 8                    # a product of more columns reads no codes


@core.device
def _product(node, i1, i2, i3, i):
    return core.ld_f32(row_addr(node + SRC0, i1, i2, i3) + 4 * i) * core.ld_f32(
        row_addr_mod(node + SRC1, i1, i2, i3) + 4 * i)


def _gated(gate, split):
    @core.device
    def value(node, i1, i2, i3, i):
        x = row_addr(node + SRC0, i1, i2, i3)
        g = x + 4 * ne(node + DST, 0)
        if split:
            g = row_addr(node + SRC1, i1, i2, i3)
        elif param_i32(node, 1) != 0:
            g, x = x, g
        return gate(core.ld_f32(x + 4 * i), core.ld_f32(g + 4 * i), param_f32(node, 2), param_f32(node, 3))
    return value


def _make(value):
    """value(node, i1, i2, i3, i): element i of a row of the result."""
    def kernel(node):
        d = node + DST
        k, n = ne(d, 0), n_rows(d)
        per_row, codes = k >> 5, work(node)
        i = core.block() * (core.n_threads() >> 5) + (core.thread() >> 5)
        while i < n * per_row:
            r = i // per_row
            at = (i - r * per_row) * 32 + (core.thread() & 31)
            i1, i2, i3 = row_index(d, r)
            x = value(node, i1, i2, i3, at)
            core.st_f32(row_addr(d, i1, i2, i3) + 4 * at, x)
            quantize_columns.put_code(codes + r * k + at, codes + n * k + 4 * i, x)
            i += core.n_blocks() * (core.n_threads() >> 5)
    return kernel


def _of_mul(t):
    a, b = t.src[:2]
    return (_product, "mul_codes") if a.ne == t.ne and b.ne[0] == t.ne[0] else None


def _of_glu(t):
    which, split = GLU(int(t.op_params[0])), len(t.src) > 1
    return _gated(GATES[which], split), f"{which.name.lower()}{'_split' * split}_codes"


VALUES = {OP.MUL: _of_mul, OP.GLU: _of_glu}


def before_product(t, of_t, product, of_product):
    """The Launches of node `t`, which comes before a product by these Launches, if they leave the codes that it takes;
    None: by its own, `of_t`."""
    column = product.src[1] if of_product[0].leaves == quantize_columns.CODES else None
    if column is None or column.type is not F32 or not is_contiguous(t) or not is_contiguous(column) \
            or column.ne[0] % 32 or column.ne[1] * column.ne[2] * column.ne[3] > MAX_ROWS:
        return None
    if column.id != t.id and not _is_of_heads(column, t):
        return None
    last = of_t[-1]
    made = last.coded() if isinstance(last, Launch) else None
    return of_module(made, last.module) if made else _with_codes(t, last)


def _is_of_heads(column, t):
    """Has each column all heads of a query of an attention?"""
    return t.op is OP.FLASH_ATTN_EXT and column.base.id == t.id and column.nbytes == t.nbytes \
        and column.ne[0] == t.ne[0] * t.ne[1] and t.ne[0] % 32 == 0


def _with_codes(t, launch):
    """The same of a node that is computed alone, by this Launch."""
    alone = launches(t)
    if t.op not in VALUES or alone is None or alone[-1].name != launch.name or not dense(*t.src) \
            or any(x.type is not F32 for x in t.src):
        return None
    found = VALUES[t.op](t)
    return found and (quantize_columns.beside(t, found[1], lambda: _make(found[0]), __name__),)
