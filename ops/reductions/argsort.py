"""argsort, top_k: the order of the elements of each row.

Each float becomes a 32-bit key that sorts as an integer (all bits but the sign flipped for negative numbers; all bits
for a descending order).  -0 equals 0, and NaN is largest (ggml's order with NaN is undefined).  The order is stable:
equal elements keep theirs (ggml promises none).

    up to FEW      every element counts the keys that come before its own: that is its place; no branch to guess
    more           key and index share a 64-bit word; the words go through three passes of a radix sort by 11 bits

top_k first finds which words can be among the k first, and sorts only those.  For a small k of rows side by side,
elements are put into groups, twice as many as k or more: what comes after the k-th first of the groups' first ones is
not among them.

    keys      |vector 0|vector 1|...|vector 7|vector 8|...      lane j of vectors i, i + 8, i + 16... is a group

Otherwise a histogram of the keys' upper 11 bits tells it.
"""
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ggjit.ops.copying.view import permute, view_4d
from ggjit.ops.core.builders import all_or_nothing
from ggjit.ops.core.record import OK, OP
from ggjit.ops.core.shape import n_elements, require, require_type
from ggjit.ops.core.spec import Case, Kernel, Spec
from ggjit.ops.core.types import F32, I32, Tensor
from ggjit.ops.native.jit import inline
from ggjit.ops.native.lanes import for_ir, i64
from ggjit.ops.native.mem import IR_I32, IR_I64, ld_i32, ld_i64, st_i32, st_i64, zero_bytes
from ggjit.ops.native.node import DST, SRC0, nb, ne, next_rows, row_addr, row_index, work
from ggjit.ops.native.row_loops import I32_MAX, SHORT_CHUNK, Chunking, over_chunks, param, whole
from ggjit.ops.native.simd import W, const_ir, load_ir, splat_ir, store_ir, vec_ir

ASC, DESC = 0, 1
BITS, BINS = 11, 1 << 11
# up to so many elements n^2 comparisons are faster than three passes of radix sort, or than a histogram (top_k)
FEW, FEW_TOP = 288, 160
GROUP_VECTORS = 8                               # vectors of groups; twice as many for a larger k
NAN_KEY, NO_KEY = 0x7FFFFFFE, 0x7FFFFFFF                # key of NaN, the largest; key that fills up the last vector


# ---------------------------------------------------------------- builders
def argsort(a: Tensor, order: int):
    """Indices that sort each row of a (F32) -> I32, shape of a; order: 0 ascending, 1 descending; stable.

    NumPy: np.argsort(a, -1, kind="stable").  op params: order.  Errors: TypeMismatch, ShapeError, ParamError.
    Source: ggml_argsort.
    """
    require_type("argsort", a, (F32,))
    require(a.ne[0] <= I32_MAX, "argsort: rows of at most 2^31 - 1 elements", a)
    return a.ctx.node(OP.ARGSORT, I32, a.ne, (a,), (whole("argsort", "order", order, 0, 1),))


@all_or_nothing
def argsort_top_k(a: Tensor, k: int):
    """Indices of the k largest of each row of a [n, n1, n2, n3] F32, in descending order -> I32 [k, n1, n2, n3].

    A view of `argsort` (not contiguous for k < n).  NumPy: np.argsort(-a, -1)[..., :k].  Errors: TypeMismatch,
    ShapeError, ParamError.  Source: ggml_argsort_top_k.
    """
    k = whole("argsort_top_k", "k", k, 0, a.ne[0])
    order = argsort(a, DESC)
    return view_4d(order, k, *order.ne[1:], *order.nb[1:], 0)


def top_k(a: Tensor, k: int):
    """Indices of the k largest of each row of a (F32) -> I32 [k, ne1, ne2, ne3].

    The order is not specified; as in ggml it is descending with the first two exchanged, so that no caller relies on
    it.  op params: none.  Errors: TypeMismatch, ShapeError, ParamError.  Source: ggml_top_k.
    """
    require_type("top_k", a, (F32,))
    require(a.ne[0] <= I32_MAX, "top_k: rows of at most 2^31 - 1 elements", a)
    return a.ctx.node(OP.TOP_K, I32, (whole("top_k", "k", k, 1, a.ne[0]), *a.ne[1:]), (a,))


def reference(t, a):
    if t.op == OP.ARGSORT and t.op_params[0] == ASC:
        return np.argsort(a, -1, kind="stable")
    order = np.argsort(-a, -1, kind="stable")[..., :t.ne[0]]
    if t.op == OP.TOP_K and t.ne[0] > 1:
        order[..., :2] = order[..., 1::-1]
    return order


# ---------------------------------------------------------------- kernel
@inline
def _key(x, descending):
    """The float at x as an int32 that sorts ascending."""
    bits = types.int64(ld_i32(x))
    size = bits & 0x7FFFFFFF
    key = 0 if size == 0 else bits ^ (bits >> 63 & 0x7FFFFFFF)
    key = NAN_KEY if size > 0x7F800000 else key
    return ~key if descending else key


@intrinsic
def _ranks(typingctx, keys, n, ranks):
    """How many keys come before each of the n keys, n a multiple of W; equal ones do if they lie before it.

        vector i    j < W i: key_j <= own     j = W i ... W i + W - 1: <= in the lanes after j, else <     above: <

    `<=` is `<` with own + 1.
    """
    def codegen(context, b, sig, args):
        keys, n, ranks = args
        v, one = vec_ir("i32", W), const_ir("i32", [1] * W)

        def count(b, acc, own, at, n_keys):
            for j in range(n_keys):
                key = splat_ir(b, load_ir(b, b.add(at, i64(4 * j)), IR_I32, 4), W)
                acc = b.sub(acc, b.sext(b.icmp_signed("<", key, own(j)), v))
            return acc

        def vector(b, state):
            at, to = state
            own = load_ir(b, at, v, 4)
            after = b.add(own, one)
            blocks = b.udiv(b.sub(at, keys), i64(4 * W))

            def body(limit):
                return lambda b, state: [b.add(state[0], i64(4 * W)), count(b, state[1], lambda j: limit, state[0], W)]
            start = [(IR_I64, keys), (v, ir.Constant(v, None))]
            _, acc = for_ir(b, blocks, start, body(after))
            acc = count(b, acc, lambda j: b.add(own, const_ir("i32", [int(lane > j) for lane in range(W)])), at, W)
            above = b.sub(b.sub(b.udiv(n, i64(W)), blocks), i64(1))
            _, acc = for_ir(b, above, [(IR_I64, b.add(at, i64(4 * W))), (v, acc)], body(own))
            store_ir(b, acc, to, 4)
            return [b.add(at, i64(4 * W)), b.add(to, i64(4 * W))]
        for_ir(b, b.udiv(n, i64(W)), [(IR_I64, keys), (IR_I64, ranks)], vector)
        return context.get_dummy_value()
    return types.void(*(types.int64,) * 3), codegen


@intrinsic
def _descending_keys(typingctx, x, keys, count):
    """Keys of `count` vectors of floats at x, which sort them in descending order, as `_key` says."""
    def codegen(context, b, sig, args):
        x, keys, count = args

        def number(n):
            return const_ir("i32", [n] * W)

        def body(b, state):
            at, to = state
            bits = load_ir(b, at, vec_ir("i32", W), 4)
            size = b.and_(bits, number(0x7FFFFFFF))
            key = b.xor(bits, b.and_(b.ashr(bits, number(31)), number(0x7FFFFFFF)))
            key = b.select(b.icmp_signed("==", size, number(0)), number(0), key)
            key = b.select(b.icmp_signed(">", size, number(0x7F800000)), number(NAN_KEY), key)
            store_ir(b, b.xor(key, number(-1)), to, 4)
            return [b.add(at, i64(4 * W)), b.add(to, i64(4 * W))]
        for_ir(b, count, [(IR_I64, x), (IR_I64, keys)], body)
        return context.get_dummy_value()
    return types.void(*(types.int64,) * 3), codegen


@intrinsic
def _least_of_groups(typingctx, keys, count, groups, n_vectors):
    """The least key of each group of `count` vectors of keys; the groups fill n_vectors."""
    def codegen(context, b, sig, args):
        keys, count, groups, n_vectors = args
        v = vec_ir("i32", W)

        def group(b, state):
            at, to, left = state

            def body(b, state):
                key = load_ir(b, state[0], v, 4)
                least = b.select(b.icmp_signed("<", key, state[1]), key, state[1])
                return [b.add(state[0], b.mul(n_vectors, i64(4 * W))), least]
            n = b.udiv(b.add(left, b.sub(n_vectors, i64(1))), n_vectors)
            _, least = for_ir(b, n, [(IR_I64, at), (v, const_ir("i32", [NO_KEY] * W))], body)
            store_ir(b, least, to, 4)
            return [b.add(at, i64(4 * W)), b.add(to, i64(4 * W)), b.sub(left, i64(1))]
        for_ir(b, n_vectors, [(IR_I64, keys), (IR_I64, groups), (IR_I64, count)], group)
        return context.get_dummy_value()
    return types.void(*(types.int64,) * 4), codegen


@intrinsic
def _any_up_to(typingctx, keys, limit):
    """Is one of the vector of keys no larger than the limit?"""
    def codegen(context, b, sig, args):
        key = load_ir(b, args[0], vec_ir("i32", W), 4)
        hits = b.icmp_signed("<=", key, splat_ir(b, b.trunc(args[1], IR_I32), W))
        return b.icmp_unsigned("!=", b.bitcast(hits, ir.IntType(W)), ir.Constant(ir.IntType(W), 0))
    return types.boolean(types.int64, types.int64), codegen


@inline
def _fill_up(keys, n):
    """Append keys that sort last, up to a multiple of W; returns the new number."""
    whole = (n + W - 1) // W * W
    for i in range(n, whole):
        st_i32(keys + 4 * i, types.int32(NO_KEY))
    return whole


@inline
def _radix_pass(to, words, n, counts, shift):
    zero_bytes(counts, 8 * BINS)
    for i in range(n):
        c = counts + 8 * (ld_i64(words + 8 * i) >> shift & BINS - 1)
        st_i64(c, ld_i64(c) + 1)
    total = 0
    for b in range(BINS):
        c = ld_i64(counts + 8 * b)
        st_i64(counts + 8 * b, total)
        total += c
    for i in range(n):
        w = ld_i64(words + 8 * i)
        c = counts + 8 * (w >> shift & BINS - 1)
        place = ld_i64(c)
        st_i64(c, place + 1)
        st_i64(to + 8 * place, w)


@inline
def _sorted(words, spare, counts, n):
    """Sorts n words; they end in the spare array."""
    shift, a, b = 31, words, spare
    for _ in range(3):
        _radix_pass(b, a, n, counts, shift)
        shift, a, b = shift + BITS, b, a


@inline
def _candidates(words, spare, counts, n, k):
    """Collects in `spare` the words whose upper bits do not exceed those of the k-th smallest; returns their number."""
    zero_bytes(counts, 8 * BINS)
    top = 31 + 32 - BITS
    for i in range(n):
        c = counts + 8 * (ld_i64(words + 8 * i) >> top)
        st_i64(c, ld_i64(c) + 1)
    last, total = 0, ld_i64(counts)
    while total < k:
        last += 1
        total += ld_i64(counts + 8 * last)
    m = 0
    for i in range(n):
        w = ld_i64(words + 8 * i)
        st_i64(spare + 8 * m, w)                                # m < n: there is always room for one more
        m += w >> top <= last
    return m


@inline
def _n_group_vectors(n, k, step):
    """How many vectors of groups tell the k first of n floats; 0: too few, or they do not lie side by side."""
    n_vectors = GROUP_VECTORS if 2 * k <= GROUP_VECTORS * W else 2 * GROUP_VECTORS
    return n_vectors if step == 4 and 2 * k <= n_vectors * W and 2 * n_vectors * W <= n else 0


@inline
def _candidates_by_groups(found, x, n, k, keys, groups, n_vectors):
    """Collects in `found` the words of those floats that may be among the k largest; returns their number."""
    _descending_keys(x, keys, n // W)
    for i in range(n // W * W, n):
        st_i32(keys + 4 * i, types.int32(_key(x + 4 * i, True)))
    whole, n_groups = _fill_up(keys, n), n_vectors * W
    ranks, limit = groups + 4 * n_groups, types.int64(0)
    _least_of_groups(keys, whole // W, groups, n_vectors)
    _ranks(groups, n_groups, ranks)
    for i in range(n_groups):
        limit = types.int64(ld_i32(groups + 4 * i)) if ld_i32(ranks + 4 * i) == k - 1 else limit
    m = 0
    for i in range(0, whole, W):
        if _any_up_to(keys + 4 * i, limit):
            for j in range(i, i + W):
                key = types.int64(ld_i32(keys + 4 * j))
                st_i64(found + 8 * m, key + (1 << 31) << 31 | j)
                m += key <= limit
    return m


@inline
def _sort_few(to, x, step, n, k, descending, keys, ranks):
    """Write the first k of few floats, by n^2 comparisons."""
    for i in range(n):
        st_i32(keys + 4 * i, types.int32(_key(x + i * step, descending)))
    _ranks(keys, _fill_up(keys, n), ranks)
    for i in range(n):
        place = ld_i32(ranks + 4 * i)
        if place < k:
            st_i32(to + 4 * place, types.int32(i))


@inline
def _sort_many(to, x, step, n, k, descending, n_vectors, counts, words, spare):
    """Write the first k of any number of floats; if k is small, only candidates for them are sorted."""
    m, w, s = n, words, spare
    if n_vectors > 0:
        m, w, s = _candidates_by_groups(spare, x, n, k, words, counts, n_vectors), spare, words
    else:
        for i in range(n):
            st_i64(words + 8 * i, _key(x + i * step, descending) + (1 << 31) << 31 | i)
        if k < n // 2:
            m, w, s = _candidates(words, spare, counts, n, k), spare, words
    if m > FEW:
        _sorted(w, s, counts, m)
        for i in range(k):
            st_i32(to + 4 * i, types.int32(ld_i64(s + 8 * i) & I32_MAX))
        return
    keys, ranks = s, s + 4 * (m + W)
    for i in range(m):
        st_i32(keys + 4 * i, types.int32((ld_i64(w + 8 * i) >> 31) - (1 << 31)))
    _ranks(keys, _fill_up(keys, m), ranks)
    for i in range(m):
        place = ld_i32(ranks + 4 * i)
        if place < k:
            st_i32(to + 4 * place, types.int32(ld_i64(w + 8 * i) & I32_MAX))


def _work_nbytes(n):
    """Work memory of a thread: counts, two arrays of words; an array holds keys and ranks of as many elements."""
    return 8 * BINS + 16 * (n + 2 * W)


@inline
def _chunk(node, n, nth):
    return max(1, SHORT_CHUNK // max(ne(node + SRC0, 0), 1))


def _make(top):
    @inline
    def rows(node, ith, start, stop):
        a, d = node + SRC0, node + DST
        n, k, step = ne(a, 0), ne(d, 0), nb(a, 0)
        descending = True if top else param(node, 0) == DESC
        counts = work(node) + ith * (8 * BINS + 16 * (n + 2 * W))       # _work_nbytes
        words = counts + 8 * BINS
        spare = words + 8 * (n + 2 * W)
        for r in range(start, stop):
            i1, i2, i3 = row_index(d, r)
            x, to = row_addr(a, i1, i2, i3), row_addr(d, i1, i2, i3)
            if n <= (FEW_TOP if k < n // 2 else FEW):
                _sort_few(to, x, step, n, k, descending, words, spare)
            else:
                _sort_many(to, x, step, n, k, descending, _n_group_vectors(n, k, step) if top else 0, counts, words,
                           spare)
            if top and k > 1:
                first = ld_i32(to)
                st_i32(to, ld_i32(to + 4))
                st_i32(to + 4, first)
        return OK
    return over_chunks(rows, chunking=Chunking(_chunk, next_rows))


def kernel(t, n_threads):
    a, top = t.src[0], t.op == OP.TOP_K
    return Kernel(OP(t.op).name.lower(), lambda: _make(top), cost=n_elements(a) * (3.0 if top else 6.0),
                  work_nbytes=n_threads * _work_nbytes(a.ne[0]))


# ---------------------------------------------------------------- cases
def _rows(inp, shape, ties=1):
    rows = np.stack([inp.rng.permutation(shape[0]) // ties for _ in range(int(np.prod(shape[1:])))])
    return inp.new(F32, shape, (rows - shape[0] // 3).astype(np.float32))


def argsort_cases():
    for order in (ASC, DESC):
        for shape in ((3, 2, 1, 1), (16, 10, 9, 10), (40, 3, 1, 1), (41, 3, 1, 1), (1023, 3, 1, 3), (60, 10, 9, 1),
                      (16384, 2, 1, 1)):
            yield Case(f"{order} {shape}", lambda inp, s=shape, o=order: argsort(_rows(inp, s), o), 0.0)
        yield Case(f"{order} ties", lambda inp, o=order: argsort(_rows(inp, (500, 3), 7), o), 0.0)

        def special(inp, o=order):
            x = np.array([0, -0.0, np.inf, -np.inf, 1e-40, -1e-40, 1, -1], np.float32)
            return argsort(permute(inp.new(F32, (2, 8), np.stack([x, x[::-1]], -1)), 1, 0, 2, 3), o)
        yield Case(f"{order} special", special, 0.0)


def top_cases():
    for n in (1, 2, 12, 64, 75, 1000, 4107, 33333):
        for k in (1, 2, 3, 7, 100, 1023):
            if k <= n:
                yield Case(f"{n} {k}", lambda inp, n=n, k=k: top_k(_rows(inp, (n, 1 + 4000 // n, 1, 1)), k), 0.0)
    yield Case("ties", lambda inp: top_k(_rows(inp, (1000, 4, 3, 1), 10), 100), 0.0)
    x = np.tile(np.array([0, -0.0, np.inf, -np.inf, 1e-40, -1e-40, 1, -1], np.float32), 160)
    yield Case("special", lambda inp: top_k(inp.new(F32, (1280, 2), np.stack([x, x[::-1]])), 100), 0.0)
    yield Case("transposed", lambda inp: top_k(permute(_rows(inp, (6, 1000)), 1, 0, 2, 3), 40), 0.0)


SPECS = (Spec(op=OP.ARGSORT, builders=(argsort, argsort_top_k), reference=reference, kernel=kernel,
              cases=argsort_cases),
         Spec(op=OP.TOP_K, builders=(top_k,), reference=reference, kernel=kernel, cases=top_cases,
              rebuild=lambda n: n.call("top_k", *n.src, n.ne[0])))
