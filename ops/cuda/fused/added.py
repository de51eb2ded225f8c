"""A product of one column and a sum as one kernel: d = a x + y, what flows past a layer, or a bias.

The thread that has a row's product adds y[row] (`Launch.added`): bits are those of the two kernels, and the result may
lie where y lies.
"""
from ggjit.ops.core.fusion_pattern import FusedKernel, Fusion
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import is_contiguous
from ggjit.ops.core.types import F32
from ggjit.ops.cuda.native.launch import Launch, node_kernel, of_module


def _fused(nodes, stored, kernels, n_threads):
    """FusedKernel of a product whose last Launch adds source 2."""
    product, d = nodes
    (a, x), others, last = product.src[:2], [s for s in d.src if s.id != product.id], kernels[0].launches[-1]
    if stored or len(others) != 1 or not isinstance(last, Launch):
        return None
    if not all(t.type is F32 and is_contiguous(t) and t.ne == (a.ne[1], 1, 1, 1) for t in (product, d, *others)):
        return None
    made = last.added()
    if made is None:
        return None
    kernel = node_kernel((*kernels[0].launches[:-1], *of_module((made,), last.module)))
    return FusedKernel(kernel, (a, x, *others), (), tuple(others) if others[0].id != x.id else ())


CUDA_FUSIONS = Fusion((OP.MUL_MAT, OP.ADD), _fused),
