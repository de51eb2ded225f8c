"""Kernels for ARM processors, on any machine: hot loops hold NEON's instructions and spill nothing, and what those
instructions mean gives the right numbers.

That a processor has them, and means the same, is checked on one, or where it is emulated (.ci/aarch64).
"""
import re

import pytest
from helpers.paths import TESTS_PATH
from helpers.processes import python
from helpers.sample import rank, sampled

from ggjit.ops.core import machine, settings
from ggjit.ops.core.errors import ParamError
from ggjit.ops.native import isa
from ggjit.tools.arm_code import assemblies

SDOT, FMA = r"\tsdot\tv\d+\.4s, v\d+\.16b", r"\tfmla\tv\d+\.4s"
FMA_LANE, SDOT_LANE = FMA + r", v\d+\.4s, v\d+\.s\[\d\]", SDOT + r", v\d+\.4b\[\d\]"
BYTES = {"neon": r"\tsmull2?\tv\d+\.8h", "neon-v8.2": SDOT, "neon-v8.4": SDOT, "neon-v8.6": SDOT}
F16 = {"neon": r"\tfcvtl2?\t", "neon-v8.2": r"\tfcvtl2?\t", "neon-v8.4": r"\tfmlal2?\t", "neon-v8.6": r"\tfmlal2?\t"}
BF16 = {"neon": r"\tshll2?\t|\tushll2?\t", "neon-v8.2": r"\tshll2?\t", "neon-v8.4": r"\tshll2?\t",
        "neon-v8.6": r"\tbfdot\t"}
ALL = {level: {
    "f32:1": (FMA,), "f16:1": (F16[level],), "bf16:1": (BF16[level],),
    **{f"{name}:1": (BYTES[level],) for name in ("q8_0", "q4_0", "q5_1", "q4_K", "q6_K", "q2_K", "tq2_0", "q1_0")},
    **{f"{name}:1": (BYTES[level], r"\ttbl\t") for name in ("iq4_nl", "iq4_xs", "mxfp4", "nvfp4")},
    "f32:64": (FMA_LANE,), "repacked-f32:8": (FMA_LANE,),
    **({f"{name}:{n}": (r"\tsmmla\t" if level == "neon-v8.6" else SDOT_LANE,) for name, n in (
        ("q4_0", 64), ("q8_0", 64), ("q4_K", 64), ("iq2_s", 17))} if level != "neon" else {}),
    **({f"repacked-{name}:{n}": (r"\tsmmla\t" if (level, n) == ("neon-v8.6", 64) else SDOT_LANE,) for name, n in (
        ("q4_0", 1), ("q4_0", 64), ("q8_0", 3), *((f"q{n}_K", 1) for n in (2, 3, 4, 5, 6)), ("q6_K", 64)
    )} if level != "neon" else {}),
} for level in BYTES}
DRAWN = sampled([(level, name) for level, names in ALL.items() for name in names],
                lambda case: [(case[0], *ALL[case[0]][case[1]])],
                lambda case: case[1:])


def loops(text):
    """Innermost loops: from a label to the jump back to it."""
    lines = text.splitlines()
    at = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"([.\w$]+):", line))}
    spans = []
    for i, line in enumerate(lines):
        jump = re.match(r"\t(?:b\.\w+|cbn?z\t\w+,|tbn?z\t\w+, #\d+,)\s*([.\w$]+)$", re.sub(r"\s*//.*", "", line))
        if jump and at.get(jump[1], i) < i:
            spans.append((at[jump[1]], i))
    inner = [(a, z) for a, z in spans if not any(a <= x and y <= z and (x, y) != (a, z) for x, y in spans)]
    return ["\n".join(lines[a:z + 1]) for a, z in inner]


@pytest.fixture(scope="module")
def code():
    """The drawn products of a level, compiled in one process."""
    made = {}

    def of(level, name):
        if level not in made:
            made[level] = {}
        if name not in made[level]:
            names = [p.values[1] for p in DRAWN if p.values[0] == level and not p.marks]
            made[level] |= assemblies(level, names if name in names else [name])
        return made[level][name][1]
    return of


@pytest.mark.parametrize("level,name", DRAWN)
def test_hot_loops_hold_the_instructions_of_the_level(code, level, name):
    expected = ALL[level][name]
    text = code(level, name)
    hot = [loop for loop in loops(text) if re.search(expected[0], loop)]
    assert hot, f"no loop with {expected[0]}"
    missing = [pattern for pattern in expected if not any(re.search(pattern, loop) for loop in hot)]
    assert not missing
    spilled = [line for loop in hot for line in loop.splitlines() if re.search(r"\t(ldr|str|ldp|stp)\tq.*\[sp", line)]
    assert not spilled


BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_xs")
FLOATS = ("f32", "f16", "bf16")


@pytest.mark.parametrize("level, names", [
    *((level, sorted(BLOCKS, key=rank)[first:first + 2]) for level, first in (("neon-v8.2", 0), ("neon-v8.6", 2))),
    *(pytest.param(level, BLOCKS, marks=pytest.mark.slow) for level in BYTES)])
def test_products_are_right_by_what_the_instructions_mean(tmp_path, level, names):
    """And columns of repacked weights have the same bytes alone, in threes, and in tiles of matrix products."""
    code = f"""
from helpers import neon_anywhere
neon_anywhere.become({level!r})
print(neon_anywhere.wrong({names!r}, (1, 3, 18), repacked={level != "neon"}),
      neon_anywhere.wrong({[*FLOATS[1:], names[0]]!r}, (1, 17), repacked=False))
"""
    r = python(code, PYTHONPATH=TESTS_PATH, timeout=1200, GGJIT_CACHE_DIR=str(tmp_path), GGJIT_CPU="",
               GGJIT_TUNE="off")
    assert r.stdout == "[] []\n", r.stdout + r.stderr


SVE = """
from llvmlite import binding as llvm
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
llvm.get_process_triple = lambda: "aarch64-unknown-linux-gnu"
llvm.get_host_cpu_features = dict
from numba import cfunc, njit, types

@njit
def total(x):
    s = 0.0                             # summed in order: SVE has an instruction for that, NEON none
    for i in range(len(x)):
        s += float(x[i] * x[i])
    return s
{first}
from ggjit.ops.native.compiler import KernelCompiler
from ggjit.ops.native.jit import i64s

def kernel(a, n):
    return total(i64s(a, n))

i8 = types.int64
made = cfunc(types.float64(i8, i8), nopython=True, pipeline_class=KernelCompiler)(kernel)
print(made._library.get_asm_str())
"""


def on_sve(code):
    """Runs code, cross-compiling for a processor with SVE."""
    features = ",".join(f"+{f}" for f in sorted(isa.LEVELS["neon-v8.6"] | {"sve"}))
    return python(code, NUMBA_CPU_NAME="neoverse-v2", NUMBA_CPU_FEATURES=features, GGJIT_CPU="")


def test_kernels_call_functions_that_numba_compiled_on_a_processor_with_sve():
    r = on_sve(SVE.format(first=""))
    assert r.returncode == 0 and re.search(r"\tmadd\t|\tmul\t", r.stdout), (r.returncode, r.stderr[-2000:])
    assert not re.search(r"\bz\d+\.[bhsd]|\tcnt[bhwd]\t|\trdvl\t", r.stdout)


def test_what_was_compiled_for_sve_before_is_refused():
    r = on_sve(SVE.format(first="total.compile((types.Array(types.int64, 1, 'C'),))"))
    assert r.returncode == 1 and "compiled for SVE before ggjit was imported" in r.stderr, r.stderr[-2000:]


def test_what_systems_call_the_features_of_an_arm_processor(monkeypatch):
    monkeypatch.setattr(machine.sys, "platform", "linux")
    graviton3 = 0xBFFFFF | 0x6000 << 64               # no SVE; i8mm and bf16 are in the second word
    monkeypatch.setattr(machine, "_linux_capabilities", lambda: graviton3)
    assert isa.LEVELS["neon-v8.6"] == machine.arm_features() | isa.LEVELS["neon"]
    monkeypatch.setattr(machine, "_linux_capabilities", lambda: 0x119FFF)              # Graviton 2
    assert isa.LEVELS["neon-v8.2"] == machine.arm_features() | isa.LEVELS["neon"]
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    m1 = {"hw.optional.arm.FEAT_DotProd", "hw.optional.arm.FEAT_FP16", "hw.optional.arm.FEAT_FHM",
          "hw.optional.arm.FEAT_LSE", "hw.optional.arm.FEAT_LRCPC"}
    monkeypatch.setattr(machine, "_sysctl", lambda name: b"\1\0\0\0" if name in m1 else b"\0\0\0\0")
    assert isa.LEVELS["neon-v8.4"] == machine.arm_features() | isa.LEVELS["neon"]


def test_an_instruction_set_of_another_architecture_is_refused(monkeypatch):
    other = "avx2" if isa.ARM64 else "neon"
    assert other in settings.ISAS and other not in isa.NAMES
    monkeypatch.setenv("GGJIT_CPU", other)
    with pytest.raises(ParamError, match=f"GGJIT_CPU={other}: this processor supports"):
        isa._choose(isa.HOST_FEATURES)
