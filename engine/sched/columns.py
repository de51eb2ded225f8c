"""What the scheduler's jitted passes share: one int64 block of columns, one row per tensor of the graph.

Local numbers take the place of table ids: nodes first, in execution order, then leafs.

    ID      table id                         SIG     row of the support matrix (0: nothing to compute)
    VIEW    local number of the base, NONE   BACKEND index of the backend, -1; lower index = higher priority
    OWN     buffer type of its own buffer    CAUSE, CAUSE_ARG   why (CAUSES below)
    MEM     the same of its base, -1         BITS    flags below
    NBYTES  bytes from first to last element SRC     10 columns: local sources, row-major, -1: none
    SRC_END sources up to the last there is  COPY    10: number of the copy a source is read from, -1: the source itself

Buffer types have numbers too (`Scheduler._buft_index`); READS[b, k] says whether backend b reads buffer type k.
"""
import numpy as np

from ggjit.ops.core.record import MAX_SRC

ID, VIEW, OWN, MEM, NBYTES, SIG, BACKEND, CAUSE, CAUSE_ARG, BITS = range(10)
SRC = 10
COPY = SRC + MAX_SRC
SRC_END = COPY + MAX_SRC
COLUMNS = SRC_END + 1
NONE = -1

# BITS
IS_VIEW_OP, IS_INPUT, IS_WEIGHT, IS_LEAF, IS_PINNED, IS_HOST, IS_COMPUTE = 1, 2, 4, 8, 16, 32, 64
IS_WRITTEN = 128                # a node works in place on it
IS_SHARED = 256                 # ... from another backend than its own
UPDATES = 16                    # bit UPDATES + j of a node: it writes its source j as well (engine/core/versions.py)

# splits: rows of 5 words
S_BACKEND, S_START, S_END, S_INPUT0, S_N_INPUTS = range(5)
SPLIT_WORDS = 5

# statuses of the passes
OK, FOREIGN, NO_BACKEND, BAD_PIN, CANNOT_WRITE = range(5)

(C_NONE, C_USER, C_DST, C_VSRC, C_INPUT, C_WEIGHT, C_OFFLOAD, C_SRC, C_GPU_DOWN, C_GPU_UP, C_REST_DOWN, C_REST_UP,
 C_SRC2, C_BEST, C_UPGRADE, C_FOLLOW_VIEW, C_FOLLOW_NODE, C_FIRST, C_UNSUPPORTED, C_MEMORY, C_BASE,
 C_COST) = range(22)

# (label in ggml's manner, what it means); {} is the number of the source
CAUSES = (
    ("", "not assigned"),
    ("usr", "pinned by the user"),
    ("1.dst", "its memory is already there"),
    ("1.vsrc", "it is a view of memory that is there"),
    ("1.inp", "a graph input: last backend"),
    ("1.wgt{}", "source {} is a weight that lies there"),
    ("1.off", "a large batch: worth moving the weights there"),
    ("1.src{}", "source {} lies there (highest priority, largest)"),
    ("2.gdn", "spread downwards from an accelerator"),
    ("2.gup", "spread upwards from an accelerator"),
    ("2.rdn", "spread downwards"),
    ("2.rup", "spread upwards"),
    ("2.src{}", "source {} was assigned there"),
    ("3.best", "most of its sources can be read there"),
    ("3.upg", "same memory, higher priority"),
    ("4.vsrc", "a view is where its base is"),
    ("4.cur", "first used there"),
    ("5.any", "first backend that supports the op"),
    ("5.sup", "the backend the rules chose does not support the op"),
    ("5.mem", "it writes memory that only this backend can reach"),
    ("5.vsrc", "the rules parted a view from its base"),
    ("6.cost", "moved: fewer bytes to copy"),
)


def cause_text(cause, arg):
    """("1.wgt0", "source 0 is a weight that lies there")"""
    label, text = CAUSES[cause]
    return label.format(arg), text.format(arg)


def column(w, m, k, n=1):
    return w[k * m:(k + n) * m]


def new_work(m):
    return np.empty(COLUMNS * m, np.int64)
