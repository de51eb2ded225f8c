"""The text of a tensor: its op, its memory, and the values at its corners.

A repr or notebook cell must not fail or change anything: only the few bytes that are shown are read, and values that
cannot be read (no memory, a freed buffer, reused memory, a device that raises) are replaced by the reason.
"""
import math
import os
import sys

import numpy as np

from ggjit.ops.core.errors import GgjitError, StaleHandle
from ggjit.ops.core.printable import printable
from ggjit.ops.core.record import GLU, OP, UNARY
from ggjit.ops.types.quantize import dequantize

EDGE = 3                        # elements shown at each end of a dimension
MAX_STATS_NBYTES = 16 << 20     # larger tensors are not read whole for their minimum and maximum


def label(t):
    """The name of a tensor, or its number as "%12"; "none" for no tensor."""
    return "none" if t is None else printable(t.name) or f"%{t.id}"


def op_name(t, function=None):
    """The op of a tensor in lower case; of OP.UNARY and OP.GLU the function: "silu", "swiglu".

    function: its number, where the tensor may be freed by now.
    """
    functions = {OP.UNARY: UNARY, OP.GLU: GLU}.get(t.op)
    if functions is None or function is None and not t.ctx.alive:   # the row of a freed tensor may belong to another
        return t.op.name.lower()
    return functions(int(t.op_params[0]) if function is None else function).name.lower()


def state(t):
    """Where the data of a tensor lie: "no data", "CPU buffer 3", "freed context", "freed buffer"."""
    if not t.ctx.alive:
        return "freed context"
    try:
        where = t._where()
    except StaleHandle as e:
        return "freed buffer" if "buffer" in str(e) else "freed context"
    if where is None:
        return "no data"
    return f"{where[0].buft.name} buffer {where[0].id}"


def edges(n):
    """The first and last indices below n, with None for those left out between."""
    return list(range(n)) if n <= 2 * EDGE + 1 else [*range(EDGE), None, *range(n - EDGE, n)]


def corner(t):
    """The values at the corners of the first matrix: rows of texts, "..." for what is left out.

    Reads one block per element that is shown.  Errors: those of reading the tensor.
    """
    columns, rows, blocks = edges(t.ne[0]), edges(t.ne[1]), {}

    def value(i0, i1):
        at = (i0 // t.type.block, i1)
        if at not in blocks:
            raw = t._bytes_view(at[0] * t.nb[0] + i1 * t.nb[1], t.type.nbytes)
            blocks[at] = decode(t.type, np.array(raw))
        return value_text(blocks[at][i0 % t.type.block])
    return [["..." if i0 is None or i1 is None else value(i0, i1) for i0 in columns] for i1 in rows]


def decode(type, raw):
    """The values of one block."""
    if type.name == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if type.dtype is not None:
        return raw.view(type.dtype)
    return dequantize(type, raw, (type.block,))


def value_text(x):
    return f"{x:d}" if isinstance(x, np.integer) else f"{float(x):.4g}"


def statistics(t):
    """"min -1, max 2, mean 0.5" of a tensor of scalars of moderate size, with the number of NaN; else ""."""
    # elements, not nbytes: strides of 0 make many elements of few bytes
    if t.type.dtype is None or not 0 < math.prod(t.ne) * t.type.nbytes <= MAX_STATS_NBYTES:
        return ""
    return array_statistics(t.numpy())


def array_statistics(a):
    """The same of an array with elements."""
    bad = int(np.isnan(a).sum()) if a.dtype.kind == "f" else 0
    if bad == a.size:
        return "all NaN"
    with np.errstate(all="ignore"):
        low, high, mean = np.nanmin(a), np.nanmax(a), np.nanmean(a, dtype=np.float64)
    return f"min {value_text(low)}, max {value_text(high)}, mean {value_text(mean)}" + (f", {bad:,} NaN" if bad else "")


def preview(t):
    """(rows of texts, a remark): the corner values, and what they are part of or why there are none."""
    if 0 in t.ne:
        return [], "no elements"
    place = state(t)
    if place in ("no data", "freed context", "freed buffer"):
        return [], place
    try:
        left_out = "" if t.ndim <= 2 else f"[{'0, ' * (t.ndim - 2)}:, :] of shape {t.shape}"
        return corner(t), "; ".join(filter(None, (left_out, statistics(t))))
    except GgjitError as e:
        return [], str(e)
    except Exception as e:      # a third-party buffer may raise anything; the notebook cell is shown all the same
        return [], f"the values cannot be read: {type(e).__name__}: {e}"


def values_text(t):
    """str(t.numpy()); for values that cannot be read, or are too many to be read for a text, the repr."""
    if math.prod(t.ne) * 4 > MAX_STATS_NBYTES or state(t) in ("no data", "freed context", "freed buffer"):
        return repr(t)
    try:
        return str(t.numpy())
    except Exception:           # third-party buffers may raise anything, and str() must not fail
        return repr(t)


def source_line(t):
    """"file.py:12" of the call that made the tensor; in a notebook "In[3]:12", the cell and its line."""
    file, line = t.made_at
    return f"{_cell(file) or os.path.basename(file)}:{line}" if file else ""


def _cell(file):
    """"In[3]" for the file that IPython gives the code of a cell, else None."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda name: None)(file)
    return named[1].removeprefix("Input ") if named else None
