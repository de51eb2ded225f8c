"""The ops that ggml's CUDA backend supports, for `ggjit ops support` to print beside a CUDA device's.

    serves(node) -> bool        of one node; views are always served

The rules are those of ggml_backend_cuda_device_supports_op in ggml/src/ggml-cuda/ggml-cuda.cu (llama.cpp of 2026-11),
for NVIDIA GPUs and the default build (top_k and argsort of any length); flash attention's are those of fattn.cu.
"""
from ggjit.ops.core.record import GLU, OP, UNARY, VIEW_OPS
from ggjit.ops.core.shape import is_contiguous, rows_contiguous
from ggjit.ops.core.types import BF16, BY_NAME, F16, F32, I32, I64
from ggjit.ops.matmul.mul_mat import HINT_SRC0_IS_HADAMARD as HADAMARD

FLOATS = {F32, F16, BF16}
BLOCKS_OF_32 = {BY_NAME[n] for n in "q4_0 q4_1 q5_0 q5_1 q8_0".split()}
K_QUANTS = {BY_NAME[n] for n in "q2_K q3_K q4_K q5_K q6_K".split()}
IQ = {BY_NAME[n] for n in "iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq4_xs".split()}
FEW_BITS = {BY_NAME[n] for n in "q1_0 q2_0".split()}
LEVELS = {BY_NAME[n] for n in "iq4_nl mxfp4".split()}
WEIGHTS = FLOATS | BLOCKS_OF_32 | K_QUANTS | IQ | FEW_BITS | LEVELS | {BY_NAME["nvfp4"]}
ROWS = FLOATS | {I32} | BLOCKS_OF_32 | K_QUANTS | IQ | FEW_BITS
CACHE = FLOATS | BLOCKS_OF_32
HEADS = (40, 64, 72, 80, 96, 112, 128, 256)                     # of keys, and of values as well
SHARED_HEADS = {(192, 128): 8, (320, 256): 32, (512, 512): 1, (576, 512): 1}    # queries that share keys: multiples of
KEYS_STRIDE = 256


def _always(t):
    return True


def _contiguous(*sources):
    return lambda t: all(is_contiguous(t.src[i]) for i in sources)


def _all_f32(t):
    return all(s.type is F32 for s in (t, *t.src) if s is not None)


def _mul_mat(t):
    a, b = t.src[:2]
    turned = t.op is OP.MUL_MAT and int(t.op_params[1]) == HADAMARD and a.type is F32 and b.ne == t.ne
    return (a.nb[0] == a.type.nbytes and b.nb[0] == b.type.nbytes and a.type in WEIGHTS
            and (b.type is not F16 or a.type is F16 or turned))


def _get_rows(t):
    a = t.src[0]
    return a.type in ROWS or (a.type in LEVELS and a.ne[0] % 256 == 0)


def _set_rows(t):
    of = t.src[0].type
    return t.src[1].type in (I32, I64) and (
        (of is F32 and t.type in FLOATS | BLOCKS_OF_32 | {BY_NAME["iq4_nl"]}) or (of is F16 and t.type is F16))


def _cpy(t):
    a, b = t.src[0], t
    pair = a.type, b.type
    return ({*pair} <= FLOATS or (a.type is F32 and b.type in BLOCKS_OF_32 | {BY_NAME["iq4_nl"], I32})
            or (a.type in BLOCKS_OF_32 | {I32} and b.type is F32) or pair == (I32, I32)
            or (a.type is b.type and is_contiguous(a) and is_contiguous(b)))


def _concat(t):
    if t.type.quantized:
        return all(is_contiguous(s) or (int(t.op_params[0]) != 3 and _contiguous_to_3(s)) for s in t.src)
    return all(s.type is t.type for s in t.src) and t.type.nbytes in (1, 2, 4, 8)


def _contiguous_to_3(x):
    """All but the last dimension lie without gaps."""
    return rows_contiguous(x) and x.nb[1] == x.type.row_nbytes(x.ne[0]) and x.nb[2] == x.nb[1] * x.ne[1]


def _binary(t):
    a, b = t.src[:2]
    if BF16 in (a.type, b.type, t.type):
        return a.type is BF16 and t.type is BF16 and b.type in (BF16, F32)
    return all(x.type in (F32, F16) for x in (a, b, t))


def _conv_3d(t):
    a, b = t.src
    return a.type in (F16, F32) and b.type is F32 and t.type is F32 and all(map(is_contiguous, (a, b, t)))


def _sum_rows(t):
    a = t.src[0]
    return a.type is F32 and t.type is F32 and rows_contiguous(a)


def _ssm_scan(t):
    s, a, b = t.src[0], t.src[3], t.src[4]
    if a.ne[0] == 1:
        return s.ne[0] in (96, 128, 256) and s.ne[1] % 16 == 0
    return int(t.op_params[0]) <= 1 and s.ne[0] == 16 and s.ne[1] == 1 and s.ne[2] % 128 == 0 and b.ne[1] == 1


def _flash_attn(t):
    q, k, v, mask = (*t.src, None)[:4]
    heads, ratio = (k.ne[0], v.ne[0]), q.ne[2] // k.ne[2]
    if not {k.type, v.type} <= CACHE or (mask is not None and mask.ne[2] != 1):
        return False
    if heads[0] in HEADS:
        return heads[0] == heads[1]
    shared = (ratio >= 2 and mask is not None and float(t.param_floats[1]) == 0 and k.ne[1] % KEYS_STRIDE == 0
              and all(n % 16 == 0 for x in (q, k, v, mask) if not x.type.quantized for n in x.nb[1:]))
    return shared and heads in SHARED_HEADS and ratio % SHARED_HEADS[heads] == 0


def _indexer(t):
    q, k = t.src[:2]
    return q.ne[0] == 128 and q.ne[1] in (32, 64) and k.type in FLOATS | BLOCKS_OF_32


RULES = {
    OP.UNARY: lambda t: is_contiguous(t.src[0]) and not (
        t.src[0].type is BF16 and UNARY(int(t.op_params[0])) is UNARY.XIELU),
    OP.GLU: lambda t: rows_contiguous(t.src[0]) and not (
        t.src[0].type is BF16 and GLU(int(t.op_params[0])) in (GLU.SWIGLU_OAI, GLU.SWIGLU_CLAMP)),
    **dict.fromkeys((OP.MUL_MAT, OP.MUL_MAT_ID), _mul_mat), OP.OUT_PROD: _all_f32, OP.GET_ROWS: _get_rows,
    OP.GET_ROWS_BACK: lambda t: t.type is F32 and t.src[0].type is F32 and t.ne[2] == 1 and t.ne[3] == 1,
    OP.SET_ROWS: _set_rows, OP.CPY: _cpy, OP.CONCAT: _concat,
    OP.SET: lambda t: t.type in (F32, I32), OP.DUP: _always,
    OP.REPEAT: lambda t: t.src[0].type in (F32, F16),
    OP.REPEAT_BACK: lambda t: t.type is F32 and t.src[0].ne[2] * t.src[0].ne[3] <= 1 << 15,
    OP.CONV_TRANSPOSE_1D: _all_f32, OP.COL2IM_1D: _contiguous(0), OP.SILU_BACK: _all_f32,
    **dict.fromkeys((OP.NORM, OP.RMS_NORM, OP.L2_NORM, OP.SUM), lambda t: rows_contiguous(t.src[0])),
    **dict.fromkeys((OP.RMS_NORM_BACK, OP.GROUP_NORM, OP.ROLL), _contiguous(0)),
    **dict.fromkeys((OP.ADD, OP.SUB, OP.MUL, OP.DIV), _binary), OP.SSM_SCAN: _ssm_scan,
    **dict.fromkeys((OP.SUM_ROWS, OP.MEAN), _sum_rows), OP.CONV_3D: _conv_3d,
    OP.SCALE: lambda t: t.src[0].type in (F32, BF16) and t.type is t.src[0].type,
    OP.SOFT_MAX_BACK: lambda t: float(t.param_floats[1]) == 0,
    OP.SSM_CONV: lambda t: t.src[0].ne[1] % 128 == 0,
    **dict.fromkeys((OP.ROPE, OP.ROPE_BACK), lambda t: rows_contiguous(t.src[0])),
    **dict.fromkeys((OP.IM2COL, OP.IM2COL_3D, OP.CONV_2D, OP.ACC), _contiguous(0, 1)),
    OP.CONV_2D_DW: lambda t: t.src[0].type in (F16, F32) and t.src[1].type is F32,
    OP.FLASH_ATTN_EXT: _flash_attn, OP.LIGHTNING_INDEXER: _indexer,
    **dict.fromkeys((OP.DSV4_HC_COMB, OP.DSV4_HC_PRE, OP.DSV4_HC_POST), _all_f32),
    **{OP[name]: _always for name in """ARGMAX COUNT_EQUAL ADD_ID ADD1 SQR SQRT SIN COS CLAMP LOG CONT
        DIAG_MASK_INF SOFT_MAX CONV_TRANSPOSE_2D POOL_1D POOL_2D TOP_K ARGSORT PAD UPSCALE
        PAD_REFLECT_1D ARANGE
        TIMESTEP_EMBEDDING LEAKY_RELU RWKV_WKV6 GATED_LINEAR_ATTN RWKV_WKV7 GATED_DELTA_NET CROSS_ENTROPY_LOSS
        CROSS_ENTROPY_LOSS_BACK OPT_STEP_ADAMW OPT_STEP_SGD FILL CUMSUM TRI DIAG SOLVE_TRI""".split()}}


def serves(t):
    """Does ggml's CUDA backend compute node `t`?"""
    return t.op in VIEW_OPS or (t.op in RULES and bool(RULES[t.op](t)))
