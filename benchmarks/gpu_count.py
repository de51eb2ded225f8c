"""What kernels could reach on an H100 if nothing but instructions took time: counted in machine code, without a card.

    pip install nvidia-cuda-nvdisasm            or an nvdisasm on PATH
    GGJIT_CACHE_DIR=.gpu_cache python -m benchmarks.gpu_count [--only stream few warpgroups attention]

The loop that multiplies is found in each kernel; of one turn of it a warp takes

    issue       instructions / 4                            four of a multiprocessor in a cycle
    multiply    multiplications / those of a cycle          wgmma 2048, mma 1024, dp4a 256
    shared      bytes / 128                                 what loads, stores, copies and wgmma move
    memory      bytes of weights or keys / bandwidth        of one column's products and of one query

cycles of a multiprocessor, of which the most is the bound.  What a loop has for its ends counts as well, waits count
nothing: no kernel is faster than its bound, how much slower it is only a card says.
"""
import argparse
import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile

import ggjit as gg
from benchmarks.gpu_estimate import H100
from benchmarks.gpu_piped import piping
from ggjit.cuda import libraries
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.eights import EIGHTS

K, M, CC, ISSUED, SHARED_NBYTES = 4096, 4096, (9, 0), 4, 128
LANES_NBYTES = {"": 128, ".64": 256, ".128": 512}       # of a warp, by the width of an access
# measured on an H100: TFLOP/s of cuBLAS and of torch's attention of 512 queries, GB/s of a copy
CUBLAS, SDPA, COPY, TARGET_PRODUCT, TARGET_COPY = 690.0, 51.0, 2994.0, 0.6, 0.85


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a warp does in one turn of a loop: instructions, cycles of a multiprocessor for multiplications, bytes of
    shared memory; multiplications by tensor cores; dp4a instructions."""
    n: int
    multiply: float
    shared: float
    macs: int
    dp4a: int

    def cycles(self):
        return {"issue": self.n / ISSUED, "multiply": self.multiply, "shared": self.shared / SHARED_NBYTES}


# ---------------------------------------------------------------- machine code
def nvdisasm():
    found = shutil.which("nvdisasm")
    if found is None:
        try:
            from nvidia import cuda_nvdisasm
            found = f"{cuda_nvdisasm.__path__[0]}/bin/nvdisasm"
        except ImportError:
            sys.exit("no nvdisasm; pip install nvidia-cuda-nvdisasm")
    return found


def code_of(cubin):
    """[(label or None, instruction)]"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        text = subprocess.run([nvdisasm(), "-c", f.name], capture_output=True, text=True, check=True).stdout
    found, label = [], None
    for line in text.splitlines():
        if named := re.match(r"\s*(\.L_x_\d+):", line):
            label = named.group(1)
        elif at := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            found.append((label, at.group(1)))
            label = None
    return found


def loops(code):
    """Instructions of each loop, from the label to the branch back to it."""
    at = {label: i for i, (label, _) in enumerate(code) if label}
    for i, (_, text) in enumerate(code):
        back = re.search(r"\bBRA\b.*?(\.L_x_\d+)", text)
        if back and at.get(back.group(1), i + 1) <= i:
            yield [x for _, x in code[at[back.group(1)]:i + 1]]


def turn_of(instructions):
    macs = n_dp4a = 0
    multiply = shared = 0.0
    for text in instructions:
        op = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]
        width = next((w for w in (".128", ".64") if w in op), "")
        if hgmma := re.match(r"HGMMA\.64x(\d+)x16", op):
            n = int(hgmma.group(1))
            macs += 16 * n * 16                         # of one of the four warps
            multiply += 16 * n * 16 / H100.wgmma
            shared += n * 16 * 2 / 4                    # the columns, read once for all four
        elif op.startswith("HMMA.16816"):
            macs += 16 * 8 * 16
            multiply += 16 * 8 * 16 / H100.mma
        elif op.startswith("IDP.4A"):
            n_dp4a += 1
            multiply += 32 * 4 / H100.dp4a
        elif op.startswith("LDSM"):
            shared += 128 * int((re.search(r"\.(\d)$", op) or [0, 1])[1])
        elif op.startswith(("LDS", "STS", "LDGSTS")):
            shared += LANES_NBYTES[width]
    return Turn(len(instructions), multiply, shared, macs, n_dp4a)


def busiest(launch):
    """The Turn of the smallest loop that multiplies most."""
    from ggjit.ops.cuda.compiler.build import binary
    turns = [turn_of(x) for x in loops(code_of(binary(launch, CC).cubin))]
    most = max(t.macs + 128 * t.dp4a for t in turns)
    return min((t for t in turns if t.macs + 128 * t.dp4a == most), key=lambda t: t.n)


# ---------------------------------------------------------------- kernels
def _leaf(type, *ne):
    return gg.Context().new_tensor(type, ne)


def _product(type, n, way):
    with piping(libraries.YES):
        return libraries.ways(gg.mul_mat(_leaf(type, K, M), _leaf(gg.F32, K, n)), libraries.HOPPER)[way][-1]


def _attention(type, d, n):
    k = _leaf(type, d, 4096, 8)
    y = gg.flash_attn_ext(_leaf(gg.F32, d, n, 32), k, k, _leaf(gg.F16, 4096, n), 0.1, 0.0, 0.0)
    with piping(libraries.YES):
        return libraries.ways(y, libraries.HOPPER)[libraries.PIPED][0]


def _of_weights(type, n, way):
    """(label, Turn, the bound's rate, unit, target) of a product.  A byte of weights is multiplied n times."""
    turn = busiest(_product(type, n, way))
    if n == 1:
        values = 32 * 64 * turn.dp4a / (24 if BLOCKS[type].mins else 16)        # of two rows, by all lanes
        return f"{type!r}, 1 column", turn, values / type.block * type.nbytes, "GB/s", TARGET_COPY * COPY
    return f"{type!r}, {n} columns", turn, 2 * turn.macs, "TFLOP/s", TARGET_PRODUCT * CUBLAS


def _of_keys(type, d, n):
    turn = busiest(_attention(type, d, n))
    if n == 1:
        keys = turn.macs / (16 * d * 2)                 # of a tile of 16 rows, multiplied by q and by p
        return f"attention {type!r} d={d}, 1 query", turn, keys * 2 * type.row_nbytes(d), "GB/s", TARGET_COPY * COPY
    return f"attention {type!r} d={d}, {n} queries", turn, 2 * turn.macs, "TFLOP/s", SDPA


def line_of(label, turn, amount, unit, target):
    cycles = turn.cycles()
    if unit == "GB/s":
        cycles["memory"] = amount / (H100.bandwidth / (H100.n * H100.clock))
    most = max(cycles, key=cycles.get)
    rate = amount / cycles[most] * H100.n * H100.clock / (1e9 if unit == "GB/s" else 1e12)
    cells = (f"{cycles[x]:,.0f}" if x in cycles else "-" for x in ("issue", "multiply", "shared", "memory"))
    return f"| {label} | {turn.n} | {' | '.join(cells)} | {most}: {rate:,.0f} {unit} | {target:,.0f} | " \
           f"{'within' if rate >= target else '**out of reach**'} |"


KINDS = {"stream": [(_of_weights, t, 1, libraries.PIPED) for t in BLOCKS],
         "few": [(_of_weights, t, 32, libraries.PIPED) for t in EIGHTS],
         "warpgroups": [(_of_weights, t, 512, libraries.WARPGROUPS) for t in EIGHTS],
         "attention": [(_of_keys, t, d, n) for t in (gg.F16, gg.Q8_0, gg.Q4_0) for d in (64, 128) for n in (1, 512)]}


def main():
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    p.add_argument("--only", nargs="*", default=tuple(KINDS), choices=tuple(KINDS))
    print("| kernel | instructions | issue | multiply | shared | memory | bound | target | is the target |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for kind in p.parse_args().only:
        for of, *what in KINDS[kind]:
            print(line_of(*of(*what)), flush=True)


if __name__ == "__main__":
    main()
