"""Offset problems as CSV, in MiniMalloc's format: columns id, lower, upper, size by name and in any order.

    id,lower,upper,size          lower, upper: half-open steps; size: bytes; ids are any text
    b1,0,3,64                    more columns are ignored but `offset`: the place in another allocator's plan
"""
import csv
import os

import numpy as np

from ggjit.alloc.ggml_log import read_ggml_log
from ggjit.alloc.offsets.planners import plan_offsets
from ggjit.alloc.onnx_graph import read_onnx
from ggjit.alloc.plots import LayoutPicture, plot
from ggjit.alloc.torch_trace import read_torch_trace
from ggjit.alloc.traces import AllocationTrace, check_places
from ggjit.ops.core.errors import BadFile, ParamError
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.whole_file import whole_file

COLUMNS = ("id", "lower", "upper", "size")
LIMIT = 1 << 62
SNAPSHOTS = tuple(kind + packed for kind in (".json", ".pickle", ".pkl") for packed in ("", ".gz"))
LOGS, ONNX = (".log", ".txt"), ".onnx"


def _integer(text, name, line):
    try:
        value = int(text)
    except ValueError:
        raise BadFile(f"line {line}: {name} {text!r} is not an integer") from None
    if not -LIMIT < value < LIMIT:
        raise BadFile(f"line {line}: {name} {text} does not fit 62 bits")
    return value


def read_problem(lines):
    """(ids, lower, upper, size) from CSV text lines; BadFile names the first bad line."""
    ids, a, _ = _read(lines)
    return ids, a[:, 0].copy(), a[:, 1].copy(), a[:, 2].copy()


def read_csv(lines):
    """The AllocationTrace of CSV text lines; with a column `offset`, `taken` is how far they reach.  Errors: BadFile,
    also for buffers that are live together and share bytes."""
    ids, a, at = _read(lines)
    lower, upper, size, *offsets = a.T.tolist()
    if not offsets:
        return AllocationTrace(ids, lower, upper, size)
    check_places(at, lower, upper, size, offsets[0])
    taken = max((o + z for o, z in zip(offsets[0], size, strict=True)), default=0)
    return AllocationTrace(ids, lower, upper, size, taken, "the file's own plan")


def _read(lines):
    """(ids, an int64 array with columns lower, upper, size and, where there is one, offset; the line of each row)."""
    rows = csv.reader(lines)
    try:
        header = [h.strip().lstrip("\ufeff").lower() for h in next(rows, [])]
        missing = [c for c in COLUMNS if c not in header]
        if missing:
            raise BadFile(f"line 1: no column {', '.join(missing)}; expected {','.join(COLUMNS)}")
        if len(set(header)) != len(header):
            raise BadFile(f"line 1: a column is named twice: {','.join(header)}")
        numbers = [*COLUMNS[1:], *(["offset"] if "offset" in header else [])]
        at = [header.index(c) for c in ("id", *numbers)]
        ids, table, seen = [], [], {}
        for row in rows:
            line = rows.line_num
            if not row:
                continue
            if len(row) != len(header):
                raise BadFile(f"line {line}: {len(row)} fields, the header has {len(header)}")
            name = row[at[0]].strip()
            values = [_integer(row[k].strip(), c, line) for k, c in zip(at[1:], numbers, strict=True)]
            lo, hi, size = values[:3]
            if name in seen:
                raise BadFile(f"line {line}: id {name!r} again, first in line {seen[name]}")
            if lo >= hi:
                raise BadFile(f"line {line}: lower {lo} >= upper {hi}; lifetimes are half-open and not empty")
            if size < 0:
                raise BadFile(f"line {line}: size {size} is negative")
            if values[3:] and values[3] < 0:
                raise BadFile(f"line {line}: offset {values[3]} is negative")
            seen[name] = line
            ids.append(name)
            table.append(values)
    except csv.Error as e:
        raise BadFile(f"line {rows.line_num}: {e}") from None
    return ids, np.array(table, np.int64).reshape(-1, len(numbers)), list(seen.values())


def write_problem(file, ids, lower, upper, size, offsets=None):
    """Write the columns, and `offset` if there are offsets."""
    w = csv.writer(file, lineterminator="\n")
    cols = [ids, *(np.asarray(a).tolist() for a in (lower, upper, size))]
    if offsets is not None:
        cols.append(np.asarray(offsets).tolist())
    w.writerow([*COLUMNS, "offset"][:len(cols)])
    w.writerows(zip(*cols, strict=True))


def defused(cell):
    """A cell that no spreadsheet takes for a formula: text that begins with = + - @ gets an apostrophe; numbers
    stay."""
    if not isinstance(cell, str) or cell[:1] not in ("=", "+", "-", "@"):
        return cell
    try:
        float(cell)
    except ValueError:
        return "'" + cell
    return cell


def read_trace(path, dims=()):
    """The AllocationTrace of a file, which its ending tells (traces.py).  dims: as of read_onnx.  Errors: BadFile."""
    ending = str(path).lower()
    if dims and not ending.endswith(ONNX):
        raise ParamError("--dim is for ONNX graphs (.onnx)")
    try:
        trace = _trace_of(path, ending, dims)
        if sum(trace.size) >= LIMIT:
            raise BadFile(f"its buffers have {sum(trace.size)} bytes in all, which do not fit 62 bits")
        return trace
    except UnicodeDecodeError as e:
        raise BadFile(f"{path}: not text: {e.reason} at byte {e.start}") from None
    except BadFile as e:
        raise (e if str(e).startswith(str(path)) else BadFile(f"{path}: {e}")) from None


def _trace_of(path, ending, dims):
    if ending.endswith(SNAPSHOTS):
        return read_torch_trace(path)
    if ending.endswith(LOGS):
        return read_ggml_log(path)
    if ending.endswith(ONNX):
        return read_onnx(path, dims)
    with open(path, newline="", encoding="utf-8") as f:
        return read_csv(f)


@oom_guard("a problem from a file")
def run_plan_csv(in_path, out_path=None, capacity=None, dims=(), picture=None, **search):
    """Plan a CSV file, a snapshot of PyTorch's allocator, a log of ggml's, or an ONNX graph (traces.py).

    Writes out_path, a CSV with offsets, also when over capacity, and `picture`, the plan as boxes of time and address;
    returns {"peak", "lower_bound", "proved_bound", "fits", "seconds", "nodes", "planner", "n_buffers"}: three times
    bytes, one of "fits", "does not fit", "not found in time", seconds without compiling, nodes of the search; and
    "taken", bytes that were held for these buffers, by "what", where the file says so.
    dims: as of read_onnx.  search: what plan_offsets takes (time_limit, node_limit, seed, n_threads).
    Errors: BadFile (with the line or event), those of plan_offsets."""
    trace = read_trace(in_path, dims)
    ids, lower, upper, size = trace.ids, trace.lower, trace.upper, trace.size
    hopeless = capacity is not None and capacity < max(size, default=0)      # the best layout is written all the same
    lay = plan_offsets(lower, upper, size, capacity=None if hopeless else capacity, **search)
    if out_path is not None:
        with whole_file(out_path, text=True) as f:
            write_problem(f, ids, lower, upper, size, lay.offsets)
    if picture is not None:
        plot(LayoutPicture(lower, upper, size, lay, os.path.basename(in_path)), path=picture, colour="lifetime")
    more = {} if trace.taken is None else {"taken": trace.taken, "what": trace.what}
    return {"peak": lay.peak, "lower_bound": lay.lower_bound, "proved_bound": lay.proved_bound,
            "fits": "does not fit" if hopeless else lay.fits, "seconds": lay.seconds, "nodes": lay.nodes,
            "planner": lay.planner, "n_buffers": len(ids), **more}
