"""The rows on which an item of flash attention works, and how they are copied into a thread's scratch.

The query rows that read the same K and V head form a *group*; in it they are numbered heads first:

    row r of a group  =  head (group's first + r % rep), query r // rep          rep = query heads per K/V head

so that neighbours share a mask row, and a causal mask hides whole key blocks from a set of neighbouring rows.
"""
import dataclasses

from ggjit.ops.attention.flash_attn_softmax import slope_of
from ggjit.ops.attention.flash_attn_tiles import BK, make_copy_row, make_store_row
from ggjit.ops.core.traits import traits_of
from ggjit.ops.core.types import Type
from ggjit.ops.native.jit import inline
from ggjit.ops.native.mem import ld_i32, st_f32, st_i64
from ggjit.ops.native.node import DST, SRC0, SRC1, SRC2, SRC3, SRC4, SRC5, addr, ne, param_f32, row_addr
from ggjit.ops.native.simd import f32


@dataclasses.dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for."""
    q: Type
    k: Type
    v: Type
    d: int                  # length of a q and k row
    dv: int                 # length of a v row

    @property
    def name(self):
        return f"{self.q.name}-{self.k.name}-{self.v.name}-{self.d}-{self.dv}"


@inline
def heads_per_group(q, k, v):
    """Query heads that share both their K and their V head."""
    a, b = ne(q, 2) // ne(k, 2), ne(q, 2) // ne(v, 2)
    while b != 0:
        a, b = b, a % b
    return a


@inline
def first_head(q, group, rep):
    """(first query head, index in dim 3) of a group; rep = heads_per_group."""
    n_groups = ne(q, 2) // rep
    i3 = group // n_groups
    return (group - i3 * n_groups) * rep, i3


@inline
def score_scale(node):
    """(factor of q, soft cap or 0): score = cap tanh(scale / cap q.k) with a cap, else scale q.k."""
    scale, cap = param_f32(node, 0), param_f32(node, 2)
    if cap != f32(0.0):
        scale = scale / cap
    return scale, cap


@inline
def repeated(i, n):
    """i % n; most masks have one matrix for all."""
    return i % n if n > 1 else 0


def make_begin(variant, rows, q_offs, q_stride):
    """begin(node, wk, head0, i3, rep, r0, n): rows r0 .. r0 + n of a group: q times scale, mask addresses, slopes."""
    copy_q = make_copy_row(variant.q.name, variant.d)
    mask_, slope_ = rows.mask, rows.slope

    @inline
    def begin(node, wk, head0, i3, rep, r0, n):
        q, mask = node + SRC0, node + SRC3
        scale, cap = score_scale(node)
        max_bias = param_f32(node, 1)
        for i in range(n):
            query = (r0 + i) // rep
            head = head0 + (r0 + i) - query * rep
            copy_q(row_addr(q, query, head, i3), wk + q_offs + i * q_stride, scale)
            st_f32(wk + slope_ + 4 * i, slope_of(head, ne(q, 2), max_bias))
            at = addr(mask)
            if at != 0:
                at = row_addr(mask, query, repeated(head, ne(mask, 2)), repeated(i3, ne(mask, 3)))
            st_i64(wk + mask_ + 8 * i, at)
    return begin


@inline
def kv_addr(node, head, i3):
    """Addresses of the first K and V row of a query head."""
    q, k, v = node + SRC0, node + SRC1, node + SRC2
    return (row_addr(k, 0, head // (ne(q, 2) // ne(k, 2)), i3),
            row_addr(v, 0, head // (ne(q, 2) // ne(v, 2)), i3))


@inline
def page_table(node, query):
    """Address of a query's page table; one table serves all queries where there is no other."""
    pages = node + SRC5
    return row_addr(pages, query if ne(pages, 1) > 1 else 0, 0, 0)


@inline
def bad_page(node):
    """An entry of the page tables that names no BK rows of K (2^31 for any negative one); -1: all do."""
    pages, n = node + SRC5, ne(node + SRC1, 1) // BK
    for i in range(ne(pages, 1)):
        table = row_addr(pages, i, 0, 0)
        for j in range(ne(pages, 0)):
            page = ld_i32(table + 4 * j)
            if page < 0 or page >= n:
                return page if page >= 0 else 1 << 31
    return -1


def make_finish(variant):
    """finish(node, head0, i3, rep, r, src, factor): writes row r of a group, in scratch at src, times factor."""
    store = make_store_row(variant.dv)

    @inline
    def finish(node, head0, i3, rep, r, src, factor):
        query = r // rep
        store(src, row_addr(node + DST, head0 + r - query * rep, query, i3), factor)
    return finish


@inline
def sink_of(node, head0, rep, r):
    """Address of the sink of row r's head, or 0."""
    sinks = addr(node + SRC4)
    return sinks + 4 * (head0 + r % rep) if sinks != 0 else 0


def make_row_reader(type, n):
    """read(src, dst): one row of n elements of any type with kernels -> float32, padded."""
    if type.name in ("f32", "f16", "bf16"):
        copy = make_copy_row(type.name, n)

        @inline
        def read(src, dst):
            copy(src, dst, f32(1.0))
        return read
    to_float = traits_of(type).to_float

    @inline
    def read(src, dst):                     # whole blocks of 32 or more: no padding needed
        to_float(src, dst, n)
    return read
