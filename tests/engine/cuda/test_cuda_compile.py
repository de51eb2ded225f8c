"""Kernels compiled for real GPUs, without one: cubins for sm_80, sm_90 and sm_100, with ptxas' own figures.

Needs the extra `gpu` (libnvvm, nvrtc and nvJitLink wheels); what is proved is that every kernel here types, compiles
and keeps its values in registers, not that it computes the right thing (cuda_ops.py does that).
"""
import importlib.util
import inspect
import os
import pathlib
import random
import re

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.sample import sampled

import ggjit as gg
from ggjit.ops.core.record import OP
from ggjit.ops.core.spec import Inputs, all_specs

HAVE_EXTRA = all(importlib.util.find_spec(m) is not None for m in ("numba_cuda", "cuda"))
pytestmark = pytest.mark.skipif(not HAVE_EXTRA or os.environ.get("NUMBA_ENABLE_CUDASIM") == "1",
                                reason="CUDA compiler wheels: pip install 'ggjit[gpu]'")
HERE = pathlib.Path(__file__).parent
ARCHITECTURES = [(8, 0), (9, 0), (10, 0)]
CONFORMANCE = """loads_and_stores narrow_types parts_of_words shuffles sums_of_warps through_shared_memory
    memory_of_a_thread functions_of_floats bytes_and_votes a_product_of_tiles copies_beside_the_thread
    matrices_transposed"""


def leaf(type, *ne):
    return gg.Context().new_tensor(type, ne)


def product(type, n):
    return gg.mul_mat(leaf(type, 512, 64), leaf(gg.F32, 512, n))


def experts(type):
    return gg.mul_mat_id(leaf(type, 512, 64, 8), leaf(gg.F32, 512, 1, 128), leaf(gg.I32, 2, 128))


def attention(n=4, d=128):
    k = leaf(gg.F16, d, 256, 8)
    return gg.flash_attn_ext(leaf(gg.F32, d, n, 32), k, k, leaf(gg.F16, 256, n), 0.1, 0.0, 0.0)


def convolution(n_out, n_taps):
    size = n_out + n_taps - 1
    return gg.conv_2d_direct(leaf(gg.F32, n_taps, n_taps, 64, 64), leaf(gg.F32, size, size, 64, 8), 1, 1, 0, 0, 1, 1)


HOT = {
    "mat-vec F16": (lambda: product(gg.F16, 1), 64), "mat-vec F32": (lambda: product(gg.F32, 1), 64),
    **{f"mat-vec {t}": (lambda t=t: product(getattr(gg, t), 1), 80)
       for t in ("Q8_0", "Q4_0", "Q5_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")},
    "tiles F16": (lambda: product(gg.F16, 128), 128), "tiles BF16": (lambda: product(gg.BF16, 128), 128),
    "tiles F32": (lambda: product(gg.F32, 128), 128), "int8 tiles Q8_0": (lambda: product(gg.Q8_0, 128), 128),
    "int8 tiles Q4_K": (lambda: product(gg.Q4_K, 128), 128), "attention": (attention, 128),
    "prefill attention 64": (lambda: attention(64, 64), 168), "prefill attention 128": (lambda: attention(64), 255),
    "expert tiles F16": (lambda: experts(gg.F16), 128), "expert tiles Q4_K": (lambda: experts(gg.Q4_K), 128),
    "convolution": (lambda: convolution(64, 3), 128), "its gradient": (lambda: convolution(3, 64), 80),
    "softmax": (lambda: gg.soft_max_ext(leaf(gg.F32, 256, 4), leaf(gg.F16, 256, 4), 1.0, 0.0), 96),
    "rms_norm": (lambda: gg.rms_norm(leaf(gg.F32, 4096, 4), 1e-6), 96)}


def launches_of(t):
    """The kernels of a node, without what libraries do."""
    from ggjit.ops.cuda.native.launch import Launch, launches
    return [x for x in launches(t) or () if isinstance(x, Launch)]


def built(launch, cc):
    from ggjit.ops.cuda.compiler.build import binary
    b = binary(launch, cc)
    print(f"{launch.name} sm_{cc[0]}{cc[1]}: {b.registers} registers, {b.spill_nbytes} bytes of stack and spills, "
          f"{b.shared_nbytes} shared, {len(b.cubin)} bytes")
    assert -(-b.registers // 8) * 8 * launch.block <= 1 << 16, "a block needs more registers than there are"
    assert b.shared_nbytes <= 48 << 10
    return b


@pytest.mark.parametrize("name", HOT)
def test_hot_kernels_spill_nothing(name):
    build, most = HOT[name]
    cc = random.choice(ARCHITECTURES)
    for launch in launches_of(build()):
        b = built(launch, cc)
        assert b.spill_nbytes == 0 and b.registers <= most
        assert b.cubin[:4] == b"\x7fELF" and b.symbol.encode() in b.cubin


# ---------------------------------------------------------------- kernels that copy while they compute
TENSOR_TYPES = "F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL Q2_K Q3_K Q4_K Q5_K Q6_K".split()
HEADS = 64, 80, 96, 112, 128, 256               # dims of heads that attention is piped for
COLUMNS = {1: 80, 8: 80, 32: 96, 64: 128, 256: 168, 512: 255}   # of a product with 4000 rows -> most registers


def piped(t):
    """The kernels of a node in its piped way."""
    from ggjit.ops.cuda.native.launch import launches, node_ways
    return launches(t, node_ways()[t.op].piped)


def pipes(type, n):
    type = getattr(gg, type)
    return piped(gg.mul_mat(leaf(type, 4096, 4000), leaf(gg.F32, 4096, n)))


@pytest.mark.parametrize("type, n", sampled([(t, n) for t in TENSOR_TYPES for n in COLUMNS if n > 1 or "F16" not in t],
                                            lambda case: [case[1], case[0][:2]]))
def test_piped_products_spill_nothing(type, n):
    cc = random.choice(ARCHITECTURES)
    for launch in pipes(type, n):
        b = built(launch, cc)
        assert b.spill_nbytes == 0 and b.registers <= COLUMNS[n]


def by_warpgroups(type, n):
    from ggjit.ops.cuda.matmul.mul_mat import by_warpgroups
    from ggjit.ops.cuda.native.launch import launches
    type = getattr(gg, type)
    return launches(gg.mul_mat(leaf(type, 4096, 4000), leaf(gg.F32, 4096, n)), by_warpgroups)


def fit_twice(type):
    """Two blocks of a tile of warpgroups have room on a multiprocessor."""
    for n in (64, 512):
        for launch in by_warpgroups(type, n):
            b = built(launch, (9, 0))
            assert b.spill_nbytes == 0 and b.registers <= 128 and 2 * b.shared_nbytes <= 227 << 10
        assert launch.block == 256


@pytest.mark.parametrize("type", sampled([(t,) for t in TENSOR_TYPES], lambda case: ["one"]))
def test_two_blocks_of_warpgroups_fit_a_multiprocessor(type):
    fit_twice(type)


@pytest.mark.slow
@pytest.mark.parametrize("type", TENSOR_TYPES)
def test_every_way_of_every_type_on_ampere_and_hopper(type):
    """Products of all numbers of columns; attention over a cache of the type."""
    fit_twice(type)
    for cc in ((8, 0), (9, 0)):
        made = [x for n in COLUMNS if n > 1 or "F16" not in type for x in pipes(type, n)]
        made += [x for d in HEADS if d % getattr(gg, type).block == 0 for n in (1, 8, 512)
                 for x in piped_attention(d, n, getattr(gg, type)) or ()]
        assert all(built(x, cc).spill_nbytes == 0 for x in made)


@pytest.mark.slow
@pytest.mark.parametrize("cc", [(8, 0), (9, 0)], ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_every_type_is_streamed_on_ampere_and_hopper(cc):
    from ggjit.ops.cuda.blocks import BLOCKS
    for type in BLOCKS:
        *_, launch = piped(gg.mul_mat(leaf(type, 4096, 4000), leaf(gg.F32, 4096, 1)))
        b = built(launch, cc)
        assert b.spill_nbytes == 0 and b.registers <= COLUMNS[1]


def test_warpgroups_are_hopper_s_instructions():
    from ggjit.ops.cuda.compiler import frontend
    ptx = frontend.ptx(by_warpgroups("F16", 512)[-1].make(), (9, 0))
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16") == 4


def piped_attention(d, n, type, rep=4):
    k, q, mask = leaf(type, d, 4096, 8), leaf(gg.F32, d, n, 8 * rep), leaf(gg.F16, 4096, n)
    return piped(gg.flash_attn_ext(q, k, k, mask, 0.1, 0.0, 0.0))


@pytest.mark.parametrize("d, n, type", sampled([(d, n, t) for d in HEADS for n in (1, 8, 512)
                                                for t in ("F16", "Q8_0", "Q4_0") if d % 32 == 0 or t == "F16"],
                                               lambda case: [case[0] > 128, case[0] % 32, case[1] > 8]))
def test_piped_attention_spills_nothing(d, n, type):
    made = piped_attention(d, n, getattr(gg, type))
    assert len(made) == (2 if n < 512 else 1)               # few queries: blocks share the keys
    for launch in made:
        b = built(launch, random.choice(ARCHITECTURES))
        assert b.spill_nbytes == 0 and b.registers <= (168 if d == 64 else 255)


def loads(launch, cc=(9, 0)):
    """{how many bytes at once: how often} in a kernel's PTX, of loads from global memory that are not of its row."""
    from ggjit.ops.cuda.compiler import frontend
    found, sizes = {}, {"8": 1, "16": 2, "32": 4, "64": 8}
    for copies, vector, bits in re.findall(r"\b(?:(cp\.async\.cg)|ld\.global(?:\.v(\d))?\.[a-z](\d+))",
                                           frontend.ptx(launch.make(), cc)):
        n = 16 if copies else int(vector or 1) * sizes[bits]
        found[n] = found.get(n, 0) + 1
    return found


@pytest.mark.parametrize("type", sampled([(t,) for t in ("Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "IQ2_XXS", "MXFP4")],
                                         lambda case: ["one"]))
def test_a_column_s_weights_are_loaded_16_bytes_at_a_time(type):
    """Of the column there are eights and scales; nothing reads single bytes or halves."""
    *_, launch = pipes(type, 1)
    found = loads(launch)
    assert found[16] >= 8 and not found.keys() & {1, 2}, found


@pytest.mark.parametrize("build", [lambda a: gg.argsort(a, 0), lambda a: gg.top_k(a, 7)])
def test_kernels_beside_a_sort_by_cccl_spill_nothing(monkeypatch, build):
    from ggjit.ops.cuda import argsort
    monkeypatch.setattr(argsort, "available", lambda: True)
    before, after = launches_of(build(leaf(gg.F32, 5000)))
    assert all(built(x, random.choice(ARCHITECTURES)).spill_nbytes == 0 for x in (before, after))


def test_kernels_that_leave_codes_spill_nothing():
    """Those of a node before a product with quantised weights: no op's maker has them."""
    from ggjit.ops.cuda.matmul.with_codes import before_product
    x, gate = leaf(gg.F32, 512, 1), leaf(gg.F32, 1024, 1)
    t = random.choice([gg.mul(x, leaf(gg.F32, 512)), gg.swiglu_split(x, x), gg.geglu(gate)])
    y = gg.mul_mat(leaf(gg.Q8_0, 512, 64), t)
    launch, = before_product(t, launches_of(t), y, launches_of(y))
    b = built(launch, random.choice(ARCHITECTURES))
    assert b.spill_nbytes == 0 and b.registers <= 64 and launch.leaves_result == "codes"


def runs(type):
    """(nodes that are one kernel, those that are stored): a gated unit, q, k and v, a product and a sum, a sum and a
    norm."""
    x, w, (a, b) = leaf(gg.F32, 2048, 1), leaf(gg.F32, 2048), (leaf(type, 2048, 5632) for _ in range(2))
    total = gg.add(x, leaf(gg.F32, 2048, 1))
    norm = gg.rms_norm(total, 1e-6)
    h = gg.mul(norm, w)
    for column, before in ((x, ()), (h, (norm, h))):
        gate, up = gg.mul_mat(a, column), gg.mul_mat(b, column)
        yield (*before, gate, up, gg.swiglu_split(gate, up)), ()
    yield (norm, h, gate, up, q := gg.mul_mat(a, h)), (gate, up)
    yield (q, gg.add(q, leaf(gg.F32, 5632, 1))), ()
    for stored in ((), (total,)):
        yield (total, norm, h), stored


def fused(type):
    """The kernels of runs of nodes (ops/cuda/fused), with and without codes."""
    from ggjit.ops.cuda.native.launch import cuda_fusions, node_kernel, of_module
    for nodes, stored in runs(type):
        fusion = next(f for f in cuda_fusions()[nodes[0].op] if f.matches(nodes))
        *_, last = fusion.fused(nodes, stored, [node_kernel(launches_of(t)) for t in nodes], 1).kernel.launches
        yield last
        yield from of_module(last.coded() or (), last.module)


def fused_spill_nothing(type, cc):
    for launch in fused(getattr(gg, type)):
        b = built(launch, cc)
        assert b.spill_nbytes == 0 and b.registers <= 128


@pytest.mark.parametrize("type", sampled([(t,) for t in ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ2_XXS")],
                                         lambda case: ["one"]))
def test_kernels_of_runs_of_nodes_spill_nothing(type):
    fused_spill_nothing(type, random.choice(ARCHITECTURES))


@pytest.mark.slow
def test_kernels_of_runs_of_nodes_of_every_type_on_hopper():
    from ggjit.ops.cuda.blocks import BLOCKS
    for type in ("F32", "F16", "BF16", *(t.name.upper() for t in BLOCKS)):
        fused_spill_nothing(type, (9, 0))


@pytest.mark.slow
@pytest.mark.parametrize("cc", ARCHITECTURES, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
@pytest.mark.parametrize("name", HOT)
def test_hot_kernels_on_every_architecture(name, cc):
    build, most = HOT[name]
    assert all(built(x, cc).spill_nbytes == 0 and built(x, cc).registers <= most for x in launches_of(build()))


def kernels_of(op):
    """One launch of each name that the op's cases ask for."""
    found = {}
    for case in all_specs()[op].cases():
        for launch in launches_of(case.build(Inputs(gg.Context(), np.random.default_rng(0)))):
            found.setdefault(launch.name, launch)
    return found


def test_a_sample_of_all_kernels_compiles():
    from ggjit.ops.cuda.native.launch import makers
    for op in random.sample(list(makers()), 6):
        built(random.choice(list(kernels_of(op).values())), random.choice(ARCHITECTURES))


@pytest.mark.slow
@pytest.mark.parametrize("cc", ARCHITECTURES, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_every_kernel_compiles(cc):
    """Nothing is spilled; sines and cosines of large angles take 32 bytes of a thread's memory."""
    from ggjit.ops.cuda.native.launch import makers
    for op in makers():
        for launch in kernels_of(op).values():
            assert built(launch, cc).spill_nbytes <= 32, launch.name


@pytest.mark.parametrize("type,nbytes", [(gg.F32, (32 + 32) * 68 + 16 * 32), (gg.F16, (64 + 64) * 80 + 16 * 64),
                                         (gg.Q8_0, (64 + 32) * (144 + 2 * 8 * 4) + 16 * 32)], ids=str)
def test_functions_of_a_kernel_share_its_memory(type, nbytes):
    """A piece that two device functions ask for would be there twice: one writes it, the other reads its own."""
    assert built(launches_of(product(type, 128))[-1], (9, 0)).shared_nbytes == nbytes


def test_the_benchmark_compiles_what_it_launches():
    """benchmarks.gpu_compile finds the kernels of tokens and of the second set, in every way, Walkers first."""
    from benchmarks import gpu, gpu_compile
    names = [x.name for x in gpu_compile.all_of(("walk", "piped"), gpu.FULL, (9, 0))]
    n = sum(name.startswith("walker") for name in names)
    assert n >= 8 and all(name.startswith("walker") for name in names[:n])
    for part in ("mul_mat_warpgroups_128x128_q4_0", "mul_mat_stream_q6_K", "swiglu_split_f32", "flash_attn_piped_f32"):
        assert any(name.startswith(part) for name in names[n:]), part


# ---------------------------------------------------------------- walkers
def decoding(type, d=64):
    """The launches of the kinds of nodes that a llama's token has."""
    x = leaf(gg.F32, 2048, 1)
    nodes = [gg.rms_norm(x, 1e-6), gg.mul(x, leaf(gg.F32, 2048)), gg.mul_mat(leaf(type, 2048, 2048), x),
             gg.mul_mat(leaf(type, 2048, 32000), x), gg.rope(leaf(gg.F32, d, 32, 1), leaf(gg.I32, 1), d, 0),
             gg.set_rows(leaf(gg.F16, 256, 256), leaf(gg.F32, 256, 1), leaf(gg.I64, 1)), attention(1, d),
             gg.swiglu_split(leaf(gg.F32, 5632, 1), leaf(gg.F32, 5632, 1)), gg.add(x, x),
             gg.get_rows(leaf(gg.F32, 2048, 8), leaf(gg.I32, 1))]
    return [launch for t in nodes for launch in launches_of(t)]


def walker_built(launches, cc):
    """The Binary of the launches' walker, which fits a multiprocessor and spills no more than is let through."""
    from ggjit.cuda import walk, walk_table
    from ggjit.ops.cuda.compiler.build import walker_binary
    from ggjit.ops.cuda.native.walk import walker_of
    walker, _ = walker_of(launches)
    b = walker_binary(walker, cc)
    print(f"walker of {len(walker.launches)} kernels, {walker.threads} threads, sm_{cc[0]}{cc[1]}: {b.registers} "
          f"registers, {b.spill_nbytes} bytes of stack and spills, {len(b.cubin)} bytes, pieces {b.pieces}")
    assert b.cubin[:4] == b"\x7fELF" and b.symbol.encode() in b.cubin
    assert -(-b.registers // 8) * 8 * walker.threads <= 1 << 16 and b.spill_nbytes <= walk.MOST_SPILLED
    assert len(b.pieces) == len(walker.launches) and b.shared_nbytes == 0       # all of it is dynamic
    assert all(walk_table.n_teams(walker.threads, x, n) > 0 for x, n in zip(walker.launches, b.pieces, strict=True))
    return walker, b


def test_a_walker_and_kernels_after_it(tmp_path, monkeypatch):
    """Teams are compiled, then ordinary kernels of the same functions: they have nothing of teams.  A second process
    finds the walker in the cache folder."""
    from ggjit.ops.cuda.compiler import build, frontend
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    launches, cc = [*launches_of(product(gg.Q8_0, 1)), *launches_of(gg.rms_norm(leaf(gg.F32, 2048, 1), 1e-6))], (9, 0)
    kernel = launches[-1]
    before = build.compile_kernel(kernel.make(), cc)
    walker, b = walker_built(launches, cc)
    after = build.compile_kernel(kernel.make(), cc)
    assert (after.registers, after.shared_nbytes) == (before.registers, before.shared_nbytes)
    assert "ggjit_dynamic" not in frontend.ptx(kernel.make(), cc)
    monkeypatch.setattr(build, "compile_walker", lambda *a: pytest.fail("compiled again"))
    assert build.walker_binary(walker, cc) == b


@pytest.mark.slow
@pytest.mark.parametrize("cc", ARCHITECTURES, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
@pytest.mark.parametrize("type", ["F32", "F16", "Q4_0", "Q8_0", "Q4_K"])
def test_walkers_of_a_token(type, cc):
    walker_built(decoding(getattr(gg, type)), cc)


def test_no_double_precision_in_hot_kernels():
    """A float literal in a kernel is a float64, which costs 64 times as much on most GPUs."""
    from ggjit.ops.cuda.compiler import frontend
    for t in (product(gg.Q4_K, 1), product(gg.F16, 64), attention()):
        ptx = frontend.ptx(launches_of(t)[-1].make(), (9, 0))
        lines = [line for line in ptx.splitlines() if ".f64" in line and not line.lstrip().startswith((".", "//"))]
        assert not lines, lines[:5]


def conforms(names):
    """The kernels of that name, which the simulator runs too, become cubins of one 8-byte parameter."""
    from helpers.cuda_conformance import KERNELS

    from ggjit.ops.cuda.compiler import contract, core, frontend
    from ggjit.ops.cuda.compiler.build import compile_kernel
    assert set(CONFORMANCE.split()) == set(KERNELS)
    assert all(hasattr(core, name) for name in (*contract.functions(), *contract.MAKERS))
    for name in names:
        kernel, _ = KERNELS[name]
        built = compile_kernel(kernel, (9, 0))
        assert built.cubin[:4] == b"\x7fELF" and built.symbol.encode() in built.cubin and built.spill_nbytes == 0
        assert len(re.findall(r"\.param \.u64", frontend.ptx(kernel, (9, 0)).split(".entry")[1].split(")")[0])) == 1


@pytest.mark.parametrize("name", sampled([(n,) for n in CONFORMANCE.split()], lambda case: ["one"]))
def test_numba_cuda_serves_the_seam(name):
    conforms([name])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("numba_cuda_mlir") is None, reason="pip install 'ggjit[gpu-mlir]'")
def test_numba_cuda_mlir_serves_the_seam(python):
    """All twelve, attention with tensor cores and a sample of what runs on devices, in a process where it is the
    compiler."""
    r = python(f"import sys; sys.path += {[str(ROOT / 'tests'), str(HERE)]!r}\n"
               f"import test_cuda_compile as t; t.conforms(t.CONFORMANCE.split())\n"
               f"[t.built(x, (9, 0)) for x in t.launches_of(t.attention(64, 64))]\n"
               f"t.test_a_sample_of_all_kernels_compiles()",
               GGJIT_CUDA_COMPILER="numba-cuda-mlir")
    assert r.returncode == 0, r.stderr[-3000:]


def test_numba_cuda_has_every_function_of_the_seam():
    from ggjit.ops.cuda.compiler import contract, core
    of_numba_cuda = contract.functions((contract.WALKING, contract.WARPGROUPS))
    for name, (n_parameters, _) in {**contract.functions(), **of_numba_cuda}.items():
        f = getattr(core, name)
        f, extra = (f.py_func, 0) if hasattr(f, "py_func") else (f._defn, 1)            # intrinsics: typingctx first
        assert len(inspect.signature(f).parameters) == n_parameters + extra, name
    assert all(hasattr(core, name) for name in (*contract.MAKERS, *contract.WARPGROUP_MAKERS))


def test_an_unknown_gpu_is_a_typed_error():
    from ggjit.ops.cuda.compiler.build import compile_kernel
    with pytest.raises(gg.NotSupported, match="3.5"):
        compile_kernel(launches_of(gg.neg(leaf(gg.F32, 4)))[0].make(), (3, 5))


@pytest.mark.parametrize("name,what", [
    ("_served", "load"), ("frontend.ltoir", "compile kernels"), ("Linker", "link kernels")])
def test_a_toolkit_that_does_not_fit_is_a_typed_error(monkeypatch, name, what):
    from ggjit.ops.cuda.compiler import build

    def absent(*args, **kwargs):
        raise RuntimeError("no libnvJitLink.so.13")
    monkeypatch.setattr(build.frontend, "ltoir", lambda func, cc: [])
    monkeypatch.setattr(f"ggjit.ops.cuda.compiler.build.{name}", absent)
    with pytest.raises(gg.NotSupported, match=f"does not {what} .no libnvJitLink.*pip install"):
        build.compile_kernel(lambda node: None, (9, 0))


def test_compiled_kernels_are_kept(tmp_path, monkeypatch):
    from ggjit.ops.cuda.compiler import build
    launch = launches_of(gg.neg(leaf(gg.F32, 4)))[0]
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    first = build.binary(launch, (9, 0))
    monkeypatch.setattr(build, "compile_kernel", lambda *a: pytest.fail("compiled again"))
    assert build.binary(launch, (9, 0)) == first
    file, = (tmp_path / "cuda").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    monkeypatch.undo()
    monkeypatch.setenv("GGJIT_CACHE_DIR", str(tmp_path))
    assert build.binary(launch, (9, 0)).registers == first.registers        # a damaged file: compiled again


def test_numba_still_asks_the_current_gpu():
    """What ops/cuda/compiler/frontend.py works around; when this fails, the workaround can go."""
    from numba import cuda, types
    helper = cuda.jit(device=True)(lambda x: x + 1)
    with pytest.raises(Exception, match="(?i)driver|CUDA"):
        cuda.compile(lambda x: helper(x), types.void(types.int64), device=False, abi="numba", cc=(9, 0), output="ptx")


def test_the_simulated_driver_takes_what_the_driver_takes(python):
    """Same functions, same number of arguments: what runs in the simulator calls the driver rightly."""
    from cuda.bindings import driver
    r = python("import inspect; from ggjit.cuda import simulated_driver as cuda_sim\n"
               "for n in dir(cuda_sim):\n"
               "    f = getattr(cuda_sim, n)\n"
               "    if n.startswith('cu') and hasattr(f, '__wrapped__'):\n"
               "        print(n, *inspect.signature(f.__wrapped__).parameters)", NUMBA_ENABLE_CUDASIM="1")
    assert r.returncode == 0, r.stderr
    lines = [line.split() for line in r.stdout.splitlines()]
    assert len(lines) > 30
    for name, *ours in lines:
        assert ours == list(inspect.signature(getattr(driver, name)).parameters), name


def test_all_ops_of_llama_and_bert_have_kernels():
    from ggjit.ops.cuda.native.launch import makers
    wanted = "ADD MUL SCALE NORM RMS_NORM L2_NORM MUL_MAT MUL_MAT_ID GET_ROWS SET_ROWS CPY CONT DUP ROPE SOFT_MAX " \
             "FLASH_ATTN_EXT GLU UNARY SUM_ROWS MEAN CONCAT"
    assert {OP[n] for n in wanted.split()} <= set(makers())
