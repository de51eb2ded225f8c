"""ggml's depth-first visit: the tensors that lead to some results, each after its sources, sources left to right.

    outputs --compiled walk over the table's rows--> ids --TABLE.handles--> tensors

A row that was given back while a handle on it is left (Context.free) may be another tensor's: while there are such
handles, the walk goes over handles, and says whose context was freed.
"""
import numpy as np

from ggjit.core.table import TABLE
from ggjit.ops.core.record import FLAG_PARAM, MAX_SRC, OP, T_FLAGS, T_OP, T_SRC, T_WORDS
from ggjit.ops.native.jit import i64s, native
from ggjit.tensors.tensor import Tensor

_NONE = int(OP.NONE)


@native("i64(i64, i64, i64, i64, i64, i64)")
def walk(table_, outputs_, n_outputs, n_rows, nodes_, leafs_):
    """Rows in the order of the visit: nodes to nodes_, leafs to leafs_, each with room for n_rows; returns
    nodes << 32 | leafs, -1 for an id that is no row."""
    table, outputs = i64s(table_, n_rows * T_WORDS), i64s(outputs_, n_outputs)
    nodes, leafs = i64s(nodes_, n_rows), i64s(leafs_, n_rows)
    seen, path, at = np.zeros(n_rows, np.uint8), np.empty(n_rows, np.int64), np.empty(n_rows, np.int64)
    n_nodes, n_leafs = np.int64(0), np.int64(0)
    for k in range(n_outputs):
        if outputs[k] < 0 or outputs[k] >= n_rows:
            return np.int64(-1)
        if seen[outputs[k]]:
            continue
        seen[outputs[k]] = 1
        path[0], at[0], depth = outputs[k], 0, 0
        while depth >= 0:
            row = path[depth] * T_WORDS
            below = np.int64(-1)
            while at[depth] < MAX_SRC and below < 0:
                s = table[row + T_SRC + at[depth]]
                at[depth] += 1
                if s >= n_rows:
                    return np.int64(-1)
                if s >= 0 and not seen[s]:
                    below = s
            if below >= 0:
                seen[below] = 1
                depth += 1
                path[depth], at[depth] = below, 0
                continue
            if table[row + T_OP] == _NONE and not table[row + T_FLAGS] & FLAG_PARAM:
                leafs[n_leafs] = path[depth]
                n_leafs += 1
            else:
                nodes[n_nodes] = path[depth]
                n_nodes += 1
            depth -= 1
    return n_nodes << 32 | n_leafs


def visit(outputs):
    """(nodes, leafs) of tensors.  Errors: StaleHandle."""
    for y in outputs:
        y._check()
    version = TABLE.strays_version
    if not TABLE.has_strays() and all([y.__class__ is Tensor for y in outputs]):
        n, ids = TABLE.n_rows, np.array([y.id for y in outputs], np.int64)
        nodes, leafs = np.empty(n, np.int64), np.empty(n, np.int64)
        found = walk(TABLE.words, ids, len(ids), n, nodes, leafs)
        if found >= 0:
            handles = TABLE.handles
            both = [[handles[i]() for i in rows.tolist()] for rows in (nodes[:found >> 32], leafs[:found & 0xFFFFFFFF])]
            if version == TABLE.strays_version and {*map(type, both[0]), *map(type, both[1])} <= {Tensor}:
                return tuple(both)              # else one has died, or been freed, meanwhile
    return _visit_handles(outputs)


def _visit_handles(outputs):
    """The same over handles; iterative, since graphs may be deeper than Python's stack."""
    nodes, leafs, seen, cells = [], [], set(), TABLE.cells
    for y in outputs:
        if y.id in seen:
            continue
        seen.add(y.id)
        path, rests = [y], [iter(y.src)]        # tensors on the way down, and the sources each still has to visit
        while path:
            for s in rests[-1]:
                if s is None or s.id in seen:
                    continue
                s._check()
                seen.add(s.id)
                path.append(s)
                rests.append(iter(s.src))
                break
            else:
                t = path.pop()
                rests.pop()
                is_leaf = t.op == _NONE and not cells[t.id * T_WORDS + T_FLAGS] & FLAG_PARAM
                (leafs if is_leaf else nodes).append(t)
    return nodes, leafs
