"""Which backend runs which node: the rules of three ggml versions as jitted passes over the records.

    2023     November 2023: location of the destination, of the sources, nothing else
    2024     early 2024: weights decide; accelerators spread up, then down; then the rest
    modern   current ggml: as 2024 with supports_op at every step, inputs last, offloading, upgrades

Every assignment keeps its cause.  What the rules leave undone, engine/sched/repair.py makes computable.
"""
from ggjit.ops.core.record import MAX_SRC, OP, T_OP, T_WORDS
from ggjit.ops.native.jit import inlined, native
from ggjit.sched import causes
from ggjit.sched import records as rec
from ggjit.sched.records import can_read, memory_of, opened, set_backend, supports
from ggjit.sched.repair import repair

OP_ROPE, OP_FLASH = int(OP.ROPE), int(OP.FLASH_ATTN_EXT)
RULES = {"2023": 0, "2024": 1, "modern": 2}


# ---------------------------------------------------------------- 2023
@inlined
def _home_2023(g, i):
    """Backend of the tensor's own buffer (ggml_get_backend)."""
    return g.homes[g.rows[i].own] if g.rows[i].own >= 0 else -1


@inlined
def _assign_2023(g):
    for i in range(g.n_nodes, g.n):
        if g.rows[i].backend < 0:
            if _home_2023(g, i) >= 0:
                set_backend(g, i, _home_2023(g, i), causes.DST, 0)
            elif g.rows[i].mem >= 0:
                set_backend(g, i, g.homes[g.rows[i].mem], causes.VSRC, 0)
    for step in range(2):                               # pass 1 assigns by buffers, pass 2 by the backends of sources
        for i in range(g.n_nodes):
            if g.rows[i].backend >= 0:
                continue
            if step == 0 and _home_2023(g, i) >= 0:
                set_backend(g, i, _home_2023(g, i), causes.DST, 0)
                continue
            if step == 0 and g.rows[i].mem >= 0 and g.homes[g.rows[i].mem] >= 0:
                set_backend(g, i, g.homes[g.rows[i].mem], causes.VSRC, 0)
                continue
            best, size = g.n_backends, 0
            for j in range(MAX_SRC):
                s = g.rows[i].src[j]
                if s < 0:
                    break
                b = _home_2023(g, s) if step == 0 else g.rows[s].backend
                if 0 <= b < best and g.rows[s].nbytes >= size:
                    best, size = b, g.rows[s].nbytes
                    set_backend(g, i, b, causes.SRC if step == 0 else causes.SRC2, j)
    for i in range(g.n_nodes):
        for j in range(MAX_SRC):
            s = g.rows[i].src[j]
            if s < 0:
                break
            if g.rows[s].backend < 0 and g.rows[i].backend >= 0:
                set_backend(g, s, g.rows[i].backend, causes.FOLLOW_NODE, 0)


# ---------------------------------------------------------------- 2024
@inlined
def _from_current_2024(g, i):
    if g.rows[i].own >= 0 and g.homes[g.rows[i].own] >= 0:
        set_backend(g, i, g.homes[g.rows[i].own], causes.DST, 0)
        return
    if g.rows[i].mem >= 0 and g.homes[g.rows[i].mem] >= 0:
        set_backend(g, i, g.homes[g.rows[i].mem], causes.VSRC, 0)
        return
    for j in range(MAX_SRC):
        s = g.rows[i].src[j]
        if s < 0:
            return
        if g.rows[s].own >= 0 and g.rows[s].bits & rec.IS_WEIGHT:
            set_backend(g, i, g.homes[g.rows[s].own], causes.WEIGHT, j)
            return


@inlined
def _assign_2024(g):
    for i in range(g.n_nodes, g.n):
        if g.rows[i].backend < 0:
            _from_current_2024(g, i)
    for i in range(g.n_nodes):
        if g.rows[i].backend >= 0:
            continue
        _from_current_2024(g, i)
        for j in range(MAX_SRC):
            s = g.rows[i].src[j]
            if s < 0:
                break
            if g.rows[s].backend < 0:
                _from_current_2024(g, s)
    _spread(g, True, True, causes.GPU_UP, False)
    _spread(g, False, True, causes.GPU_DOWN, False)
    _spread(g, True, False, causes.REST_UP, False)
    _spread(g, False, False, causes.REST_DOWN, False)
    _follow(g, False)


# ---------------------------------------------------------------- shared by 2024 and modern
@inlined
def _spread(g, up, only_accelerators, cause, ask):
    """Unassigned nodes take over their neighbour's backend; the last backend does not spread in the first rounds."""
    cur = -1
    for k in range(g.n_nodes):
        i = g.n_nodes - 1 - k if up else k
        if g.rows[i].bits & rec.IS_VIEW_OP:
            continue
        b = g.rows[i].backend
        if b >= 0:
            cur = -1 if only_accelerators and b == g.n_backends - 1 else b
        elif cur >= 0 and (not ask or supports(g, i, cur)):
            set_backend(g, i, cur, cause, 0)


@inlined
def _follow(g, fallback):
    """Views follow their base, unassigned sources their node."""
    for i in range(g.n_nodes):
        if g.rows[i].view >= 0 and g.rows[i].backend < 0:
            set_backend(g, i, g.rows[g.rows[i].view].backend, causes.FOLLOW_VIEW, 0)
        for j in range(g.rows[i].src_end):
            s = g.rows[i].src[j]
            if s < 0 or g.rows[s].backend >= 0:
                continue
            if g.rows[s].view >= 0:
                set_backend(g, s, g.rows[g.rows[s].view].backend, causes.FOLLOW_VIEW, 0)
            else:
                set_backend(g, s, g.rows[i].backend, causes.FOLLOW_NODE, 0)
        if fallback and g.rows[i].backend < 0:
            for b in range(g.n_backends):
                if supports(g, i, b):
                    set_backend(g, i, b, causes.FIRST, 0)
                    break


# ---------------------------------------------------------------- modern
@inlined
def _from_buffer(g, i, op):
    """Highest-priority backend that reads the memory of tensor i and supports node op, -1."""
    k = g.rows[i].mem
    if k >= 0:
        for b in range(g.n_backends):
            if can_read(g, b, k) and supports(g, op, b):
                return b
    return -1


@inlined
def _from_current(g, i):
    b = _from_buffer(g, i, i)
    if b >= 0:
        set_backend(g, i, b, causes.DST if g.rows[i].view < 0 else causes.VSRC, 0)
        return
    if g.rows[i].mem >= 0:                             # no device can run it where it is placed: `repair` decides
        return
    if g.rows[i].bits & rec.IS_INPUT:
        set_backend(g, i, g.n_backends - 1, causes.INPUT, 0)
        return
    op = g.table[g.rows[i].id * T_WORDS + T_OP]
    for j in range(g.rows[i].src_end):
        s = g.rows[i].src[j]
        # rope factors and attention sinks are too small to decide
        if s < 0 or op == OP_ROPE or op == OP_FLASH or not g.rows[s].bits & rec.IS_WEIGHT or g.rows[s].own < 0:
            continue
        b = _from_buffer(g, s, i)
        if g.op_offload and b == g.n_backends - 1 and g.rows[s].bits & rec.IS_HOST:
            for a in range(b):
                if supports(g, i, a) and g.offload[g.rows[i].sig * g.n_backends + a]:
                    set_backend(g, i, a, causes.OFFLOAD, j)
                    return
        if b >= 0:
            set_backend(g, i, b, causes.WEIGHT, j)
        return


@inlined
def _n_readable(g, i, b):
    """(sources backend b can read, sources)"""
    n, total = 0, 0
    for j in range(g.rows[i].src_end):
        s = g.rows[i].src[j]
        if s >= 0:
            total += 1
            k = memory_of(g, s)
            n += k >= 0 and can_read(g, b, k)
    return n, total


@inlined
def _assign_modern(g):
    for i in range(g.n_nodes, g.n):
        if g.rows[i].backend < 0:
            _from_current(g, i)
    for i in range(g.n_nodes):
        if g.rows[i].backend < 0:
            _from_current(g, i)
    _spread(g, False, True, causes.GPU_DOWN, True)
    _spread(g, True, True, causes.GPU_UP, True)
    _spread(g, False, False, causes.REST_DOWN, True)
    _spread(g, True, False, causes.REST_UP, True)
    for i in range(g.n_nodes):
        if g.rows[i].bits & rec.IS_VIEW_OP:
            continue
        b = g.rows[i].backend
        if b < 0:
            most = -1
            for a in range(g.n_backends):
                if supports(g, i, a):
                    n, total = _n_readable(g, i, a)
                    if n > most:
                        most = n
                        set_backend(g, i, a, causes.BEST, 0)
            continue
        for a in range(b):
            if g.buft_of[a] == g.buft_of[b] and supports(g, i, a) and not g.rows[i].bits & rec.IS_PINNED:
                n, total = _n_readable(g, i, a)
                if n == total:
                    set_backend(g, i, a, causes.UPGRADE, 0)
                    break
    _follow(g, True)


@native("i64(i64)")
def assign(params):
    """Backend and cause of every tensor; pins are already there (IS_PINNED).  Returns a status."""
    g = opened(params)
    if g.rule == 0:
        _assign_2023(g)
    elif g.rule == 1:
        _assign_2024(g)
    else:
        _assign_modern(g)
    return repair(g)
