"""Moves products of one column that read the same tensor next to each other, so that no barrier separates them.

    visit         h  q  rope q  k  rope k  v        k and v need nothing but h
    together      h  q  k  v  rope q  rope k        three products in one phase (engine/cpu/phases.py)

Their results live a little longer; of one column they are small beside the arena, which longer batches need.
"""
from ggjit.core.table import TABLE
from ggjit.core.versions import written
from ggjit.ops.core.record import T_BUFFER
from ggjit.ops.matmul.one_column import has_bias, is_leaf, is_product


def together(nodes):
    """The nodes, each such product moved up to the first one, with the bias that is added to it."""
    out, groups, last_write, i = [], {}, {}, 0
    while i < len(nodes):
        t = nodes[i]
        if _moves(t):
            unit = nodes[i:i + 1 + any(has_bias(u, t) and _is_placed_later(u) for u in nodes[i + 1:i + 2])]
            first, group = groups.get(t.src[1].id, (i, None))
            if group is None or any(last_write.get(x.base.id, -1) >= first for u in unit for x in u.src):
                groups[t.src[1].id] = i, (group := [])
                out.append(group)
        else:
            unit = nodes[i:i + 1]
            out.append(group := [])
        group += unit
        for u in unit:
            last_write.update((x.id, i) for x in written(u))
        i += len(unit)
    return [t for group in out for t in group]


def _moves(t):
    return is_product(t) and is_leaf(t.src[0]) and _is_placed_later(t)


def _is_placed_later(t):
    """Has it no memory yet?  Memory that it was given may be another tensor's, too."""
    return TABLE.words[t.id, T_BUFFER] < 0
