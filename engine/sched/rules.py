"""Which backend runs which node: the rules of three ggml versions as jitted passes over the columns.

    2023     November 2023 (rows A12.06, A13.02-A13.08): location of the destination, of the sources, nothing else
    2024     early 2024 (A12.07, A13.05-A13.09): weights decide; accelerators spread up, then down; then the rest
    modern   current ggml (B4): as 2024 with supports_op at every step, inputs last, offloading, upgrades

Every assignment keeps its cause.  What the rules leave undone, engine/sched/repair.py makes computable.
"""
from ggjit.ops.core.record import MAX_SRC, OP, T_OP, T_WORDS
from ggjit.ops.native.jit import i64s, inlined, native, u8s
from ggjit.sched.columns import (
    BACKEND,
    BITS,
    C_BEST,
    C_DST,
    C_FIRST,
    C_FOLLOW_NODE,
    C_FOLLOW_VIEW,
    C_GPU_DOWN,
    C_GPU_UP,
    C_INPUT,
    C_OFFLOAD,
    C_REST_DOWN,
    C_REST_UP,
    C_SRC,
    C_SRC2,
    C_UPGRADE,
    C_VSRC,
    C_WEIGHT,
    COLUMNS,
    ID,
    IS_HOST,
    IS_INPUT,
    IS_PINNED,
    IS_VIEW_OP,
    IS_WEIGHT,
    MEM,
    NBYTES,
    OWN,
    SIG,
    SRC_END,
    VIEW,
)
from ggjit.sched.repair import memory_of, settle
from ggjit.sched.repair import set_backend as _set
from ggjit.sched.repair import source as _src

OP_ROPE, OP_FLASH = int(OP.ROPE), int(OP.FLASH_ATTN_EXT)
RULES = {"2023": 0, "2024": 1, "modern": 2}


# ---------------------------------------------------------------- 2023
@inlined
def _home_2023(w, m, homes, i):
    """Backend of the tensor's own buffer (ggml_get_backend)."""
    return homes[w[OWN * m + i]] if w[OWN * m + i] >= 0 else -1


@inlined
def _assign_2023(w, m, n_nodes, homes, nb):
    for i in range(n_nodes, m):
        if w[BACKEND * m + i] < 0:
            if _home_2023(w, m, homes, i) >= 0:
                _set(w, m, i, _home_2023(w, m, homes, i), C_DST, 0)
            elif w[MEM * m + i] >= 0:
                _set(w, m, i, homes[w[MEM * m + i]], C_VSRC, 0)
    for step in range(2):                               # pass 1: where buffers are; pass 2: where sources went
        for i in range(n_nodes):
            if w[BACKEND * m + i] >= 0:
                continue
            if step == 0 and _home_2023(w, m, homes, i) >= 0:
                _set(w, m, i, _home_2023(w, m, homes, i), C_DST, 0)
                continue
            if step == 0 and w[MEM * m + i] >= 0 and homes[w[MEM * m + i]] >= 0:
                _set(w, m, i, homes[w[MEM * m + i]], C_VSRC, 0)
                continue
            best, size = nb, 0
            for j in range(MAX_SRC):
                s = _src(w, m, i, j)
                if s < 0:
                    break
                b = _home_2023(w, m, homes, s) if step == 0 else w[BACKEND * m + s]
                if 0 <= b < best and w[NBYTES * m + s] >= size:
                    best, size = b, w[NBYTES * m + s]
                    _set(w, m, i, b, C_SRC if step == 0 else C_SRC2, j)
    for i in range(n_nodes):
        for j in range(MAX_SRC):
            s = _src(w, m, i, j)
            if s < 0:
                break
            if w[BACKEND * m + s] < 0 and w[BACKEND * m + i] >= 0:
                _set(w, m, s, w[BACKEND * m + i], C_FOLLOW_NODE, 0)


# ---------------------------------------------------------------- 2024
@inlined
def _from_current_2024(w, m, homes, i):
    if w[OWN * m + i] >= 0 and homes[w[OWN * m + i]] >= 0:
        _set(w, m, i, homes[w[OWN * m + i]], C_DST, 0)
        return
    if w[MEM * m + i] >= 0 and homes[w[MEM * m + i]] >= 0:
        _set(w, m, i, homes[w[MEM * m + i]], C_VSRC, 0)
        return
    for j in range(MAX_SRC):
        s = _src(w, m, i, j)
        if s < 0:
            return
        if w[OWN * m + s] >= 0 and w[BITS * m + s] & IS_WEIGHT:
            _set(w, m, i, homes[w[OWN * m + s]], C_WEIGHT, j)
            return


@inlined
def _assign_2024(w, m, n_nodes, homes, nb, sup):
    for i in range(n_nodes, m):
        if w[BACKEND * m + i] < 0:
            _from_current_2024(w, m, homes, i)
    for i in range(n_nodes):
        if w[BACKEND * m + i] >= 0:
            continue
        _from_current_2024(w, m, homes, i)
        for j in range(MAX_SRC):
            s = _src(w, m, i, j)
            if s < 0:
                break
            if w[BACKEND * m + s] < 0:
                _from_current_2024(w, m, homes, s)
    _spread(w, m, n_nodes, nb, sup, True, True, C_GPU_UP, False)
    _spread(w, m, n_nodes, nb, sup, False, True, C_GPU_DOWN, False)
    _spread(w, m, n_nodes, nb, sup, True, False, C_REST_UP, False)
    _spread(w, m, n_nodes, nb, sup, False, False, C_REST_DOWN, False)
    _follow(w, m, n_nodes, nb, sup, False)


# ---------------------------------------------------------------- shared by 2024 and modern
@inlined
def _spread(w, m, n_nodes, nb, sup, up, only_accelerators, cause, ask):
    """Unassigned nodes take over their neighbour's backend; the last backend does not spread in the first rounds."""
    cur = -1
    for k in range(n_nodes):
        i = n_nodes - 1 - k if up else k
        if w[BITS * m + i] & IS_VIEW_OP:
            continue
        b = w[BACKEND * m + i]
        if b >= 0:
            cur = -1 if only_accelerators and b == nb - 1 else b
        elif cur >= 0 and (not ask or sup[w[SIG * m + i] * nb + cur]):
            _set(w, m, i, cur, cause, 0)


@inlined
def _follow(w, m, n_nodes, nb, sup, fallback):
    """Views follow their base, unassigned sources their node."""
    for i in range(n_nodes):
        if w[VIEW * m + i] >= 0 and w[BACKEND * m + i] < 0:
            _set(w, m, i, w[BACKEND * m + w[VIEW * m + i]], C_FOLLOW_VIEW, 0)
        for j in range(w[SRC_END * m + i]):
            s = _src(w, m, i, j)
            if s < 0 or w[BACKEND * m + s] >= 0:
                continue
            if w[VIEW * m + s] >= 0:
                _set(w, m, s, w[BACKEND * m + w[VIEW * m + s]], C_FOLLOW_VIEW, 0)
            else:
                _set(w, m, s, w[BACKEND * m + i], C_FOLLOW_NODE, 0)
        if fallback and w[BACKEND * m + i] < 0:
            for b in range(nb):
                if sup[w[SIG * m + i] * nb + b]:
                    _set(w, m, i, b, C_FIRST, 0)
                    break


# ---------------------------------------------------------------- modern
@inlined
def _from_buffer(w, m, i, op, reads, n_bufts, nb, sup):
    """Highest-priority backend that reads the memory of tensor i and supports node op, -1."""
    k = w[MEM * m + i]
    if k >= 0:
        for b in range(nb):
            if reads[b * n_bufts + k] and sup[w[SIG * m + op] * nb + b]:
                return b
    return -1


@inlined
def _from_current(t, w, m, i, reads, n_bufts, nb, sup, off, op_offload):
    b = _from_buffer(w, m, i, i, reads, n_bufts, nb, sup)
    if b >= 0:
        _set(w, m, i, b, C_DST if w[VIEW * m + i] < 0 else C_VSRC, 0)
        return
    if w[MEM * m + i] >= 0:                         # placed where nobody can run it: settle decides
        return
    if w[BITS * m + i] & IS_INPUT:
        _set(w, m, i, nb - 1, C_INPUT, 0)
        return
    op = t[w[ID * m + i] * T_WORDS + T_OP]
    for j in range(w[SRC_END * m + i]):
        s = _src(w, m, i, j)
        # rope factors and attention sinks are too small to decide
        if s < 0 or op == OP_ROPE or op == OP_FLASH or not w[BITS * m + s] & IS_WEIGHT or w[OWN * m + s] < 0:
            continue
        b = _from_buffer(w, m, s, i, reads, n_bufts, nb, sup)
        if op_offload and b == nb - 1 and w[BITS * m + s] & IS_HOST:
            for a in range(b):
                if sup[w[SIG * m + i] * nb + a] and off[w[SIG * m + i] * nb + a]:
                    _set(w, m, i, a, C_OFFLOAD, j)
                    return
        if b >= 0:
            _set(w, m, i, b, C_WEIGHT, j)
        return


@inlined
def _n_readable(w, m, i, b, bufts, reads, n_bufts):
    """(sources backend b can read, sources)"""
    n, total = 0, 0
    for j in range(w[SRC_END * m + i]):
        s = _src(w, m, i, j)
        if s >= 0:
            total += 1
            k = memory_of(w, m, bufts, s)
            n += k >= 0 and reads[b * n_bufts + k] != 0
    return n, total


@inlined
def _assign_modern(t, w, m, n_nodes, bufts, reads, n_bufts, nb, sup, off, op_offload):
    for i in range(n_nodes, m):
        if w[BACKEND * m + i] < 0:
            _from_current(t, w, m, i, reads, n_bufts, nb, sup, off, op_offload)
    for i in range(n_nodes):
        if w[BACKEND * m + i] < 0:
            _from_current(t, w, m, i, reads, n_bufts, nb, sup, off, op_offload)
    _spread(w, m, n_nodes, nb, sup, False, True, C_GPU_DOWN, True)
    _spread(w, m, n_nodes, nb, sup, True, True, C_GPU_UP, True)
    _spread(w, m, n_nodes, nb, sup, False, False, C_REST_DOWN, True)
    _spread(w, m, n_nodes, nb, sup, True, False, C_REST_UP, True)
    for i in range(n_nodes):
        if w[BITS * m + i] & IS_VIEW_OP:
            continue
        b = w[BACKEND * m + i]
        if b < 0:
            most = -1
            for a in range(nb):
                if sup[w[SIG * m + i] * nb + a]:
                    n, total = _n_readable(w, m, i, a, bufts, reads, n_bufts)
                    if n > most:
                        most = n
                        _set(w, m, i, a, C_BEST, 0)
            continue
        for a in range(b):
            if bufts[a] == bufts[b] and sup[w[SIG * m + i] * nb + a] and not w[BITS * m + i] & IS_PINNED:
                n, total = _n_readable(w, m, i, a, bufts, reads, n_bufts)
                if n == total:
                    _set(w, m, i, a, C_UPGRADE, 0)
                    break
    _follow(w, m, n_nodes, nb, sup, True)


@native("i64(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64)")
def assign(table, ws, m, n_nodes, rule, bufts, reads, homes, n_bufts, nb, support, offload, op_offload, info):
    """BACKEND and CAUSE of every tensor.  User pins are already there (IS_PINNED, C_USER).

    bufts[b]: buffer type backend b computes in; reads[b, k]; homes[k]: backend a buffer of type k belongs to by the
    rules of 2023 and 2024; support, offload: uint8 [signature, b].
    """
    t, w, bad = i64s(table, 1 << 40), i64s(ws, COLUMNS * m), i64s(info, 2)
    bt, rd, hm = i64s(bufts, nb), i64s(reads, nb * n_bufts), i64s(homes, n_bufts)
    sup, off = u8s(support, 1 << 40), u8s(offload, 1 << 40)
    if rule == 0:
        _assign_2023(w, m, n_nodes, hm, nb)
    elif rule == 1:
        _assign_2024(w, m, n_nodes, hm, nb, sup)
    else:
        _assign_modern(t, w, m, n_nodes, bt, rd, n_bufts, nb, sup, off, op_offload)
    return settle(w, m, n_nodes, bt, rd, n_bufts, nb, sup, bad)
