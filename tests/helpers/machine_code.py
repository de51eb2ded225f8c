"""The final machine code of products, read back: what their busiest loop holds."""
import re

from numba import cfunc, types

import ggjit as gg
from ggjit.ops.matmul import choices
from ggjit.ops.matmul.mul_mat import kernel
from ggjit.ops.native import isa
from ggjit.ops.native.compiler import KernelCompiler
from ggjit.ops.native.jit import FASTMATH

HOT = re.compile(r"\bv(?:fn?madd\w+ps|pdpbusd|pmaddubsw|dpbf16ps)\b")

_LABEL, _JUMP = re.compile(r"(\.L\w+):"), re.compile(r"\tj\w+\t(\.L\w+)")


def innermost_loops(lines):
    """Runs of lines from a label to a later jump to it that hold no other such run."""
    at, loops = {}, set()
    for i, line in enumerate(lines):
        if m := _LABEL.match(line):
            at[m[1]] = i
        elif (m := _JUMP.match(line)) and m[1] in at:
            loops.add((at[m[1]], i))
    return [lines[a:b + 1] for a, b in sorted(loops)
            if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]


def loops(type, n):
    """Basic blocks that multiply, the busiest first, and the whole text: weights of a type times n columns."""
    ctx = gg.Context()
    with choices.forced_amx(False):
        k = kernel(gg.mul_mat(ctx.new_tensor(type, (2048, 512)), ctx.new_tensor(gg.F32, (2048, n))), 1)
    i8 = types.int64
    compiled = cfunc(i8(i8, i8, i8, i8), nopython=True, error_model="numpy", fastmath=FASTMATH,
                     pipeline_class=KernelCompiler)(k.make())
    text = compiled._library.get_asm_str()
    blocks = re.split(r"^[.\w$]+:.*\n|(?<=\n)\tj\w+\s.*\n", text, flags=re.M)
    return sorted((b for b in blocks if len(HOT.findall(b)) >= 4), key=lambda b: (-len(HOT.findall(b)), len(b))), text


def product_faults(type, n):
    """Whole vectors, the right dot, nothing spilled, no load rebuilt byte by byte from an overlapping one: what of it
    does not hold."""
    blocks, text = loops(type, n)
    wide = "zmm" if isa.ISA == "avx512" else "ymm"
    integer = "vpdpbusd" if isa.ISA == "avx512" else "vpmaddubsw"
    # AVX2 has no integer tile for 8-bit codes
    expected = integer if type.quantized and not (isa.ISA == "avx2" and type is gg.Q8_0 and n > 1) else "vfmadd"
    lines = blocks[0].splitlines()
    found = []
    if not any(expected in x and wide in x for x in lines if HOT.search(x)):
        found.append(f"no {expected} of {wide}")
    found += [f"spilled: {x.strip()}" for x in lines if "(%rsp)" in x and wide in x]
    if "vpinsrb" in text:
        found.append("bytes inserted one by one")
    if type is gg.F16 and n == 1 and not re.search(rf"vcvtph2ps.*%{wide}", blocks[0]):
        found.append(f"halves are not converted in {wide}")
    return found
