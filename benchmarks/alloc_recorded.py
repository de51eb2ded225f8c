"""Graphs recorded while llama.cpp ran, with the offsets ggml chose: JSON -> TENSOR records for `plan_graph`.

The files list the tensors of executed nodes.  Two things of ggml's plan are recovered from its offsets:
    - leafs come in the order of their offsets; a gap before `inp_mixed_slots` is an input leaf that was never computed;
    - where the plan had been reserved for a longer context, the mask is followed by a gap: the mask and the
      attention scores were planned that many times larger.
"""
import gzip
import json
import pathlib

import numpy as np

from ggjit.ops.core.record import (
    GLU,
    OP,
    T_BUFFER,
    T_FLAGS,
    T_NB,
    T_NE,
    T_OP,
    T_SRC,
    T_TYPE,
    T_VIEW_OFFS,
    T_VIEW_SRC,
    T_WORDS,
    UNARY,
)

TYPE = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11,
        "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "I32": 26, "I64": 27, "BF16": 30}


def op_number(name):
    name = name.upper()
    for op, names in ((OP.UNARY, UNARY.__members__), (OP.GLU, GLU.__members__)):
        if name in names:
            return int(op)
    return int(OP[name])


def nbytes(r):
    last = sum((n - 1) * b for n, b in zip(r["ne"], r["nb"], strict=True))
    return last + (r["nb"][0] if r["type"] in ("f32", "f16", "i32", "i64") else 0)


class Recorded:
    """.table .nodes .leafs .sizes as plan_graph takes them; .offs: table id -> ggml's offset; .peak: ggml's buffer."""

    def __init__(self, path):
        with gzip.open(path) as f:
            d = json.load(f)
        rows, n = d["tensors"], d["n_nodes"]
        self.name = pathlib.Path(path).name.removesuffix(".json.gz")
        self.peak = d["info"]["compute_buffer_bytes"]
        t = np.zeros((len(rows) + 8, T_WORDS), np.int64)
        t[:, T_SRC:T_SRC + 10] = -1
        t[:, [T_VIEW_SRC, T_BUFFER]] = -1
        for r in rows:
            row = t[r["id"]]
            row[T_TYPE], row[T_OP], row[T_FLAGS] = TYPE[r["type"].upper()], op_number(r["op"]), r["flags"]
            row[T_NE:T_NE + 4], row[T_NB:T_NB + 4] = r["ne"], r["nb"]
            row[T_BUFFER] = -1 if r["where"] == "compute" else 0
            if r.get("view_src") is not None:
                row[T_VIEW_SRC], row[T_VIEW_OFFS] = r["view_src"], r["view_offs"]
            for j, s in enumerate(r.get("src", ())):
                row[T_SRC + j] = -1 if s is None else s
        self.table, self.nodes = t, list(range(n))
        self.offs = {r["id"]: r["offset"] for r in rows if r["where"] == "compute"}
        self._leafs(rows, n)

    def _leafs(self, rows, n):
        placed = sorted((r for r in rows[n:] if r["where"] == "compute" and r.get("view_src") is None),
                        key=lambda r: r["offset"])
        leafs, sizes, pos, longer = [], [], 0, 1
        for r in placed:
            gap = r["offset"] - pos
            if gap and leafs and rows[leafs[-1]]["name"].endswith("kq_mask"):
                longer = 1 + gap // sizes[-1]
                sizes[-1] += gap
            elif gap:
                leafs.append(len(rows))
                sizes.append(gap)
            leafs.append(r["id"])
            sizes.append(nbytes(r))
            pos = r["offset"] + -(-nbytes(r) // 32) * 32
        rest = [r["id"] for r in rows[n:] if r["id"] not in set(leafs)]
        score = [longer if "kq" in r["name"] and not r["name"].startswith("kqv") else 1 for r in rows[:n]]
        self.leafs = leafs + rest
        self.sizes = (np.array([nbytes(r) * s for r, s in zip(rows[:n], score, strict=True)], np.int64),
                      np.array(sizes + [max(nbytes(rows[i]), 0) for i in rest], np.int64))


def recorded(folder):
    """Every recorded graph in a folder."""
    return [Recorded(p) for p in sorted(pathlib.Path(folder).glob("*.json.gz"))]
