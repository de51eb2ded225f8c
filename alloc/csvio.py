"""Offset problems as CSV, in MiniMalloc's format: columns id, lower, upper, size by name and in any order.

    id,lower,upper,size          lower, upper: half-open steps; size: bytes; ids are any text
    b1,0,3,64                    further columns are ignored; a written file has the column `offset` as well
"""
import csv

import numpy as np

from ggjit.alloc.offsets.planners import plan_offsets
from ggjit.alloc.torch_trace import read_torch_trace
from ggjit.ops.core.errors import BadFile
from ggjit.ops.core.host_memory import oom_guard
from ggjit.ops.core.whole_file import whole_file

COLUMNS = ("id", "lower", "upper", "size")
LIMIT = 1 << 62
SNAPSHOTS = ".json", ".pickle", ".pkl"


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
    rows = csv.reader(lines)
    try:
        header = [h.strip().lstrip("\ufeff").lower() for h in next(rows, [])]
        missing = [c for c in COLUMNS if c not in header]
        if missing:
            raise BadFile(f"line 1: no column {', '.join(missing)}; expected {','.join(COLUMNS)}")
        if len(set(header)) != len(header):
            raise BadFile(f"line 1: a column is named twice: {','.join(header)}")
        at = [header.index(c) for c in COLUMNS]
        ids, table, seen = [], [], {}
        for row in rows:
            line = rows.line_num
            if not row:
                continue
            if len(row) != len(header):
                raise BadFile(f"line {line}: {len(row)} fields, the header has {len(header)}")
            name = row[at[0]].strip()
            lo, hi, size = (_integer(row[k].strip(), c, line) for k, c in zip(at[1:], COLUMNS[1:], strict=True))
            if name in seen:
                raise BadFile(f"line {line}: id {name!r} again, first in line {seen[name]}")
            if lo >= hi:
                raise BadFile(f"line {line}: lower {lo} >= upper {hi}; lifetimes are half-open and not empty")
            if size < 0:
                raise BadFile(f"line {line}: size {size} is negative")
            seen[name] = line
            ids.append(name)
            table.append((lo, hi, size))
    except csv.Error as e:
        raise BadFile(f"line {rows.line_num}: {e}") from None
    a = np.array(table, np.int64).reshape(-1, 3)
    return ids, a[:, 0].copy(), a[:, 1].copy(), a[:, 2].copy()


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


@oom_guard("a problem from a file")
def run_plan_csv(in_path, out_path=None, capacity=None, **search):
    """Plan a CSV file, or a snapshot of PyTorch's allocator (.json, .pickle, .pkl: torch_trace.py), whose result has
    "taken" as well, the bytes of segments that it held; writes out_path (with offsets, also when over capacity),
    returns
    {"peak", "lower_bound", "proved_bound", "fits", "seconds", "nodes", "planner", "n_buffers"}: three times bytes, one
    of "fits", "does not fit", "not found in time", seconds without compiling, nodes of the search.  search: what
    plan_offsets takes (time_limit, node_limit, seed, n_threads).  Errors: BadFile (with line number), those of
    plan_offsets."""
    more = {}
    try:
        if str(in_path).lower().endswith(SNAPSHOTS):
            trace = read_torch_trace(in_path)
            ids, lower, upper, size = trace.ids, trace.lower, trace.upper, trace.size
            more = {"taken": trace.taken}
        else:
            with open(in_path, newline="", encoding="utf-8") as f:
                ids, lower, upper, size = read_problem(f)
    except UnicodeDecodeError as e:
        raise BadFile(f"{in_path}: not text: {e.reason} at byte {e.start}") from None
    except BadFile as e:
        raise (e if str(e).startswith(str(in_path)) else BadFile(f"{in_path}: {e}")) from None
    # no layout can fit; the best one is written all the same
    hopeless = capacity is not None and capacity < max(size, default=0)
    lay = plan_offsets(lower, upper, size, capacity=None if hopeless else capacity, **search)
    if out_path is not None:
        with whole_file(out_path, text=True) as f:
            write_problem(f, ids, lower, upper, size, lay.offsets)
    return {"peak": lay.peak, "lower_bound": lay.lower_bound, "proved_bound": lay.proved_bound,
            "fits": "does not fit" if hopeless else lay.fits, "seconds": lay.seconds, "nodes": lay.nodes,
            "planner": lay.planner, "n_buffers": len(ids), **more}
