"""The record layouts the whole engine agrees on: TENSOR (what a tensor is) and NODE (what a kernel sees).

Everything jitted works on flat int64 memory.  A record is a row of int64 words; this file is the only place that
knows which word means what.

TENSOR: one row of the process-wide tensor table (engine/core/table.py).  Ids take the place of C pointers; -1 is none.

    word   0     1   2      3           4..7  8..11  12..19     20..29  30        31         32      33    34   35..
          type   op  flags  generation  ne    nb     op_params  src     view_src  view_offs  buffer  offs  ctx  spare

NODE: one variable-length row of a plan (engine/graphs/graph_plan.py); a kernel gets the row's byte address.  All of it
is
resolved: addresses instead of ids.

    word   0       1     2        3      4     5          6     7        8      9..15    16..23     24..       34.. ...
           kernel  next  n_tasks  flags  work  work_size  id    info     chunk  (spare)  op_params  dst view   src views
    (word 8, the chunk counter, starts a cache line of its own: every thread hammers it)

A *view* of a tensor inside a NODE is ten words: address, ne[4], nb[4], type.  An absent source has address 0.
"""
import enum

import numpy as np

MAX_DIMS = 4
MAX_SRC = 10
MAX_PARAMS = 16                 # int32 slots, as in ggml
WORD = 8                        # bytes of one int64 word

# ---------------------------------------------------------------- TENSOR
T_TYPE, T_OP, T_FLAGS, T_GEN = 0, 1, 2, 3
T_NE, T_NB = 4, 8
T_PARAMS = 12                   # 8 words = 16 int32 slots
T_SRC = 20
T_VIEW_SRC, T_VIEW_OFFS = 30, 31
T_BUFFER, T_OFFS = 32, 33       # placement of a leaf (or of a tensor placed by hand); buffer -1: not placed
T_CTX = 34
T_WORDS = 40

TENSOR = np.dtype({
    "names": ["type", "op", "flags", "generation", "ne", "nb", "op_params", "src", "view_src", "view_offs",
              "buffer", "offs", "ctx"],
    "formats": ["i8", "i8", "i8", "i8", ("i8", 4), ("i8", 4), ("i4", MAX_PARAMS), ("i8", MAX_SRC), "i8", "i8",
                "i8", "i8", "i8"],
    "offsets": [WORD * w for w in (T_TYPE, T_OP, T_FLAGS, T_GEN, T_NE, T_NB, T_PARAMS, T_SRC, T_VIEW_SRC,
                                   T_VIEW_OFFS, T_BUFFER, T_OFFS, T_CTX)],
    "itemsize": WORD * T_WORDS,
})

# tensor flags, ggml's values
FLAG_INPUT, FLAG_OUTPUT, FLAG_PARAM, FLAG_LOSS, FLAG_COMPUTE = 1, 2, 4, 8, 16

# ---------------------------------------------------------------- NODE
N_KERNEL, N_NEXT, N_TASKS, N_FLAGS, N_WORK, N_WORK_SIZE, N_ID, N_INFO = range(8)
N_CHUNK = 8
N_PARAMS = 16
N_DST = 24
V_ADDR, V_NE, V_NB, V_TYPE = 0, 1, 5, 9
V_WORDS = 10
N_SRC = N_DST + V_WORDS


def node_words(n_src):
    """Length of a NODE row with `n_src` sources, rounded up to whole cache lines (int64 words)."""
    return (N_SRC + V_WORDS * n_src + 7) // 8 * 8


# ---------------------------------------------------------------- statuses a kernel may return
OK = 0
ABORTED = 1                     # the run was cancelled: signal or abort callback
BAD_INDEX = 2                   # a row id, position or expert id out of range; NODE word `info` holds the value
BAD_ARGUMENT = 3                # the kernel was handed a combination it does not know (a bug in supports)


class OP(enum.IntEnum):
    """Graph operations with ggml's numbers (GGML_OP_*)."""
    (NONE, DUP, ADD, ADD_ID, ADD1, ACC, SUB, MUL, DIV, SQR, SQRT, LOG, SIN, COS, SUM, SUM_ROWS, CUMSUM, MEAN, ARGMAX,
     COUNT_EQUAL, REPEAT, REPEAT_BACK, CONCAT, SILU_BACK, NORM, RMS_NORM, RMS_NORM_BACK, GROUP_NORM, L2_NORM, MUL_MAT,
     MUL_MAT_ID, OUT_PROD, SCALE, SET, CPY, CONT, RESHAPE, VIEW, PERMUTE, TRANSPOSE, GET_ROWS, GET_ROWS_BACK, SET_ROWS,
     DIAG, DIAG_MASK_INF, DIAG_MASK_ZERO, SOFT_MAX, SOFT_MAX_BACK, ROPE, ROPE_BACK, CLAMP, CONV_TRANSPOSE_1D, IM2COL,
     IM2COL_BACK, IM2COL_3D, COL2IM_1D, CONV_2D, CONV_3D, CONV_2D_DW, CONV_TRANSPOSE_2D, POOL_1D, POOL_2D,
     POOL_2D_BACK, UPSCALE, PAD, PAD_REFLECT_1D, ROLL, ARANGE, TIMESTEP_EMBEDDING, ARGSORT, TOP_K, LEAKY_RELU, TRI,
     FILL, FLASH_ATTN_EXT, FLASH_ATTN_BACK, SSM_CONV, SSM_SCAN, WIN_PART, WIN_UNPART, GET_REL_POS, ADD_REL_POS,
     RWKV_WKV6, GATED_LINEAR_ATTN, RWKV_WKV7, SOLVE_TRI, GATED_DELTA_NET, LIGHTNING_INDEXER, DSV4_HC_COMB, DSV4_HC_PRE,
     DSV4_HC_POST, UNARY, MAP_CUSTOM1, MAP_CUSTOM2, MAP_CUSTOM3, CUSTOM, CROSS_ENTROPY_LOSS, CROSS_ENTROPY_LOSS_BACK,
     OPT_STEP_ADAMW, OPT_STEP_SGD, GLU) = range(101)


def own_op(name):
    """The member of OP of an op that ggml does not have: the same for the same name, numbered behind ggml's in the
    order of the first calls.  The same op files give the same numbers."""
    if name not in OP.__members__:
        op = int.__new__(OP, len(OP))
        op._name_, op._value_ = name, len(OP)
        setattr(OP, name, op)
        OP._member_map_[name] = OP._value2member_map_[op._value_] = op
        OP._member_names_.append(name)
    return OP[name]


class UNARY(enum.IntEnum):
    """Elementwise functions of OP.UNARY, in op_params[0] (GGML_UNARY_OP_*)."""
    (ABS, SGN, NEG, STEP, TANH, ELU, RELU, SIGMOID, GELU, GELU_QUICK, SILU, HARDSWISH, HARDSIGMOID, EXP, EXPM1,
     SOFTPLUS, GELU_ERF, XIELU, FLOOR, CEIL, ROUND, TRUNC) = range(22)


class GLU(enum.IntEnum):
    """Gated units of OP.GLU, in op_params[0] (GGML_GLU_OP_*)."""
    REGLU, GEGLU, SWIGLU, SWIGLU_OAI, GEGLU_ERF, GEGLU_QUICK, SWIGLU_CLAMP = range(7)


VIEW_OPS = frozenset({OP.NONE, OP.RESHAPE, OP.VIEW, OP.PERMUTE, OP.TRANSPOSE})   # nothing to compute
