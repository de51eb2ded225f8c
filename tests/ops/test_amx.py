"""Products by AMX on any machine: what the instructions mean gives the right numbers, the machine code for a processor
that has them holds them and spills nothing, and a machine without them says so.

That a processor means the same by them is checked where one is: `ggjit ops test` and .ci/products.
"""
import ctypes
import itertools
import json
import re

import numpy as np
import pytest
from helpers import amx_anywhere as twin
from helpers.machine_code import innermost_loops
from helpers.paths import TESTS_PATH
from helpers.processes import python
from helpers.sample import rank, sampled

from ggjit.ops.core import machine, settings
from ggjit.ops.core.errors import ParamError
from ggjit.ops.native import isa

CODES = ("q8_0", "q4_0", "q4_1", "q5_0", "q4_K", "q5_K", "q6_K", "q3_K", "iq4_nl", "mxfp4")
avx512 = pytest.mark.skipif(isa.ISA != "avx512", reason=f"this processor supports {isa.ISA} at most, tiles AVX-512")
x86 = pytest.mark.skipif(not isa.X86, reason="reads x86 assembly")


# ---------------------------------------------------------------- numbers
WRONG = """
from helpers import amx_anywhere as twin
twin.become()
import numpy as np
import ggjit as gg
from ggjit.cpu import tuning
from ggjit.ops.core.types import BY_NAME
from ggjit.ops.matmul import choices

rng, found = np.random.default_rng(), []
CPU = [gg.init_backend("CPU", n_threads=n) for n in (1, 2)]
REPACKED = next(b for b in CPU[0].device.extra_buffer_types() if b.name == "CPU_REPACK")


def weights(type, shape, where=CPU[0]):
    *_, m, k = shape
    raw = gg.quantize(type, rng.standard_normal(shape).astype(np.float32).reshape(-1, k),
                      imatrix=np.ones(k, np.float32))
    a = gg.Context().new_tensor(type, shape[::-1])
    gg.alloc_ctx_tensors(a.ctx, where)
    a.set_bytes(raw.tobytes())
    return a, gg.dequantize(type, raw, (raw.size // type.row_nbytes(k), k)).astype(np.float64).reshape(shape)


def check(what, y, want, limit=5e-4):
    before = sum(t.products for t in twin.THREADS)
    one, two = (gg.compute(y, backend=cpu).reshape(want.shape) for cpu in CPU)
    if one.tobytes() != two.tobytes():
        found.append(f"{what}: two threads give other bytes")
    if sum(t.products for t in twin.THREADS) == before:
        found.append(f"{what}: not a tile was used")
    error = ((one - want) ** 2).sum() / (want ** 2).sum()
    if not error <= limit:
        found.append(f"{what}: NMSE {error:.1e}")
    return one


def products(name):
    type = BY_NAME[name]
    k = 1280 if type.block > 1 else 1063                # more than two stretches of k; part of a unit
    a, values = weights(type, (41, k))
    for n in (16, 33, 70):
        x = rng.standard_normal((n, k)).astype(np.float32)
        y = gg.mul_mat(a, gg.from_numpy(a.ctx, x))
        got = check(f"{name}, {n} columns", y, x.astype(np.float64) @ values.T)
        with choices.forced_amx(False):
            vectors = gg.compute(y, backend=CPU[0])
        whole = n // 16 * 16                            # AVX-512's tile adds the last columns in another order
        if type.block > 1 and got[:whole].tobytes() != vectors[:whole].tobytes():
            found.append(f"{name}, {n} columns: other bytes than AVX-512's")
    a, values = weights(type, (3, 41, k))
    x, ids = rng.standard_normal((60, 2, k)).astype(np.float32), rng.integers(0, 3, (60, 2)).astype(np.int32)
    y = gg.mul_mat_id(a, gg.from_numpy(a.ctx, x), gg.from_numpy(a.ctx, ids))
    check(f"{name}, experts", y, np.einsum("tuk,tumk->tum", x.astype(np.float64), values[ids]))


def repacked(name):
    type = BY_NAME[name]
    a, values = weights(type, (48, 1280), REPACKED)
    x = rng.standard_normal((33, 1280)).astype(np.float32)
    check(f"{name}, repacked", gg.mul_mat(a, gg.from_numpy(a.ctx, x)), x.astype(np.float64) @ values.T)


def bf16():
    # rows in place, many matrices, columns of another type
    a, values = weights(gg.BF16, (2, 37, 96))
    x = rng.standard_normal((18, 17, 96)).astype(np.float16)
    want = x.astype(np.float64) @ np.repeat(values, 9, 0).swapaxes(-1, -2)
    check("bf16, matrices", gg.mul_mat(a, gg.from_numpy(a.ctx, x)), want)
    x = rng.standard_normal((17, 96)).astype(np.float32)
    a, values = weights(gg.BF16, (37, 96))
    x[3, 5], values[:, 5] = np.nan, values[:, 5]
    got = gg.compute(gg.mul_mat(a, gg.from_numpy(a.ctx, x)), backend=CPU[0])
    if not np.isnan(got[3]).all() or np.isnan(np.delete(got, 3, 0)).any():
        found.append("bf16: NaN did not stay in its column")
    n = sum(t.products for t in twin.THREADS)
    x[3, 5] = 0.5
    exact = gg.compute(gg.mul_mat_set_prec(gg.mul_mat(a, gg.from_numpy(a.ctx, x)), 10), backend=CPU[0])
    if not np.allclose(exact, x.astype(np.float64) @ values.T, rtol=1e-4, atol=1e-4) or n != sum(
            t.products for t in twin.THREADS):
        found.append("bf16: columns that are not rounded went to tiles")


def measured():
    tuning.MATRIX_ROWS, tuning.LENGTHS, tuning.COLUMNS = 32, (512,), 32
    n = sum(t.products for t in twin.THREADS)
    seconds, is_right = tuning.measure_amx(gg.Q8_0, rounds=1, used=iter(range(99)).__next__)
    n = sum(t.products for t in twin.THREADS) - n
    if not is_right or set(seconds) != {{"amx", "vectors"}} or n != 2 * (512 // 32) * 3 * 2:
        found.append(f"measured: {{seconds}}")


{calls}
if any(t.shapes != [(0, 0)] * 8 for t in twin.THREADS):
    found.append("a thread kept its tiles")
print(found + twin.FAULTS[:5])
"""


@avx512
@pytest.mark.parametrize("names", [sorted(CODES, key=rank)[:1], pytest.param(CODES, marks=pytest.mark.slow)])
def test_products_are_right_by_what_the_instructions_mean(tmp_path, names):
    """Of rows as they lie, of experts, of repacked weights; the bytes of AVX-512's tiles.  Of BF16, and as they are
    measured."""
    calls = [*(f"products({name!r})" for name in names), f"repacked({names[0]!r})", "products('bf16')", "bf16()",
             "measured()"]
    code = WRONG.replace("{{", "{").replace("}}", "}").replace("{calls}", "\n".join(calls))
    r = python(code, PYTHONPATH=TESTS_PATH, timeout=1200, GGJIT_CACHE_DIR=str(tmp_path), GGJIT_CPU="", GGJIT_TUNE="off")
    assert r.stdout == "[]\n", r.stdout + r.stderr


def configure(*shapes):
    words = np.zeros(64, np.uint8)
    words[0] = 1
    words[16:32].view(np.uint16)[:len(shapes)] = [nbytes for _, nbytes in shapes]
    words[48:48 + len(shapes)] = [rows for rows, _ in shapes]
    twin.run("ldtilecfg", words.ctypes.data)


@pytest.fixture
def faults(monkeypatch):
    found = []
    monkeypatch.setattr(twin, "FAULTS", found)
    yield found
    twin.run("tilerelease")


def test_what_the_instructions_mean(faults):
    rng = np.random.default_rng()
    x, y = rng.integers(-128, 128, (5, 12)).astype(np.int8), rng.integers(-128, 128, (3, 16)).astype(np.int8)
    sums, start = np.zeros((5, 4), np.int32), rng.integers(-9, 9, (5, 4)).astype(np.int32)
    configure((5, 16), (5, 12), (3, 16))
    for tile, rows in enumerate((start, x, y)):
        twin.run("tileloadd64", tile, rows.ctypes.data, rows.strides[0])
    twin.run("tdpbssd", 0, 1, 2)
    twin.run("tilestored64", 0, sums.ctypes.data, 16)
    for i, j in itertools.product(range(5), range(4)):
        want = int(start[i, j]) + sum(int(x[i, k]) * int(y[k // 4, 4 * j + k % 4]) for k in range(12))
        assert sums[i, j] == want
    a, b = rng.standard_normal((5, 6)).astype(np.float32), rng.standard_normal((3, 8)).astype(np.float32)
    upper = [np.ascontiguousarray((v.view(np.uint32) >> 16).astype(np.uint16)) for v in (a, b)]
    a, b = ((v.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for v in upper)
    for tile, rows in enumerate(upper, 1):
        twin.run("tileloadd64", tile, rows.ctypes.data, rows.strides[0])
    twin.run("tilezero", 0)
    twin.run("tdpbf16ps", 0, 1, 2)
    got = np.zeros((5, 4), np.float32)
    twin.run("tilestored64", 0, got.ctypes.data, 16)
    want = [[sum(a[i, k] * b[k // 2, 2 * j + k % 2] for k in range(6)) for j in range(4)] for i in range(5)]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert faults == []


@pytest.mark.parametrize("shapes, ran, fault", [
    ((), ("tilezero", 0), "tile 0 is not configured"),
    (((4, 64), (4, 16)), ("tdpbssd", 0, 1, 2), "tile 2 is not configured"),
    (((4, 64), (4, 16), (5, 64)), ("tdpbssd", 0, 1, 2), "are multiplied"),
    (((4, 64), (4, 16), (4, 64)), ("tdpbssd", 0, 1, 1), "are multiplied"),
    (((17, 64),), (), "no tile has such a shape")])
def test_the_twin_refuses_what_a_processor_refuses(faults, shapes, ran, fault):
    configure(*shapes)
    if ran:
        twin.run(*ran)
    assert len(faults) == 1 and fault in faults[0]


# ---------------------------------------------------------------- machine code
DRAWN = sampled([*(("tdpbssd", f"{name}:64") for name in (*CODES, "repacked-q4_0", "repacked-q4_K")),
                 ("tdpbf16ps", "bf16:64")], lambda case: [(case[0], "repacked" in case[1])], lambda case: case[1:])


@pytest.fixture(scope="module")
def code():
    """The drawn products, compiled in one process for a Sapphire Rapids."""
    names = [p.values[1] for p in DRAWN if not p.marks]
    made = {}

    def of(name):
        if name not in made:
            features = ",".join(f"+{f}" for f in sorted(isa.LEVELS["avx512amx"]))
            r = python(f"from ggjit.tools.arm_code import compile_products\ncompile_products({[name, *names]!r})",
                       NUMBA_CPU_NAME="sapphirerapids", NUMBA_CPU_FEATURES=features, GGJIT_CPU="avx512amx",
                       timeout=1200)
            assert r.returncode == 0, r.stderr
            made.update(json.loads(r.stdout))
        return made[name]
    return of


@x86
@pytest.mark.parametrize("product,name", DRAWN)
def test_hot_loops_hold_tiles_and_spill_nothing(code, product, name):
    kernel, text = code(name)
    hot = [loop for loop in map("\n".join, innermost_loops(text.splitlines())) if f"\t{product}\t" in loop]
    assert "-amx" in kernel and hot and "vpdpbusd" not in text and "vdpbf16ps" not in text

    def count(loop, instruction):
        return len(re.findall(rf"\t{instruction}\b", loop))
    for loop in hot:
        used = [count(loop, name) for name in ("tileloadd", product, "tilestored")]         # more would be spills
        assert used in ([[4, 4, 0], [3, 2, 0]] if product == "tdpbf16ps" else [[2, 1, 1]])
        assert not re.search(r"ldtilecfg|tilerelease|\tcall", loop)
        assert not re.search(r"\tvmov\w+\t(.*\(%rsp\), %zmm|%zmm\d+, .*\(%rsp\))", loop)
    assert re.search(r"\tldtilecfg\t", text) and re.search(r"\ttilerelease\b", text)


# ---------------------------------------------------------------- machines
def test_levels_have_the_names_that_may_be_asked_for():
    assert {*isa.LEVELS} == {*settings.LEVEL_NAMES, *settings.ISAS} - {"generic"}


@pytest.mark.skipif(isa.HOST_FEATURES >= isa.LEVELS["avx512amx"], reason="this processor supports AMX")
def test_the_level_is_refused_where_a_processor_lacks_it():
    r = python("import ggjit as gg\ngg.compute(gg.scale(gg.tensor([1.0]), 2.0))", GGJIT_CPU="avx512amx")
    assert r.returncode == 1 and "ParamError: GGJIT_CPU=avx512amx: this processor supports" in r.stderr, r.stderr


def test_what_linux_refuses_is_no_level(monkeypatch):
    level, below = isa.LEVELS["avx512amx"], isa.LEVELS["avx512bf16"]
    monkeypatch.delenv("GGJIT_CPU", raising=False)
    monkeypatch.setattr(isa.llvm, "get_host_cpu_features", lambda: {"amx-tile": True})
    monkeypatch.setattr(machine, "tiles_refused", lambda: "Linux does not permit tiles: no")
    assert isa._why_no_tiles(level) == "Linux does not permit tiles: no" and isa._why_no_tiles(below) == ""
    assert isa._level("avx512", level)[0] == "avx512amx" and isa._level("avx512", below)[0] == "avx512bf16"
    monkeypatch.setenv("GGJIT_CPU", "avx512amx")
    monkeypatch.setattr(isa, "WHY_NO_TILES", isa._why_no_tiles(level))
    with pytest.raises(ParamError, match="supports avx512bf16 at most .Linux does not permit tiles: no.; unset"):
        isa._level("avx512", below)
    monkeypatch.setenv("GGJIT_CPU", "avx512bf16")
    monkeypatch.setattr(machine, "tiles_refused", None)             # nothing is asked for
    assert isa._why_no_tiles(level) == "" and isa._level("avx512", level) == ("avx512bf16", below)


@pytest.mark.parametrize("platform, status, said", [
    ("linux", 0, ""), ("linux", -1, "Linux does not permit tiles"), ("darwin", 0, "on Linux alone")])
def test_tiles_are_asked_for_once(monkeypatch, platform, status, said):
    asked = []

    class Libc:
        def syscall(self, *words):
            asked.append([w.value for w in words])
            return status
    monkeypatch.setattr(machine.sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **how: Libc())
    machine.tiles_refused.cache_clear()
    try:
        answers = [machine.tiles_refused() for _ in range(2)]
    finally:
        machine.tiles_refused.cache_clear()
    assert answers[0] == answers[1] and said in answers[0] and bool(answers[0]) == bool(said)
    assert asked == [[158, 0x1023, 18]] * (platform == "linux")
