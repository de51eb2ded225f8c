"""The second set of kernels (GGJIT_PIPED=1): products and attention that copy while they compute, in the simulator.
Run by test_cuda.py."""
import functools
import itertools
import random

import numpy as np
import pytest
from helpers.random_blocks import decoded, in_8_bits, random_blocks
from helpers.sample import SEED, drawn, sampled

import ggjit as gg
from benchmarks.gpu_suite import exact, nmse, on
from ggjit.cuda import libraries
from ggjit.cuda import simulated_driver as cuda_sim
from ggjit.ops.attention import flash_attn
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import Case, Inputs, all_specs
from ggjit.ops.cuda.blocks import BLOCKS
from ggjit.ops.cuda.compiler import requests
from ggjit.ops.cuda.compiler.simulator import SimulationFault
from ggjit.ops.cuda.eights import EIGHTS
from ggjit.ops.cuda.matmul import columns_16, mul_mat_piped, mul_mat_stream, mul_mat_warpgroups
from ggjit.ops.cuda.native.launch import node_ways

RNG = np.random.default_rng()


@pytest.fixture(autouse=True)
def piped(monkeypatch):
    monkeypatch.setenv("GGJIT_PIPED", "1")


def product(gpu, type, k, m, n, columns=gg.F32, ne2=1, size=1.0):
    """A mul_mat of random blocks or floats, and the exact product."""
    ctx = gg.Context()
    w, x = ctx.new_tensor(type, (k, m)), ctx.new_tensor(columns, (k, n, ne2))
    gg.alloc_ctx_tensors(ctx, gpu)
    if type.quantized:
        w.set_bytes(random_blocks(RNG, type, m, k))
    else:
        w.set(RNG.uniform(-1, 1, (m, k)).astype(np.float32))
    x.set(RNG.standard_normal((ne2, n, k)).astype(np.float32) * np.float32(size))
    y = gg.mul_mat(w, x)
    return y, np.reshape(all_specs()[OP.MUL_MAT].reference(y, exact(w), exact(x)), (ne2, n, m) if ne2 > 1 else (n, m))


def names_of(t, way="piped"):
    return " ".join(x.name for x in libraries.ways(t, libraries.HOPPER)[way])


# ---------------------------------------------------------------- products of one column
@pytest.mark.parametrize("type", sampled([(t,) for t in sorted(BLOCKS, key=lambda t: t.id)], lambda case: [
    case[0].block, case[0].nbytes % 16, case[0].name[:2]]))
def test_rows_are_streamed(gpu, type):
    """Pieces that begin between two multiples of 16; rows that end with a part of one; an odd number of them."""
    k, m, ne2 = max(type.block, 32) * random.choice([1, 3, 9 if type.block < 256 else 2]), random.choice([1, 5, 8]), \
        random.choice([1, 2])
    y, _ = product(gpu, type, k, m, 1, ne2=ne2)
    w, x = y.src[:2]
    raw = np.frombuffer(w.bytes(), np.uint8).reshape(m, k // type.block, type.nbytes)
    assert "mul_mat_stream" in names_of(y)
    got = gg.compute(y, backend=gpu)
    assert nmse(got, in_8_bits(x.numpy().reshape(ne2, k)) @ decoded(raw, type).T) <= 1e-11


@pytest.mark.parametrize("type", [gg.Q4_0, gg.Q6_K], ids=repr)
def test_long_rows_are_streamed_in_pieces(gpu, type):
    y, want = product(gpu, type, 2 * mul_mat_stream.PIECE + 256, 7, 1)
    assert nmse(gg.compute(y, backend=gpu), want) <= 1e-3


# ---------------------------------------------------------------- products by tensor cores
@pytest.mark.parametrize("type, n", sampled(itertools.product(EIGHTS, (2, 9, 31, 35)), lambda case: [
    case[1], case[0].name[:2], case[0].block]))
def test_products_by_tensor_cores(gpu, type, n, no_warpgroups):
    """Rows, columns and, of floats, k that fill no tile; columns of any size."""
    k = type.block * (5 if type.block == 32 else 1) if type.quantized else 72
    y, want = product(gpu, type, k, 37, n, random.choice([gg.F32, gg.F16]), random.choice([1, 2]),
                      random.choice([1.0, 1e-3, 300.0]))
    assert ("mul_mat_few" if n <= 32 else "mul_mat_piped_32x32") in names_of(y)
    assert nmse(gg.compute(y, backend=gpu), want) <= (5e-6 if type is gg.BF16 else 1e-6)


# ends of the numbers of columns that have kernels of their own
COLUMNS = 1, 1, 2, 8, 9, 32, 33, 128, 129, 512


def some_columns(i):
    """A number of columns between two of these, by the seed of the run."""
    return int(np.random.default_rng((SEED, i)).integers(COLUMNS[2 * i], COLUMNS[2 * i + 1], endpoint=True))


@pytest.mark.parametrize("set", "01")
@pytest.mark.parametrize("n, type", sampled([(some_columns(i), t) for i in range(5) for t in (
    *BLOCKS, gg.F32, gg.F16, gg.BF16)], lambda case: [case[0]]))
def test_every_type_has_products_of_1_to_512_columns(gpu, monkeypatch, type, n, set, no_warpgroups):
    """By both sets of kernels; columns are rounded to 8 bits where the first one multiplies bytes."""
    monkeypatch.setenv("GGJIT_PIPED", set)
    y, want = product(gpu, type, type.block if type.quantized else 64, 5, n)
    assert nmse(gg.compute(y, backend=gpu), want) <= libraries.MAX_NMSE


@pytest.fixture
def no_warpgroups(gpu, monkeypatch):
    monkeypatch.setattr(gpu.device, "compute_capability", (8, 0))


@pytest.mark.parametrize("type, k, m, n", sampled(
    [(t, t.block * 2 if t.block == 32 else max(t.block, 192), *size) for t in EIGHTS for size in (
        (37, 35), (130, 70), (20, 130))], lambda case: [case[0].name[:2], case[2:]]))
def test_products_by_warpgroups(gpu, monkeypatch, type, k, m, n):
    """More steps than stages, several blocks, rows and columns that fill no tile; both tiles."""
    monkeypatch.setattr(mul_mat_warpgroups, "ENOUGH_TILES", random.choice([1, 9]))
    y, want = product(gpu, type, k, m, n, random.choice([gg.F32, gg.F16]), size=random.choice([1.0, 1e-3, 300.0]))
    assert "mul_mat_warpgroups_128x" in names_of(y, "warpgroups") and "_turned" in names_of(y, "warpgroups")
    assert nmse(gg.compute(y, backend=gpu), want) <= (5e-6 if type is gg.BF16 else 1e-6)


def test_what_warpgroups_do_not_serve(gpu):
    for k, n, capability in ((96, 40, (9, 0)), (128, 32, (9, 0)), (128, 40, (8, 0)), (128, 40, (10, 0))):
        y = gg.mul_mat(gg.Context().new_tensor(gg.F16, (k, 4)), gg.Context().new_tensor(gg.F32, (k, n)))
        assert set(libraries.ways(y, capability)) == {"own", "piped"}


def test_the_simulator_sees_columns_that_warpgroups_read_without_a_barrier(gpu, monkeypatch):
    monkeypatch.setattr(mul_mat_warpgroups.core, "sync", lambda: None)
    y, _ = product(gpu, gg.F16, 128, 8, 33)
    with pytest.raises(SimulationFault, match="race"):
        gg.compute(y, backend=gpu)
    gpu.stream.jobs.clear()


@pytest.mark.parametrize("tile, type", sampled(itertools.product(mul_mat_piped.TILES[:2], (gg.F16, gg.Q4_0, gg.Q4_K)),
                                               lambda case: [case[0], case[1].block]))
def test_tiles_of_every_size(gpu, monkeypatch, tile, type, no_warpgroups):
    """Several tiles in both directions, more steps than stages."""
    monkeypatch.setattr(mul_mat_piped, "TILES", (tile,))
    y, want = product(gpu, type, 256, tile.m + 3, tile.n + 9)
    assert f"{tile.m}x{tile.n}" in names_of(y)
    assert nmse(gg.compute(y, backend=gpu), want) <= 1e-6


@pytest.mark.parametrize("size", [1e30, 1e-30, 0.0])
def test_columns_of_float32s_whole_range(gpu, size):
    y, want = product(gpu, gg.Q8_0, 64, 3, 9, size=size)
    assert nmse(gg.compute(y, backend=gpu) / (size or 1), want / (size or 1)) <= 1e-6


@pytest.mark.parametrize("k", [40, 64])
def test_an_infinite_value_stays_in_its_column(gpu, k):
    ctx = gg.Context()
    w, x = ctx.new_tensor(gg.F16, (k, 2)), ctx.new_tensor(gg.F32, (k, 9))
    gg.alloc_ctx_tensors(ctx, gpu)
    w.set(np.ones((2, k), np.float32))
    values = np.ones((9, k), np.float32)
    values[3, 5], values[4, 6] = np.inf, np.nan
    x.set(values)
    got = gg.compute(gg.mul_mat(w, x), backend=gpu)
    assert np.isinf(got[3]).all() and np.isnan(got[4]).all() and (np.delete(got, (3, 4), 0) == k).all()


def test_weights_at_no_multiple_of_16_are_not_piped(gpu):
    a = gg.Context().new_tensor(gg.F16, (36, 4))
    y = gg.mul_mat(a, gg.Context().new_tensor(gg.F32, (36, 9)))
    assert set(libraries.ways(y)) == {"own"}
    exact_y = gg.mul_mat_set_prec(gg.mul_mat(gg.Context().new_tensor(gg.F16, (64, 4)), gg.Context().new_tensor(
        gg.F32, (64, 3))), 10)
    assert set(libraries.ways(exact_y)) == {"own"}


def test_the_simulator_sees_copies_that_nobody_waited_for(gpu, monkeypatch, no_warpgroups):
    """What a copy brings is not there before."""
    monkeypatch.setattr(mul_mat_piped.core, "copies_but", lambda n: lambda: None)
    gpu.device.functions.pop("mul_mat_piped_32x32_q8_0", None)
    y, want = product(gpu, gg.Q8_0, 128, 3, 33)
    assert "mul_mat_piped_32x32_q8_0" in names_of(y)
    try:
        assert not nmse(gg.compute(y, backend=gpu), want) <= 1e-3
    finally:
        gpu.device.functions.pop("mul_mat_piped_32x32_q8_0", None)


# ---------------------------------------------------------------- what warps ask memory for
def attention_like(gpu, d, type):
    ctx = gg.Context()
    q, k = ctx.new_tensor(gg.F32, (d, 20, 1)), ctx.new_tensor(type, (d, 40, 1))
    gg.alloc_ctx_tensors(ctx, gpu)
    q.set(RNG.standard_normal((20, d)).astype(np.float32))
    k.set_bytes(random_blocks(RNG, type, 40, d)) if type.quantized else k.set(RNG.standard_normal((40, d)).astype("f4"))
    return gg.flash_attn_ext(q, k, k, None, 0.2, 0.0, 0.0)


ASKED = {"warpgroups": lambda gpu, type: product(gpu, type, 256, 20, 40)[0],
         "piped": lambda gpu, type: product(gpu, type, 256, 20, 40)[0],
         "few": lambda gpu, type: product(gpu, type, 256, 20, 8)[0],
         "stream": lambda gpu, type: product(gpu, type, 1024, 4, 1)[0],
         "attention": lambda gpu, type: attention_like(gpu, random.choice([64, 128]), type)}


@pytest.mark.parametrize("name, type", [(n, t) for n in ASKED for t in (gg.F16, gg.Q8_0) if (n, t) != (
    "stream", gg.F16)])
def test_lanes_meet_no_bank_twice_and_copies_whole_sectors(gpu, name, type):
    """Halves of streamed blocks come in two turns, and a lane loads its 32 codes of the column in two; what else is
    copied or loaded 16 bytes at a time fills the sectors that it touches."""
    y = ASKED[name](gpu, type)
    with libraries.forced("warpgroups" if name == "warpgroups" else "piped"), requests.recorded() as asked:
        gg.compute(y, backend=gpu)
    shared = [x for x in asked if x.space == requests.SHARED]
    most = 2 if name == "stream" else 1
    assert shared and all(x.taken <= most * x.least for x in shared), shared
    wide = [x for x in asked if x.space == requests.GLOBAL and x.nbytes == 16]
    assert (name, type) == ("attention", gg.Q8_0) or wide       # its blocks are made float16 on their way
    assert all(x.taken <= 1.1 * most * x.least for x in wide), wide


@pytest.mark.parametrize("step, nbytes, n_sectors, n_turns", [(4, 4, (4, 4), (1, 1)), (8, 4, (8, 4), (2, 1)), (
    128, 4, (32, 4), (32, 1)), (0, 4, (1, 1), (1, 1)), (16, 16, (16, 16), (4, 4)), (144, 16, (32, 16), (4, 4)), (
    128, 16, (32, 16), (32, 4)), (8, 8, (8, 8), (2, 2))])
def test_sectors_and_turns_of_a_request(step, nbytes, n_sectors, n_turns):
    request = {lane: (step * lane, nbytes) for lane in range(32)}
    assert requests.sectors(request) == n_sectors and requests.turns(request) == n_turns


# ---------------------------------------------------------------- attention
ATTENTIONS = [dict(d=64, n=9, n_kv=40, heads=1), dict(d=32, dv=48, n=19, n_kv=70, heads=2, rep=2),
              dict(d=128, n=1, n_kv=200, heads=1, rep=8), dict(d=64, n=1, n_kv=130, heads=2, rep=3, sinks=True),
              dict(d=32, n=33, n_kv=33, heads=1, mask=False, permuted=True), dict(d=96, n=2, n_kv=5, heads=1),
              dict(d=32, n=12, n_kv=45, heads=1, rep=2, qt=gg.F16, max_bias=8.0, cap=5.0, sinks=True, ne3=2),
              dict(d=80, n=5, n_kv=40, heads=2, cap=3.0), dict(d=112, n=1, n_kv=70, heads=1, rep=2),
              dict(d=256, n=18, n_kv=50, heads=1), dict(kt=gg.Q8_0, d=256, n=1, n_kv=40, heads=1, rep=2),
              dict(kt=gg.Q8_0, d=64, n=5, n_kv=70, heads=1, rep=4), dict(kt=gg.Q4_0, d=128, n=1, n_kv=70, heads=1),
              dict(kt=gg.Q8_0, vt=gg.Q4_0, d=32, n=20, n_kv=50, heads=1, cap=5.0),
              dict(kt=gg.Q5_1, vt=gg.F16, d=32, n=3, n_kv=150, heads=1, max_bias=8.0, rep=2)]


@pytest.mark.parametrize("options", [o for o, in drawn([(o,) for o in ATTENTIONS], lambda case: [*case[0], str(
    case[0].get("kt")), case[0]["n"] > 8, case[0]["d"] > 128, case[0]["d"] % 32])], ids=str)
def test_attention(gpu, options):
    """Within what it costs to round q, p and quantised values to float16."""
    y, sources, got = on(gpu, Case(str(options), flash_attn.make_case(**{"kt": gg.F16} | options), 0.0), 5)
    assert "flash_attn_piped" in names_of(y)
    assert nmse(got, all_specs()[y.op].reference(y, *sources)) <= 2e-6


@pytest.mark.parametrize("n_kv", [200, 40])
def test_attention_where_queries_see_no_key(gpu, n_kv):
    """Whole tiles that are hidden; a query without a key gives zeros, from one block and from several."""
    q, k = RNG.uniform(-1, 1, (1, 12, 32)).astype(np.float32), RNG.uniform(-1, 1, (1, n_kv, 32)).astype(np.float16)
    mask = np.where(np.arange(n_kv) < 3 * np.arange(12)[:, None], 0, -np.inf).astype(np.float16)     # query 0: none
    mask[7] = np.where(np.arange(n_kv) < n_kv - 2, -np.inf, 0)                                       # 7: the last two
    leaf = functools.partial(gg.from_numpy, gg.Context())
    y = gg.flash_attn_ext(leaf(q), leaf(k), leaf(k), leaf(mask), 0.2, 0.0, 0.0)
    got, want = (gg.compute(y, backend=b) for b in (gpu, gg.init_backend("CPU:n_threads=1")))
    assert not got[0, 0].any() and nmse(got, want) <= 1e-6


@pytest.mark.parametrize("options", [dict(d=72), dict(d=64, kt=gg.BF16), dict(d=288), dict(d=32, dv=40)], ids=str)
def test_attention_that_is_not_piped(options):
    y = flash_attn.make_case(**{"kt": gg.F16} | options)(Inputs(gg.Context(), np.random.default_rng(0)))
    assert "piped" not in libraries.ways(y)
    build = flash_attn.make_case(d=64, kt=gg.F16)
    y = gg.flash_attn_ext_set_prec(build(Inputs(gg.Context(), np.random.default_rng(0))), flash_attn.PREC_F32)
    assert "piped" not in libraries.ways(y)


def test_an_attention_is_measured_on_leaves_like_its_sources(gpu, monkeypatch):
    monkeypatch.setattr(libraries, "ROUNDS", 1)
    build = flash_attn.make_case(kt=gg.Q8_0, d=32, n=3, n_kv=9, heads=1, rep=2, sinks=True, cap=5.0)
    found = libraries.measure(gpu.device, y := build(Inputs(gg.Context(), np.random.default_rng(0))))
    assert set(found) == {"own", "piped"} and max(found.values()) < libraries.NEVER
    assert node_ways()[y.op].class_of(y) == "attention q8_0 q8_0 32-32 4x16 2x1x1 mask"


# ---------------------------------------------------------------- the choice
def test_columns_are_made_once_for_the_products_of_a_matrix(gpu):
    ctx = gg.Context()
    w, v, x = ctx.new_tensor(gg.Q8_0, (64, 3)), ctx.new_tensor(gg.F16, (64, 3)), ctx.new_tensor(gg.F32, (64, 9))
    gg.alloc_ctx_tensors(ctx, gpu)
    for t in (w, v, x):
        t.set(RNG.uniform(-1, 1, (t.ne[1], t.ne[0])).astype(np.float32))
    graph = gg.Graph(*(gg.mul_mat(a, x) for a in (w, v)))
    gg.GraphAllocator(gpu).alloc_graph(graph)
    plan, before = gpu.graph_plan_create(graph), len(cuda_sim.launched)
    plan.compute()
    gpu.synchronize()
    assert cuda_sim.launched[before:].count("columns_16_f32") == 1
    assert columns_16.nbytes(64, 9) == 9 * (128 + 4)


@pytest.mark.parametrize("said, right, way", [("0", True, "own"), ("1", True, "piped"), ("measured", True, "piped"),
                                              ("measured", False, "own")])
def test_a_product_is_piped_where_it_was_measured_to_be_right_and_faster(gpu, monkeypatch, tmp_path, said, right, way):
    monkeypatch.setenv("GGJIT_PIPED", said)
    monkeypatch.setattr("ggjit.ops.native.measured.cache_dir", lambda: tmp_path)
    monkeypatch.setattr(gpu.device, "measured", None)
    monkeypatch.setattr(libraries, "ROUNDS", 1)
    if not right:
        monkeypatch.setattr(libraries, "_near", lambda got, want: False)
    y = gg.mul_mat(gg.Context().new_tensor(gg.Q8_0, (64, 3)), gg.Context().new_tensor(gg.F32, (64, 9)))
    measure = libraries.measure

    def faster(device, t):
        found = measure(device, t)
        assert set(found) == {"own", "piped"}
        return found | {"own": 1e6}                  # slower than the simulator on a busy machine, faster than NEVER
    monkeypatch.setattr(libraries, "measure", faster)
    for _ in range(2):                          # in this process, and in one that reads the file
        got = libraries.chosen(gpu, y)
        assert any(x.name.startswith("mul_mat_few") for x in got) == (way == "piped")
        monkeypatch.setattr(gpu.device, "measured", None)
        monkeypatch.setattr(libraries, "measure", lambda *_: pytest.fail("measured again"))


def test_what_may_be_said_of_piping(gpu, monkeypatch):
    monkeypatch.setenv("GGJIT_PIPED", "2")
    with pytest.raises(gg.ParamError, match="GGJIT_PIPED='2'; there are 0, 1 and measured"):
        libraries.ways(gg.mul_mat(gg.Context().new_tensor(gg.F16, (64, 4)), gg.Context().new_tensor(gg.F32, (64, 9))))
