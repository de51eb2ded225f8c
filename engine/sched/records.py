"""The records that the scheduler's jitted passes share: one for each tensor, and one for the parameters.

Local numbers take the place of table ids: nodes first, in execution order, then leafs.  Buffer types have numbers too
(`Support.buft_index`), and lower numbers of backends have higher priority.

    PARAMS    address of rows, counts, options, what devices support, room for splits ...
       |
       rows   ROW of tensor 0 | ROW of tensor 1 | ...        a pass gets the address of PARAMS and opens it
"""
import collections

import numpy as np
from numba import from_dtype

from ggjit.ops.core.record import MAX_SRC
from ggjit.ops.native.jit import address_of, array_maker, i64s, inlined, u8s

NONE = -1


def _record(*fields):
    return np.dtype([(f, "i8") if isinstance(f, str) else (f[0], "i8", f[1]) for f in fields])


ROW = _record(
    "id",                       # table id
    "view",                     # local number of the base, NONE
    "own",                      # number of its own buffer's type, or NONE
    "mem",                      # number of its base's buffer type, or NONE
    "nbytes",                   # from the first to the last element
    "sig",                      # row of the support matrix (0: nothing to compute)
    "backend",                  # number of the backend, NONE
    "cause", "cause_arg",       # why it runs there (engine/sched/causes.py)
    "bits",                     # flags below
    "src_end",                  # sources up to the last there is
    ("src", MAX_SRC),           # local numbers of the sources, NONE
    ("copy", MAX_SRC))          # number of the copy a source is read from, NONE: the source itself
SPLIT = _record("backend", "start", "end", "input0", "n_inputs")
COPY = _record("src", "backend", "split", "kind")
USE = _record("split", "copy", "refresh")       # refresh: the original was written since the copy was made

# COPY.kind: memory reused after the last use, or held between runs
TRANSIENT, KEPT = 0, 1

# ROW.bits
IS_VIEW_OP, IS_INPUT, IS_WEIGHT, IS_LEAF, IS_PINNED, IS_HOST, IS_COMPUTE = 1, 2, 4, 8, 16, 32, 64
IS_WRITTEN = 128                # a node works in place on it
IS_SHARED = 256                 # ... from another backend than its own
UPDATES = 16                    # bit UPDATES + j of a node: it writes its source j as well (engine/core/versions.py)

ADDRESSES = ("table", "rows", "buft_of", "reads", "homes", "support", "offload", "snapshot", "buft_ids", "splits",
             "inputs", "copies", "uses", "scratch")
PARAMS = _record(
    *ADDRESSES,
    "n", "n_nodes",             # tensors, of these nodes
    "n_backends", "n_bufts", "n_instances", "rule", "op_offload", "keep_weights",
    "n_splits", "n_inputs", "n_copies", "n_uses", "listed_nbytes",          # results of `split`
    "failed", "missing")        # local number of the tensor a pass failed at; table id of what it needs

# statuses of the passes
OK, FOREIGN, NO_BACKEND, BAD_PIN, CANNOT_WRITE = range(5)

_FIELD = {name: i for i, name in enumerate(PARAMS.names)}

# what jitted code sees of PARAMS: arrays in place of addresses.  buft_of[b]: buffer type that backend b computes in;
# reads[b, k]: backend b reads buffer type k; homes[k]: backend that a buffer of type k belongs to; support, offload:
# uint8 [signature, b]; snapshot[b]: inputs are copied for b so that the user may overwrite them; buft_ids[b]: number of
# the memory that b computes in
Opened = collections.namedtuple("Opened", (*ADDRESSES, "n", "n_nodes", "n_backends", "n_bufts", "n_instances", "rule",
                                           "op_offload", "keep_weights", "results"))
_params, _rows, _splits, _copies, _uses = (array_maker(from_dtype(d)) for d in (PARAMS, ROW, SPLIT, COPY, USE))
_ANY = 1 << 40                  # used as length of an array whose real length the passes know


@inlined
def opened(address):
    """PARAMS at the address; `.results[0]` is the record itself, to be written."""
    p = _params(address, 1)
    x = p[0]
    return Opened(i64s(x.table, _ANY), _rows(x.rows, _ANY), i64s(x.buft_of, _ANY), i64s(x.reads, _ANY),
                  i64s(x.homes, _ANY), u8s(x.support, _ANY), u8s(x.offload, _ANY), i64s(x.snapshot, _ANY),
                  i64s(x.buft_ids, _ANY), _splits(x.splits, _ANY), i64s(x.inputs, _ANY), _copies(x.copies, _ANY),
                  _uses(x.uses, _ANY), i64s(x.scratch, _ANY), x.n, x.n_nodes, x.n_backends, x.n_bufts, x.n_instances,
                  x.rule, x.op_offload, x.keep_weights, p)


class Params:
    """PARAMS in memory: fields are set and read by name, the passes get `words`.  The caller holds the arrays whose
    addresses it has."""

    def __init__(self, **values):
        self.words = np.zeros(len(PARAMS), np.int64)
        self.set(**values)

    def set(self, **values):
        for name, x in values.items():
            if isinstance(x, np.ndarray):               # records as words: NumPy takes 50 us for their interface
                x = address_of(x if x.dtype.names is None else x.view(np.int64))
            self.words[_FIELD[name]] = x

    def __getitem__(self, name):
        return int(self.words[_FIELD[name]])


# ---------------------------------------------------------------- of one tensor
@inlined
def base_of(g, i):
    """Local number of the tensor that i is a view of, or i."""
    return g.rows[i].view if g.rows[i].view >= 0 else i


@inlined
def set_backend(g, i, b, cause, arg):
    g.rows[i].backend = b
    g.rows[i].cause = cause
    g.rows[i].cause_arg = arg


@inlined
def supports(g, i, b):
    """Can backend b compute node i?"""
    return g.support[g.rows[i].sig * g.n_backends + b] != 0


@inlined
def can_read(g, b, k):
    """Can backend b read memory of buffer type k?"""
    return g.reads[b * g.n_bufts + k] != 0


@inlined
def memory_of(g, i):
    """Number of the buffer type tensor i lies in, or will lie in; -1 while undecided."""
    if g.rows[i].mem >= 0:
        return g.rows[i].mem
    b = g.rows[i].backend
    if b < 0 and g.rows[i].view >= 0:
        b = g.rows[g.rows[i].view].backend
    return g.buft_of[b] if b >= 0 else -1


@inlined
def updated(g, i, j):
    """Local number of the base of source j if node i writes that as well, -1."""
    if g.rows[i].bits >> (UPDATES + j) & 1 == 0:
        return -1
    return base_of(g, g.rows[i].src[j])
