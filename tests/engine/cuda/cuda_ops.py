"""Every CUDA kernel in the simulator on the Specs' own small cases, against the NumPy references.  Run by
test_cuda.py; CUDA_CASES=all runs every case that is small enough, else a few of each op."""
import dataclasses
import functools
import itertools
import json
import os
import random
import sys

import numpy as np
import pytest
from helpers.random_blocks import decoded, in_8_bits, random_blocks
from helpers.sample import sampled

import ggjit as gg
from benchmarks import gpu as benchmark
from benchmarks import gpu_report, gpu_suite
from benchmarks.gpu_suite import bound, exact, nmse, on, served
from ggjit.cuda import simulated_driver as cuda_sim
from ggjit.ops.attention import flash_attn
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import Case, Inputs, all_specs
from ggjit.ops.cuda import argsort
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.native.launch import launches, makers
from ggjit.ops.cuda.quantize import QUANTIZE

RNG = np.random.default_rng()
ALL = os.environ.get("CUDA_CASES") == "all"
MAX_WORK = 2000                 # elements, or multiplications / 16: what the simulator does in well under a second
CASES_PER_OP = 6
SLOW = {OP.MUL_MAT: 8, OP.MUL_MAT_ID: 3}       # cases of these, drawn anew in every run, as all are


def small_cases(op):
    """(number, case) of the cases that are small enough and have a kernel; the smallest where none is."""
    found = list(served(op))
    most = MAX_WORK * (3 if op is OP.MUL_MAT else 1)
    return [(i, case) for work, i, case in found if work <= max(most, min(found)[0])]


def check(gpu, case, seed):
    y, sources, got = on(gpu, case, seed)
    want = all_specs()[y.op].reference(y, *sources)
    assert nmse(got, np.reshape(want, got.shape)) <= bound(case, y), f"{case.name} seed {seed}"


@pytest.mark.parametrize("op", [op for op in makers() if op is not OP.TOP_K], ids=lambda op: op.name)
def test_op(gpu, op):
    cases, n = small_cases(op), SLOW.get(op, CASES_PER_OP)
    if not ALL and len(cases) > n:
        cases = random.sample(cases, n)
    assert cases, "no case is small enough"
    for i, case in cases:
        check(gpu, case, 1000 + i)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_top_k(gpu, k):
    x = np.random.default_rng().permutation(40).reshape(2, 20).astype(np.float32)
    ctx = gg.Context()
    a = ctx.new_tensor(gg.F32, (20, 2))
    gg.alloc_ctx_tensors(ctx, gpu)
    a.set(x)
    got = gg.compute(gg.top_k(a, k), backend=gpu)
    np.testing.assert_array_equal(np.sort(got), np.sort(np.argsort(-x, -1)[:, :k]))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
def test_argmax_with_nans_is_the_cpus(gpu, share):
    rng = np.random.default_rng()
    x = rng.integers(-3, 3, (40, 70)).astype(np.float32)
    x[rng.uniform(size=x.shape) < share] = np.nan
    x[:3, 5] = np.inf
    x[3:6] = np.where(np.isnan(x[3:6]), x[3:6], -np.inf)
    got, want = (gg.compute(gg.argmax(gg.from_numpy(gg.Context(), x)), backend=b)
                 for b in (gpu, gg.init_backend("CPU:n_threads=1")))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("options", [dict(kt=gg.Q8_0, d=32, n_kv=40, heads=1, rep=2),
                                     dict(kt=gg.Q4_0, vt=gg.Q8_0, d=32, n_kv=9, heads=2, cap=5.0, sinks=True),
                                     dict(kt=gg.Q5_0, vt=gg.IQ4_NL, d=64, n_kv=9, heads=1),
                                     dict(kt=gg.IQ4_NL, vt=gg.Q5_0, d=32, n_kv=5, heads=1, n=1)], ids=str)
def test_attention_over_a_quantised_cache(gpu, options):
    check(gpu, Case(str(options), flash_attn.make_case(**options), 1e-11), 3)


@pytest.mark.parametrize("options", [
    dict(d=64, n=1, n_kv=40, heads=1, rep=2), dict(kt=gg.Q4_1, vt=gg.Q5_1, d=64, n_kv=33, heads=1, n=1),
    dict(kt=gg.F16, d=36, n_kv=50, heads=1, n=1, max_bias=8.0), dict(d=80, n_kv=50, heads=1, n=1, sinks=True),
    dict(kt=gg.F16, d=576, dv=512, n_kv=20, heads=1, n=1)], ids=str)
def test_attention_of_one_query_over_shared_keys(gpu, options):
    """Blocks share the keys; heads that fill no power of two of lanes, or several eights of a lane."""
    case = Case(str(options), flash_attn.make_case(**options), 1e-11)
    assert len(launches(case.build(Inputs(gg.Context(), np.random.default_rng(3))))) == 2
    check(gpu, case, 3)


# ---------------------------------------------------------------- convolutions
@pytest.mark.parametrize("kernel, data, q", [
    ((14, 9, 5, 3), (16, 11, 5, 2), (1, 1, 0, 0, 1, 1)), ((9, 40, 2, 4), (21, 43, 2, 1), (2, 3, 1, 2, 2, 1)),
    ((3, 3, 70, 2), (1, 1, 70, 3), (1, 1, 1, 1, 1, 1)), ((33, 11, 3, 2), (40, 11, 3, 1), (1, 1, 0, 0, 1, 1))], ids=str)
def test_long_sums_of_small_planes_are_shared_by_a_block(gpu, kernel, data, q):
    """As the gradient of a kernel has them: more taps than threads and fewer, taps outside, steps and dilations."""
    case = Case(str(kernel), lambda inp: gg.conv_2d_direct(inp.new(gg.F32, kernel), inp.new(gg.F32, data), *q), 1e-12)
    launch, = launches(case.build(Inputs(gg.Context(), np.random.default_rng(0))))
    assert launch.name.startswith("conv_2d_few")
    check(gpu, case, random.randrange(1000))


# ---------------------------------------------------------------- attention
ATTENTIONS = [dict(d=64, n=9, n_kv=40, heads=1), dict(d=32, dv=40, n=19, n_kv=70, heads=1, rep=2),
              dict(d=16, n=33, n_kv=33, heads=1, mask=False, permuted=True), dict(d=128, n=16, n_kv=32, heads=1),
              dict(d=16, n=12, n_kv=45, heads=1, qt=gg.F16, max_bias=8.0, cap=5.0, sinks=True, ne3=2)]


@pytest.mark.parametrize("options", ATTENTIONS, ids=str)
def test_attention_with_tensor_cores(gpu, options):
    """Within what it costs to round q and p to float16."""
    y, sources, got = on(gpu, Case(str(options), flash_attn.make_case(**options), 0.0), 5)
    assert "mma" in launches(y)[0].name
    assert nmse(got, all_specs()[y.op].reference(y, *sources)) <= 1e-6


def test_attention_that_asks_for_precision_is_exact(gpu):
    build = flash_attn.make_case(d=16, n=9, n_kv=20, heads=1, rep=2)
    check(gpu, Case("F32", lambda inp: gg.flash_attn_ext_set_prec(build(inp), flash_attn.PREC_F32), 1e-11), 5)


def test_attention_with_tensor_cores_where_queries_see_no_key(gpu):
    q, k = RNG.uniform(-1, 1, (1, 12, 32)).astype(np.float32), RNG.uniform(-1, 1, (1, 40, 32)).astype(np.float16)
    mask = np.where(np.arange(40) < 3 * np.arange(12)[:, None], 0, -np.inf).astype(np.float16)       # query 0: none
    mask[7] = np.where(np.arange(40) < 38, -np.inf, 0)                                               # 7: the last two
    leaf = functools.partial(gg.from_numpy, gg.Context())
    y = gg.flash_attn_ext(leaf(q), leaf(k), leaf(k), leaf(mask), 0.2, 0.0, 0.0)
    got, want = (gg.compute(y, backend=b) for b in (gpu, gg.init_backend("CPU:n_threads=1")))
    assert not got[0, 0].any() and nmse(got, want) <= 1e-6


# ---------------------------------------------------------------- quantised types
QUANTIZED = sorted(BLOCKS, key=lambda t: t.id)


@pytest.mark.parametrize("type", QUANTIZED, ids=repr)
def test_blocks_are_unpacked_as_gguf_does(gpu, type):
    """get_rows decodes codes and scales exactly."""
    rng = np.random.default_rng()
    ctx = gg.Context()
    table, ids = ctx.new_tensor(type, (256, 3)), ctx.new_tensor(gg.I32, (2,))
    gg.alloc_ctx_tensors(ctx, gpu)
    raw = random_blocks(rng, type, 3, 256)
    table.set_bytes(raw)
    ids.set(np.array([2, 0], np.int32))
    got = gg.compute(gg.get_rows(table, ids), backend=gpu)
    want = decoded(raw, type)[[2, 0]]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6 * abs(want).max())


@pytest.mark.parametrize("type,n", sampled(itertools.product(QUANTIZED, (1, 3, 9)), lambda case: [
    case[1], case[0].name[:2] + str(case[1] > 8)]))
def test_products_with_quantised_weights(gpu, type, n):
    """Of columns in 8 bits.  To the product of unrounded columns the distance has no bound: sums may cancel."""
    rng = np.random.default_rng()
    ctx, k = gg.Context(), 160 if type.block == 32 else 256
    w, x = ctx.new_tensor(type, (k, 5)), ctx.new_tensor(gg.F32, (k, n))
    gg.alloc_ctx_tensors(ctx, gpu)
    raw = random_blocks(rng, type, 5, k)
    w.set_bytes(raw)
    x.set(rng.uniform(-1, 1, (n, k)))
    got = gg.compute(gg.mul_mat(w, x), backend=gpu)
    assert nmse(got, in_8_bits(x.numpy()) @ decoded(raw, type).T) <= 1e-11


@pytest.mark.parametrize("type", sampled([(t,) for t in (gg.F32, gg.F16, gg.BF16, gg.Q4_0, gg.Q4_K)],
                                         lambda case: [case[0].block, case[0] is gg.F32]))
def test_experts_meet_their_columns_in_tiles(gpu, type):
    """Experts without a column, with more than a tile, columns that all slots of a token share or have of their own."""
    rng = np.random.default_rng()
    tokens, n_expert, n_used = random.choice([(9, 4, 2), (100, 2, 1), (10, 12, 1)])
    k, m, n_b = max(type.block, 64), 5, random.choice([1, n_used])
    ctx = gg.Context()
    w, x, ids = (ctx.new_tensor(*a) for a in ((type, (k, m, n_expert)), (gg.F32, (k, n_b, tokens)),
                                              (gg.I32, (n_used, tokens))))
    gg.alloc_ctx_tensors(ctx, gpu)
    w.set(rng.uniform(-1, 1, (n_expert, m, k)))
    x.set(rng.uniform(-1, 1, (tokens, n_b, k)))
    ids.set(np.minimum(rng.integers(0, n_expert, (tokens, n_used)), rng.integers(0, n_expert, (tokens, n_used)))
            .astype(np.int32))
    y = gg.mul_mat_id(w, x, ids)
    assert any(launch.name.startswith("group_pairs") for launch in launches(y))
    columns = in_8_bits(exact(x)) if type.quantized else exact(x)
    want = all_specs()[OP.MUL_MAT_ID].reference(y, exact(w), columns, exact(ids))
    got = gg.compute(y, backend=gpu)
    assert nmse(got, want) <= (5e-5 if type in (gg.F16, gg.BF16) else 1e-10)
    if type is gg.F32:
        bad = ids.numpy().copy()
        bad[tokens // 2, 0] = n_expert
        ids.set(bad)
        with pytest.raises(gg.IndexRangeError, match=f"index {n_expert} "):
            gg.compute(gg.mul_mat_id(w, x, ids), backend=gpu)


@pytest.mark.parametrize("mode, bad", [(0, 2 ** 24 + 1), (8, -2 ** 31)])
def test_positions_beyond_those_of_rope_are_reported(gpu, mode, bad):
    """The last id, in MROPE one that no pair uses; the next run with ids within is clean."""
    ctx = gg.Context()
    x, ids = ctx.new_tensor(gg.F32, (16, 1, 9)), ctx.new_tensor(gg.I32, (9 * (4 if mode & 8 else 1),))
    gg.alloc_ctx_tensors(ctx, gpu)
    x.set(RNG.standard_normal((9, 1, 16)).astype(np.float32))
    rest = (0, 10000.0, 1.0, 0.0, 1.0, 0.0, 0.0)
    y = gg.set_name(gg.rope_multi(x, ids, None, 16, (3, 3, 2, 0), mode, *rest) if mode & 8 else
                    gg.rope_ext(x, ids, None, 16, mode, *rest), "turned")
    within = np.arange(ids.ne[0], dtype=np.int32)
    ids.set(np.where(within == within[-1], np.int32(bad), within))
    with pytest.raises(gg.IndexRangeError, match=f"turned.*index {bad} is out of range"):
        gg.compute(y, backend=gpu)
    within[0] = 2 ** 24                         # the last position there is
    ids.set(within)
    assert np.isfinite(gg.compute(y, backend=gpu)).all()


@pytest.mark.parametrize("type", sorted(QUANTIZE, key=lambda t: t.id), ids=repr)
def test_quantisers_are_byte_equal_to_the_cpus(gpu, type):
    x = np.random.default_rng().uniform(-3, 3, (4, 96)).astype(np.float32)
    x[1, :32], x[2, 3] = 0, 1e-30
    ctx = gg.Context()
    a = ctx.new_tensor(gg.F32, (96, 4))
    gg.alloc_ctx_tensors(ctx, gpu)
    a.set(x)
    y = gg.cast(a, type)
    gg.compute(y, backend=gpu)
    cpu = gg.cast(gg.from_numpy(gg.Context(), x), type)
    gg.compute(cpu)
    differ = np.frombuffer(y.bytes(), np.uint8) != np.frombuffer(cpu.bytes(), np.uint8)
    assert not differ.any(), f"{int(differ.sum())} bytes differ"


# ---------------------------------------------------------------- benchmarks/gpu.py
def test_the_benchmark_measures_everything_as_small_as_it_goes(gpu, monkeypatch, tmp_path):
    """So that nothing but the figures is new to it on a card."""
    monkeypatch.setattr(argsort, "available", lambda: True)
    report = benchmark.Report(gpu.device, tmp_path / "gpu.md")
    with benchmark.products_by(gpu_suite.CUBLAS):
        benchmark.measured(gpu, dataclasses.replace(benchmark.DRY, n_ops=6), [], None, report, benchmark.Clock(600))
    rows = report.rows
    assert all(row.ours.median > 0 for row in rows)
    works = " ".join(row.work for row in rows)
    for part in ("copy", "piped mat-vec Q4_0", "piped product Q8_0", "piped attention F16",
                 "mat-vec F16", "mat-vec IQ2_XXS", "own kernels", "cuBLAS", "9 columns", "argsort of",
                 "attention", "launch by launch", "CUDA graph", "in one kernel", "token of tiny", "memory of", "op "):
        assert part in works, part
    assert all(row.work in report.path.read_text() for row in rows)
    memory = next(row for row in rows if "memory" in row.work)
    assert memory.passed and memory.ours.median <= memory.peer.median


def test_a_case_that_fails_is_a_row_and_the_next_one_begins():
    def fails():
        yield 1
        raise ValueError("no such type")
    cases = [("Q9_0", fails), ("Q8_0", lambda: iter([2]))]
    one, stopped, two = gpu_report.each(cases, False)
    assert (one, two) == (1, 2) and stopped.work == "Q9_0 stopped" and "no such type" in stopped.ours
    with pytest.raises(ValueError, match="no such type"):
        list(gpu_report.each(cases, True))


def program(folder, name, text):
    path = folder / name
    # a shell reads the first two lines, Python a string: no path with spaces goes behind #!
    path.write_text(f"""#!/bin/sh\n'''exec' '{sys.executable}' "$0" "$@"\n' '''\n{text}""")
    path.chmod(0o755)
    return str(path)


def test_the_benchmark_reads_llama_bench(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert benchmark.llama_bench("m.gguf", 512) == {}
    said = json.dumps([dict(n_prompt=512, n_gen=0, avg_ts=900.5), dict(n_prompt=0, n_gen=64, avg_ts=80)])
    program(tmp_path, "llama-bench",
            f"import sys\nassert sys.argv[1:5] == ['-m', 'm.gguf', '-p', '512']\nprint({said!r})")
    assert benchmark.llama_bench("m.gguf", 512) == {"prompt": 900.5, "decode": 80}
    ours = benchmark.Spread([160.0], "tok/s")
    assert benchmark.beside("decode", ours, 80).ratio == 2 and benchmark.beside("decode", ours, None).ratio is None


def test_the_benchmark_reports_what_the_sanitizer_finds(monkeypatch, tmp_path):
    found = program(tmp_path, "compute-sanitizer", "import sys\nassert sys.argv[1:5] == ['--tool', 'memcheck', "
                    "'--error-exitcode', '99']\nop = sys.argv[sys.argv.index('benchmarks.gpu_suite') + 1]\n"
                    "print('Invalid __global__ read')\nsys.exit(99 if op == 'ROPE' else 0)")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_suite.sanitizer() == found
    monkeypatch.setattr(gpu_suite, "makers", lambda: dict.fromkeys((OP.ROPE, OP.ADD)))
    n, faults = gpu_suite.sanitize(found, 2)
    assert n == 2 and len(faults) == 1 and faults[0].startswith("ROPE: exit status 99") and "Invalid" in faults[0]


def test_every_launch_of_these_tests_ran_in_the_simulator():
    assert len(set(cuda_sim.launched)) > 50
