"""The machine code of the hot kernels, read back: the expected instructions are there, per instruction set, and none of
the known ways to lose them.

Each instruction set compiles its kernels in a process of its own; a run draws some.  What counts are innermost loops,
from a label to the jump back to it; a kernel's hot loops are those that hold the first of its expected instructions.
"""
import json
import re

import pytest
from helpers.machine_code import innermost_loops
from helpers.sample import sampled

from ggjit.ops.native import isa

pytestmark = pytest.mark.skipif(not isa.X86, reason="reads x86 assembly")

CODE = """
import json, sys
import ggjit as gg
from ggjit.ops.core.spec import all_specs
from ggjit.ops.matmul import choices
from ggjit.ops.matmul.repack import layouts as repack
from ggjit.ops.native import isa
from ggjit.ops.native.compiler import KernelCompiler
from ggjit.ops.native.jit import FASTMATH
from numba import cfunc, types

ctx = gg.Context()
new = ctx.new_tensor
x = new(gg.F32, (4096, 8))
results = {
    **{f"decode {t.name}": gg.mul_mat(new(t, (4096, 64)), new(gg.F32, (4096, 1)))
       for t in (gg.F16, gg.Q8_0, gg.Q4_0, gg.Q4_K)},
    **{f"prefill {t.name}": gg.mul_mat(new(t, (4096, 64)), new(gg.F32, (4096, 64)))
       for t in (gg.F32, gg.Q8_0, gg.Q4_0)},
    **{f"repacked {t.name} {n}": gg.mul_mat(new(t, (4096, 64)), new(gg.F32, (4096, n)))
       for t in (gg.F32, gg.Q4_0) for n in (1, 64)},
    "rms_norm": gg.rms_norm(x, 1e-5),
    "soft_max": gg.soft_max_ext(x, new(gg.F16, (4096, 8)), 0.5, 0.0),
    "cpy": gg.cpy(x, new(gg.F16, (4096, 8))),
}
name, = sys.argv[1:]
t = results[name]
with choices.forced_amx(False):
    kernel = repack.kernel(t, 2) if name.startswith("repacked") else all_specs()[t.op].kernel(t, 2)
i8 = types.int64
compiled = cfunc(i8(i8, i8, i8, i8), nopython=True, error_model="numpy", fastmath=FASTMATH,
                 pipeline_class=KernelCompiler)(kernel.make())
print(json.dumps([isa.ISA, compiled._library.get_asm_str()]))
"""

# What a hot loop holds, the instruction that marks it first.  Operands as LLVM writes them: sources, destination.
FMA, TO_F32, TO_F16 = r"\tvfn?madd\d+ps\t", r"\tvcvtph2psx?\t", r"\tvcvtps2phx?y?\t"
BYTES_AVX2 = r"\t(vpmaddubsw|vpdpbusd)\t.*%ymm"
EXPECTED = {
    "avx512": {
        "decode f16": (FMA + ".*%zmm", TO_F32 + ".*%zmm"),
        "decode q8_0": (r"\tvpdpbusd\t.*%zmm", FMA + ".*%zmm", TO_F32 + ".*%zmm"),
        "decode q4_0": (r"\tvpdpbusd\t.*%zmm", FMA + ".*%zmm", TO_F32 + ".*%zmm"),
        "decode q4_K": (BYTES_AVX2, r"\tvpmaddwd\t.*%ymm", FMA + ".*%ymm"),         # one body for AVX2 and AVX-512
        "prefill f32": (FMA + ".*%zmm",),
        "prefill q8_0": (r"\tvpdpbusd\t.*%zmm", FMA + ".*%zmm"),
        "prefill q4_0": (r"\tvpdpbusd\t.*%zmm", FMA + ".*%zmm"),
        **{f"repacked f32 {n}": (FMA + ".*%zmm", r"\tprefetcht1\t") for n in (1, 64)},
        **{f"repacked q4_0 {n}": (r"\tvpdpbusd\t.*%zmm", FMA + ".*%zmm") for n in (1, 64)},
        "rms_norm": (FMA + ".*%zmm",),
        "soft_max": (FMA + ".*%zmm", r"\tvmaxps\t.*%zmm", TO_F32 + ".*%zmm"),
        "cpy": (TO_F16 + r".*%[yz]mm",),
    },
    "avx2": {
        "decode f16": (FMA + ".*%ymm", TO_F32 + ".*%ymm"),
        "decode q8_0": (BYTES_AVX2, FMA + ".*%ymm", TO_F32),
        "decode q4_0": (BYTES_AVX2, FMA + ".*%ymm", TO_F32),
        "decode q4_K": (BYTES_AVX2, r"\tvpmaddwd\t.*%ymm", FMA + ".*%ymm"),
        "prefill f32": (FMA + ".*%ymm",),
        "prefill q8_0": (FMA + ".*%ymm",),                                          # unpacked to float32
        "prefill q4_0": (BYTES_AVX2,),
        **{f"repacked f32 {n}": (FMA + ".*%ymm", r"\tprefetcht1\t") for n in (1, 64)},
        "rms_norm": (FMA + ".*%ymm",),
        "soft_max": (FMA + ".*%ymm", r"\tvmaxps\t.*%ymm", TO_F32 + ".*%ymm"),
        "cpy": (TO_F16 + ".*%ymm",),
    },
    # plain LLVM code: whole vectors of whatever the machine has
    "generic": {name: (r"\tv?(fn?madd\d+|mul|add)ps\t",) for name in (
        "decode f16", "decode q8_0", "decode q4_0", "prefill f32", "rms_norm", "soft_max")},
}
MAX_BYTE_INSERTS = 3        # a chain rebuilds a vector from 16 bytes or more
BYTE_INSERT, GATHER, CALL = r"\tv?pinsrb\t", r"\tvp?gather\w+\t", r"\tcall"
SCALAR = r"\tv?(fn?m(add|sub)\d+|mul|add|sub)ss\t"
PACKED = r"\tv?((fn?m(add|sub)\d+|mul|add|sub|max)ps|pdpbusd|pmaddubsw|cvtph2psx?|cvtps2phx?y?)\t"


def count(pattern, lines):
    return sum(re.match(pattern, line) is not None for line in lines)


def faults(asm, expected):
    """What is wrong with a kernel's machine code; an empty list when it is as it should be."""
    lines = asm.splitlines()
    hot = [loop for loop in innermost_loops(lines) if count(expected[0], loop)]
    out = []
    if not any(all(count(p, loop) for p in expected) for loop in hot):
        out.append(f"no innermost loop holds {' and '.join(map(repr, expected))}")
    for what, pattern in (("a call", CALL), ("a gather", GATHER)):
        if any(count(pattern, loop) for loop in hot):
            out.append(f"{what} in a hot loop")
    if any(count(SCALAR, loop) >= count(PACKED, loop) for loop in hot):     # one ends a sum over lanes
        out.append("scalar arithmetic in a hot loop")
    if (n := count(BYTE_INSERT, lines)) > MAX_BYTE_INSERTS:
        out.append(f"{n} byte inserts: overlapping loads were merged")
    return out


@pytest.mark.parametrize("name,kernel", sampled(((name, k) for name, kernels in EXPECTED.items() for k in kernels),
                                                enumerate))
def test_hot_loops_hold_the_expected_instructions(on_isa, name, kernel):
    """Compiled anew: what was loaded from the cache cannot be read back."""
    r = on_isa(name, CODE, kernel)
    assert r.returncode == 0, r.stderr
    used, asm = json.loads(r.stdout)
    assert used == name and faults(asm, EXPECTED[name][kernel]) == []
    if name == "avx2":
        assert not re.search(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b", asm), "more than AVX2"


LOOP = """{before}.LBB0_1:
	vmovups	(%rax), %zmm1
{inside}	vfmadd231ps	(%rax), %zmm1, %zmm0
	jne	.LBB0_1
	retq
"""


@pytest.mark.parametrize("before,inside,fault", [
    ("", "", None),
    ("\tcallq\tsched_yield\n", "", None),                           # outside the loop it may
    ("", "\tcallq\texpf\n", "a call"),
    ("", "\tvgatherdps\t(%rax,%zmm3), %zmm2 {%k1}\n", "a gather"),
    ("", "\tvmulss\t%xmm1, %xmm2, %xmm3\n", "scalar arithmetic"),
    ("\tvpinsrb\t$1, %eax, %xmm1, %xmm1\n" * 16, "", "16 byte inserts"),
    ("", ".LBB0_2:\n\tjne\t.LBB0_2\n", "no innermost loop"),        # the instruction stands in an outer loop only
])
def test_the_inspection_sees_faults(before, inside, fault):
    found = faults(LOOP.format(before=before, inside=inside), (FMA + ".*%zmm",))
    assert [] == found if fault is None else any(f.startswith(fault) for f in found)
