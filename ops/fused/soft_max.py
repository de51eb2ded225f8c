"""scale + mask + soft_max as one kernel: that of soft_max_ext, which has a scale and a mask.

    soft_max(s x + m)  =  soft_max_ext(x, m, s, 0)        to the bit: s x is rounded, then m is added, in both

For graphs that say in three nodes what soft_max_ext says in one.  A scale without a mask is not fused: there the
kernel subtracts the maximum from s x with one rounding.
"""
import types

from ggjit.ops.core.fusion_pattern import FusedKernel, Fusion
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import is_contiguous, rows_contiguous, same_shape
from ggjit.ops.core.types import F16, F32
from ggjit.ops.reductions import soft_max

ONE, NOTHING = 0x3F800000, 0                # float32 bits of 1 and 0


def _is_mask(m, x):
    """A mask as soft_max_ext takes it: one row for each row of x, repeated over heads and sequences."""
    return (m.type in (F16, F32) and is_contiguous(m) and m.ne[:2] == x.ne[:2]
            and x.ne[2] % m.ne[2] == 0 and x.ne[3] % m.ne[3] == 0)


def fused(nodes, stored, kernels, n_threads):
    """FusedKernel of (scale,) add, soft_max over F32 rows; a scale with a bias, a second mask or ALiBi do not fit."""
    *scales, add, d = nodes
    x, mask = scales[0].src[0] if scales else add.src[0], add.src[1]
    plain = len(d.src) == 1 and d.op_params[0] == ONE and d.op_params[1] == NOTHING
    if stored or not plain or any(s.op_params[1] != NOTHING or add.src[0].id != s.id for s in scales):
        return None
    if not all(t.type is F32 and rows_contiguous(t) and same_shape(t, d) for t in (x, *nodes)) or not _is_mask(mask, x):
        return None
    as_one = types.SimpleNamespace(type=F32, ne=d.ne, src=(x, mask))        # the node soft_max_ext would have made
    scale = int(scales[0].op_params[0]) if scales else ONE
    return FusedKernel(soft_max.kernel(as_one, n_threads), (x, mask), (scale, NOTHING), (x,))


FUSIONS = (Fusion((OP.SCALE, OP.ADD, OP.SOFT_MAX), fused), Fusion((OP.ADD, OP.SOFT_MAX), fused))
