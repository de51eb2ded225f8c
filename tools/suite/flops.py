"""How much arithmetic and how many bytes a node takes: for speeds, and to know which references are affordable."""
import math

from ggjit.ops.core.record import OP


def _rows(t):
    return math.prod(t.ne[1:])


def _conv(t):
    """Each output: the whole kernel over all input channels (the depthwise one: its own channel)."""
    kernel = t.src[0]
    return 2 * math.prod(t.ne) * math.prod(kernel.ne[:3])


FLOPS = {
    OP.MUL_MAT: lambda t: 2 * math.prod(t.ne) * t.src[0].ne[0],
    OP.MUL_MAT_ID: lambda t: 2 * math.prod(t.ne) * t.src[0].ne[0],
    OP.OUT_PROD: lambda t: 2 * math.prod(t.ne) * t.src[0].ne[1],
    OP.CONV_2D: _conv,
    OP.CONV_2D_DW: lambda t: 2 * math.prod(t.ne) * math.prod(t.src[0].ne[:2]),
    OP.CONV_3D: lambda t: 2 * math.prod(t.ne) * math.prod(t.src[0].ne[:3]) * int(t.op_params[9]),
    OP.CONV_TRANSPOSE_1D: lambda t: 2 * math.prod(t.src[0].ne) * t.src[1].ne[0],
    OP.CONV_TRANSPOSE_2D: lambda t: 2 * math.prod(t.src[0].ne) * t.src[1].ne[0] * t.src[1].ne[1] * t.src[1].ne[3],
    OP.FLASH_ATTN_EXT: lambda t: 2 * _rows(t.src[0]) * (t.src[0].ne[0] + t.src[2].ne[0]) * t.src[1].ne[1],
    OP.SOLVE_TRI: lambda t: t.src[0].ne[0] * (t.src[0].ne[0] + 1) * t.ne[0] * t.ne[2] * t.ne[3],
    OP.LIGHTNING_INDEXER: lambda t: ((2 * t.src[0].ne[0] + 2) * t.src[0].ne[1] + 1) * math.prod(t.ne),
    OP.SSM_SCAN: lambda t: 6 * math.prod(t.src[1].ne) * t.src[0].ne[0],
    OP.RWKV_WKV6: lambda t: 6 * math.prod(t.src[0].ne) * t.src[0].ne[0],
    OP.RWKV_WKV7: lambda t: 8 * math.prod(t.src[0].ne) * t.src[0].ne[0],
    OP.GATED_LINEAR_ATTN: lambda t: 6 * math.prod(t.src[0].ne) * t.src[0].ne[0],
    OP.GATED_DELTA_NET: lambda t: 8 * math.prod(t.src[2].ne) * t.src[0].ne[0],
}


def flops(t):
    """Floating point operations of a node; one per element where no formula is given."""
    return FLOPS[t.op](t) if t.op in FLOPS else math.prod(t.ne)


def counted(t):
    """Is the node's speed given in FLOPS (else in bytes per second)?"""
    return t.op in FLOPS


def touched(t):
    """Bytes of the result and its sources."""
    return t.nbytes + sum(s.nbytes for s in t.src if s is not None)
