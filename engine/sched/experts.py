"""Copies experts of mul_mat_id from the host: only those in use, neighbours in one piece.

    ids in use: 1 2 6      weight on the host    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
                           its copy              |   |#######|-          |###|-  |         -: a little padding

As in ggml for a split that starts with the op, but only where no other node reads the copy: another reader of the same
weight would find the experts of the first one's ids (ggml copies for the first reader alone).
"""
import numpy as np

from ggjit.core.buffer import USAGE_WEIGHTS
from ggjit.ops.core.errors import IndexRangeError
from ggjit.ops.core.record import MAX_SRC, OP, VIEW_OPS
from ggjit.ops.core.shape import describe

MAX_PAD_NBYTES = 512            # bytes copied past a run of experts, as in ggml: kernels may read a little further


def expert_ids(assigned, copy, seen):
    """The ids tensor that says which experts of `copy` are needed, or None: all are.  seen: nodes of the split."""
    first = next((t for t in seen if t.op not in VIEW_OPS), None)
    buf = copy.src.buffer
    if first is None or first.op != OP.MUL_MAT_ID or first.src[0] is not copy.dst or buf is None \
            or buf.usage != USAGE_WEIGHTS or not buf.buft.is_host():
        return None
    readers = np.flatnonzero(assigned.rows["copy"] == copy.number)
    nodes = [assigned.tensors[k // MAX_SRC] for k in readers.tolist()]
    if any(t.op != OP.MUL_MAT_ID or t.src[2].id != first.src[2].id for t in nodes) or (readers % MAX_SRC).any():
        return None
    return first.src[2] if len(nodes) == 1 or _last_write(assigned, first.src[2]) < readers[0] // MAX_SRC else None


def _last_write(assigned, t):
    """Number of the last node that writes t's memory in place, -1."""
    return assigned.written[assigned.base_of(assigned.local[t.id])]


def copy_experts(run, copy, ids):
    """Copy the experts in use.  ids: the ids tensor looked up last and its values; returns (bytes copied, ids)."""
    t, src = copy.experts, copy.src
    # if the ids are copied too, the copy is not made yet: the original is read
    for part in run.parts[run.instance]:
        t = next((c.src for c in part.copies if c.dst is t), t)
    if ids is None or ids[0] is not t or _last_write(run.assigned, t) >= 0:
        ids = (t, _values(run, t))
    used, n_expert, size, total = ids[1], src.ne[2], src.nb[2], 0
    if len(used) and not 0 <= used[0] <= used[-1] < n_expert:
        raise IndexRangeError(f"{describe(t)}: expert id {used[0] if used[0] < 0 else used[-1]} is outside "
                              f"0..{n_expert - 1} of {describe(src)}")
    for group in np.split(used, np.flatnonzero(np.diff(used) != 1) + 1) if len(used) else ():
        first, last = int(group[0]), int(group[-1])
        pad = min(size, MAX_PAD_NBYTES) if last < n_expert - 1 else 0
        nbytes = min((last - first + 1) * size + pad, src.nbytes - first * size)
        copy.dst.buffer.set_tensor(copy.dst, src._bytes_view(first * size, nbytes), first * size)
        total += nbytes
    copy.stamp = None                                   # the copy holds these experts only
    return total, ids


def _values(run, t):
    """The distinct ids, sorted, once the backend that computes them is done."""
    run.assigned.backend_of(run.assigned.local[t.id]).synchronize()
    raw = np.frombuffer(t.bytes(), np.uint8)
    return np.unique(np.ndarray((t.ne[1], t.ne[0]), np.int32, raw.data, 0, (t.nb[1], t.nb[0])))
