"""Arguments of the wrong kind for builders, backends, buffers, schedulers and copies: typed errors, nothing changed."""
import gc

import numpy as np
import pytest
from helpers import devices
from helpers.timing import no_collector

import ggjit as gg
from ggjit.core.table import TABLE
from ggjit.models import load_gguf, load_vad
from ggjit.models.text.tokenizer import Tokenizer

WRONG = (None, 5, "x", 1.5, [], object())
CPU = gg.init_backend("CPU:n_threads=1")


@pytest.fixture
def x():
    ctx = gg.Context()
    t = ctx.new_tensor(gg.F32, (8, 4), "x")
    gg.alloc_ctx_tensors(ctx, CPU)
    t.set(np.arange(32, dtype=np.float32).reshape(4, 8))
    return t


def graph_of(t):
    return gg.Graph(gg.silu(t))


OBJECTS = {
    "tensor_set": lambda x, bad: gg.tensor_set(bad, b""),
    "tensor_copy from": lambda x, bad: gg.tensor_copy(bad, x),
    "tensor_copy to": lambda x, bad: gg.tensor_copy(x, bad),
    "tensor_set_async": lambda x, bad: gg.tensor_set_async(bad, x, b"abcd"),
    "tensor_get_async": lambda x, bad: gg.tensor_get_async(bad, x),
    "view_init": lambda x, bad: gg.view_init(bad),
    "graph_copy backend": lambda x, bad: gg.graph_copy(bad, graph_of(x)),
    "graph_copy graph": lambda x, bad: gg.graph_copy(CPU, bad),
    "compare backend": lambda x, bad: gg.compare_graph_backend(bad, CPU, graph_of(x), lambda *a: True),
    "compare graph": lambda x, bad: gg.compare_graph_backend(CPU, CPU, bad, lambda *a: True),
    "compare callback": lambda x, bad: gg.compare_graph_backend(CPU, CPU, graph_of(x), bad),
    "compare nodes": lambda x, bad: gg.compare_graph_backend(CPU, CPU, graph_of(x), lambda *a: True, [bad]),
    "Scheduler": lambda x, bad: gg.Scheduler(bad),
    "Scheduler bufts": lambda x, bad: gg.Scheduler([CPU], bufts=5 if bad is None else bad),
    "sched.numpy": lambda x, bad: gg.Scheduler([CPU]).numpy(bad),
    "get_tensor_backend": lambda x, bad: gg.Scheduler([CPU]).get_tensor_backend(bad),
    "set_tensor_backend": lambda x, bad: gg.Scheduler([CPU]).set_tensor_backend(bad, CPU),
    "graph_compute": lambda x, bad: CPU.graph_compute(bad),
    "graph_plan_create": lambda x, bad: CPU.graph_plan_create(bad),
    "graph_plan_compute": lambda x, bad: CPU.graph_plan_compute(bad),
    "supports_op": lambda x, bad: CPU.supports_op(bad),
    "supports_buft": lambda x, bad: CPU.supports_buft(bad),
    "MultiBuffer": lambda x, bad: gg.MultiBuffer(bad),
    "alloc_buffer": lambda x, bad: CPU.alloc_buffer(-1 if bad == 5 else bad),
    "set_affinity": lambda x, bad: gg.threadpool().set_affinity([bad] if bad in (None, 5) else bad),
    "device": lambda x, bad: gg.registry.device(bad),
    "load": lambda x, bad: gg.registry.load(bad),
    "abort_callback": lambda x, bad: setattr(CPU, "abort_callback", 5 if bad is None else bad),
}
SAYS = {                                # where the error does not name what is called
    "tensor_copy from": "tensor_copy", "tensor_copy to": "tensor_copy",
    "graph_copy backend": "graph_copy takes a Backend", "graph_copy graph": "graph_copy takes a Graph",
    "compare backend": "compare_graph_backend takes a Backend", "compare graph": "compare_graph_backend takes a Graph",
    "compare callback": "the callback must be callable", "compare nodes": "test_nodes takes a Tensor",
    "Scheduler": "Scheduler", "Scheduler bufts": "bufts|buffer types", "sched.numpy": "Scheduler.numpy takes a Tensor",
    "MultiBuffer": "multi-buffer", "alloc_buffer": "buffer size", "set_affinity": "affinity|a core",
    "device": "device takes a str|no device 'x'", "load": "load takes a str"}


@pytest.mark.parametrize("door", OBJECTS)
@pytest.mark.parametrize("bad", WRONG, ids=lambda bad: type(bad).__name__)
def test_objects_of_the_wrong_kind(door, bad, x):
    if door == "set_affinity" and bad == 5:
        bad = 1.5
    error, text = gg.GgjitError, SAYS.get(door, door)
    if (door, bad) == ("load", "x"):
        error, text = ImportError, "No module named 'x'"
    with pytest.raises(error, match=text):
        OBJECTS[door](x, bad)
    assert CPU.abort_callback is None
    np.testing.assert_array_equal(gg.compute(gg.neg(x)), -np.arange(32).reshape(4, 8))


@pytest.mark.parametrize("name", [None, 5, b"CPU"])
def test_registry_names_are_strings(name):
    with pytest.raises(gg.TypeMismatch, match="registry takes a str, got"):
        gg.registry.registry(name)


@pytest.mark.parametrize("module", ["no_such_module", "os", "", ".os"])
def test_modules_that_bring_no_backend(module):
    """A module that does not exist is Python's own ImportError."""
    with pytest.raises(ImportError if module == "no_such_module" else gg.ParamError, match=module or "ggjit_backend"):
        gg.registry.load(module)


# ---------------------------------------------------------------- byte ranges
RANGES = {
    "set offset": lambda x, n: gg.tensor_set(x, b"abcd", n),
    "get offset": lambda x, n: gg.tensor_get(x, n, 4),
    "get nbytes": lambda x, n: gg.tensor_get(x, 0, n),
    "memset offset": lambda x, n: gg.tensor_memset(x, 0, n, 4),
    "bytes": lambda x, n: x.bytes(n, 4),
    "set_bytes": lambda x, n: x.set_bytes(b"abcd", n),
    "2d offset": lambda x, n: gg.tensor_set_2d(x, b"abcdefgh", n, 4, 2, 8, 4),
    "2d nbytes": lambda x, n: gg.tensor_set_2d(x, b"abcdefgh", 0, n, 2, 8, 4),
    "2d n_copies": lambda x, n: gg.tensor_set_2d(x, b"abcdefgh", 0, 4, n, 8, 4),
    "2d stride": lambda x, n: gg.tensor_set_2d(x, b"abcdefgh", 0, 4, 2, n, 4),
    "2d data_stride": lambda x, n: gg.tensor_set_2d(x, b"abcdefgh", 0, 4, 2, 8, n),
    "2d get n_copies": lambda x, n: gg.tensor_get_2d(x, 0, 4, n, 0, 0),
    "2d get data_stride": lambda x, n: gg.tensor_get_2d(x, 0, 4, 2, 8, n),
}


@pytest.mark.parametrize("door", RANGES)
@pytest.mark.parametrize("n", [1.0, "a", -1, 1 << 40, 1 << 70, (1,)], ids=repr)
def test_numbers_that_are_no_place_in_the_tensor(door, n, x):
    before = x.bytes()
    name = {"bytes": "offset", "set_bytes": "offset"}.get(door, door.split()[-1])
    text = "outside x F32|blocks|of zero or more" if isinstance(n, int) else f"^{name} must be an integer, got "
    with pytest.raises(gg.GgjitError, match=text):
        RANGES[door](x, n)
    assert x.bytes() == before


@pytest.mark.parametrize("asynchronous", [False, True])
def test_2d_copies_of_nothing_end_at_once(asynchronous, x):
    before = x.bytes()
    door = (lambda f: lambda *args: f(CPU, *args)) if asynchronous else lambda f: f
    set_2d = door(gg.tensor_set_2d_async if asynchronous else gg.tensor_set_2d)
    get_2d = door(gg.tensor_get_2d_async if asynchronous else gg.tensor_get_2d)
    for nbytes, n_copies in ((0, 1 << 40), (4, 0)):
        set_2d(x, b"abcd", 0, nbytes, n_copies, 0, 0)
        assert bytes(get_2d(x, 0, nbytes, n_copies, 0, 1 << 40)) == b""
    assert x.bytes() == before
    set_2d(x, b"abcd", 4, 4, 3, 0, 0)
    assert bytes(get_2d(x, 4, 4, 2, 0, 5)) == b"abcd\0abcd"


@pytest.mark.parametrize("data", [np.zeros((2, 2), object), np.array(["a", None], object), None, 5, "abcd", [1, 2]],
                         ids=repr)
def test_data_without_bytes(data, x):
    before = x.bytes()
    for call in (lambda: gg.tensor_set(x, data), lambda: x.set_bytes(data), lambda: gg.tensor_set_async(CPU, x, data),
                 lambda: CPU.device.buffer_from_host_ptr(data)):
        with pytest.raises(gg.TypeMismatch, match="expected bytes|takes an array|references, not bytes"):
            call()
    assert x.bytes() == before


def test_a_multi_buffer_holds_no_tensors():
    both = gg.MultiBuffer([CPU.alloc_buffer(64), CPU.alloc_buffer(64)])
    t = gg.Context().new_tensor(gg.F32, (4,), "t")
    with pytest.raises(gg.NotSupported, match="only groups"):
        gg.tensor_alloc(both, t, 0)
    assert t.buffer is None
    gg.tensor_alloc(both[1], t, 0)


def test_errors_of_a_users_callback_come_out_as_they_are(x):
    def callback(i, a, b):
        raise ValueError("mine")
    fake = devices.Fake("A").init_backend()
    with pytest.raises(ValueError, match="^mine$"):
        gg.compare_graph_backend(CPU, fake, graph_of(x), callback)


# ---------------------------------------------------------------- builders
@pytest.mark.parametrize("text,call", [
    (r"add\(tensor F32 .*, None\)", lambda a: gg.add(a, None)),
    (r"soft_max\(<ndarray>\): a tensor is expected, not ndarray", lambda a: gg.soft_max(np.zeros(3))),
    ("cast: type: no tensor type 'complex64'", lambda a: gg.cast(a, np.complex64)),
    (r"mul_mat\('x', ", lambda a: gg.mul_mat("x", a)), (r"mul_mat\(1, ", lambda a: gg.mul_mat(1, a)),
    (r"silu\(5\)", lambda a: gg.silu(5)), (r"scale\(.*, 'x'\)", lambda a: gg.scale(a, "x")),
    (r"scale\(.*, None\)", lambda a: gg.scale(a, None)), (r"scale\(.*, 10+\.\.\.\)", lambda a: gg.scale(a, 10**400)),
    (r"clamp\(.*, None, 1\)", lambda a: gg.clamp(a, None, 1)), ("no tensor type 'F17'", lambda a: gg.cast(a, "F17")),
    (r"norm\(.*, 'x'\)", lambda a: gg.norm(a, "x")), (r"norm\(.*, None\)", lambda a: gg.norm(a, None)),
    (r"reshape_1d\(.*, 'x'\)", lambda a: gg.reshape_1d(a, "x")),
    (r"reshape_1d\(.*, 24.5\)", lambda a: gg.reshape_1d(a, 24.5)),
    (r"permute\(.*, 0, 1, 2, None\)", lambda a: gg.permute(a, 0, 1, 2, None)),
    (r"view_1d\(.*, 4, 'x'\)", lambda a: gg.view_1d(a, 4, "x")),
    ("is too large: ne .8, 1, 1, 1", lambda a: gg.view_2d(a, 8, 1, 2**70, 0)),
    ("is too large: ne .4, 3, 2, 1", lambda a: gg.diag_mask_inf(a, 2**40)),
    (r"soft_max_ext\(.*, None, 'x', 0.0\)", lambda a: gg.soft_max_ext(a, None, "x", 0.0)),
    (r"soft_max_ext\(.*, None, None, 0.0\)", lambda a: gg.soft_max_ext(a, None, None, 0.0)),
    ("split forms take two tensors", lambda a: gg.swiglu_split(a, None)),
    ("split forms take two tensors", lambda a: gg.glu_split(a, None, 2)),
    ("needs alpha and limit", lambda a: gg.glu(a, 3)), (r"set_output\(None\)", lambda a: gg.set_output(None)),
    (r"set_name\(None, 'x'\)", lambda a: gg.set_name(None, "x")),
    ("quantize: the array holds <U1 values", lambda a: gg.quantize(gg.Q4_0, "x")),
    (r"alloc_ctx_tensors\(None, None\)", lambda a: gg.alloc_ctx_tensors(None, None)),
    (r"alloc_ctx_tensors\(<Context>, None\)", lambda a: gg.alloc_ctx_tensors(a.ctx, None)),
    ("buffer type 1 of 1", lambda a: gg.GraphAllocator(gg.init_backend("CPU")).buffer_size(1)),
    ("takes a Graph", lambda a: gg.init_backend("CPU").graph_compute(None)),
    ("from_numpy: not an array", lambda a: gg.from_numpy(a.ctx, [[1], [1, 2]])),
    ("cannot store complex128", lambda a: gg.from_numpy(a.ctx, np.ones(32) * 1j, type=gg.Q8_0)),
    ("from_numpy: cannot store <U1", lambda a: gg.from_numpy(a.ctx, ["a"] * 32, type=gg.Q8_0)),
    ("from_numpy: cannot store <U1", lambda a: gg.from_numpy(a.ctx, np.array(["a"] * 32), type=gg.Q8_0)),
    ("float64 values do not go into I32", lambda a: gg.from_numpy(a.ctx, np.ones(4), type=gg.I32)),
    ("float32 values do not go into I32", lambda a: gg.from_numpy(a.ctx, np.ones(3, np.float32), type=gg.I32)),
    ("1 to 4 integers .*, got 'ab'", lambda a: a.ctx.new_tensor(gg.F32, "ab")),
    ("1 to 4 integers .*, got .True, 2", lambda a: a.ctx.new_tensor(gg.F32, (True, 2))),
    ("1 to 4 integers .*, got None", lambda a: a.ctx.new_tensor(gg.F32, None)),
    ("1 to 4 integers .*, got .nan,", lambda a: a.ctx.new_tensor(gg.F32, (float("nan"),))),
    ("1 to 4 integers .*, got .1.5, 2", lambda a: a.ctx.new_tensor(gg.F32, (1.5, 2))),
    ("1 to 4 integers .*, got .None, 2", lambda a: a.ctx.new_tensor(gg.F32, (None, 2))),
    ("set tensor F32 .*: not an array", lambda a: a.set([[1], [2, 3]])),
    ("set tensor F32 .*: cannot store <U1", lambda a: a.set("x")),
    ("expected bytes or an array, got NoneType", lambda a: a.set_bytes(None)),
    ("a byte is 0 to 255, got 300", lambda a: a.buffer.clear(300))])
def test_wrong_arguments_are_typed_errors_and_change_nothing(call, text):
    ctx = gg.Context()
    a = gg.from_numpy(ctx, np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    with no_collector():                        # it may end contexts of earlier tests
        n, alive, before = len(ctx), TABLE.n_alive(), a.bytes()
        with pytest.raises(gg.GgjitError, match=text):
            call(a)
        assert TABLE.n_alive() == alive
    assert len(ctx) == n and a.bytes() == before


WHOLE = {
    "n_threads": lambda n: gg.init_backend("CPU", n_threads=n).n_threads,
    "n_threads set": lambda n: setattr(CPU, "n_threads", n) or CPU.n_threads,
    "poll": lambda n: setattr(gg.threadpool(), "poll", n) or n,
    "buffer_size": lambda n: gg.GraphAllocator([CPU, gg.init_backend("CPU")]).buffer_size(n),
    "alloc_buffer": lambda n: CPU.alloc_buffer(n).size, "clear": lambda n: CPU.alloc_buffer(8).clear(n),
    "TensorAllocator": lambda n: gg.TensorAllocator(CPU, n).buffer.size,
    "alignment": lambda n: gg.TensorAllocator(CPU, 64, alignment=n if n is True else 32 * n).alignment,
    "tensor_memset": lambda n: gg.tensor_memset(gg.new_f32(gg.Context(), 1.0), n),
    "new_i32": lambda n: gg.new_i32(gg.Context(), n).numpy()[0],
    "group_norm": lambda n: gg.group_norm(gg.new_f32(gg.Context(), 1.0), n, 1e-5).op_params[0],
    "n_tasks": lambda n: gg.map_custom1(gg.new_f32(gg.Context(), 1.0), print, n).op_params[2],
    "token id": lambda n: Vocabulary()._check_id(n)}


class Vocabulary(Tokenizer):
    n_vocab = 2

    def __init__(self):
        pass


@pytest.mark.parametrize("use", WHOLE.values(), ids=WHOLE)
def test_whole_numbers_are_those_of_python_and_numpy(use):
    before, poll = CPU.n_threads, gg.threadpool().poll
    try:
        assert use(np.int64(1)) == use(1)
        for bad in (True, 1.0, [1]):
            with pytest.raises(gg.GgjitError, match="."):
                use(bad)
    finally:
        CPU.n_threads, gg.threadpool().poll = before, poll


@pytest.mark.parametrize("bad", [np.ones(32) * 1j, np.array(["1.5"] * 32), ["1"] * 32, [[1], [1, 2]],
                                 np.array([object()] * 32), None])
def test_quantize_takes_real_numbers(bad):
    for name, call in (("the array", lambda: gg.quantize(gg.Q8_0, bad)),
                       ("imatrix", lambda: gg.quantize(gg.Q4_0, np.ones(32, np.float32), [1j] * 32))):
        with pytest.raises(gg.TypeMismatch, match=f"quantize.*{name} (holds|is not an array)"):
            call()


def test_numbers_that_do_not_fit_a_record_lose_nothing():
    gc.collect()                        # what other tests left behind
    ctx = gg.Context()
    a = gg.from_numpy(ctx, np.ones((4, 4), np.float32))
    alive = TABLE.n_alive()
    for _ in range(50):
        for make in (lambda: gg.view_2d(a, 4, 1, 2**70, 0), lambda: gg.view_2d(a, 0, 4, 2**70, 0),
                     lambda: gg.diag_mask_inf(a, 2**40)):
            with pytest.raises(gg.GgjitError, match="is too large: ne"):
                make()
    assert TABLE.n_alive() == alive


PLACING = {
    "node_ids": lambda g: ALLOCATOR.alloc_graph(g, node_ids=[0.5]),
    "node_ids text": lambda g: ALLOCATOR.reserve(g, "a"),
    "node_ids int": lambda g: ALLOCATOR.plan(g, 3), "leaf_ids": lambda g: ALLOCATOR.plan(g, None, [None]),
    "alloc_deps": lambda g: ALLOCATOR.plan(g, alloc_deps=5),
    "alloc_deps item": lambda g: ALLOCATOR.plan(g, alloc_deps=[1]),
    "alloc_deps text": lambda g: ALLOCATOR.plan(g, alloc_deps=[("a", "b")]),
    "placement": lambda g: ALLOCATOR.placement(None),
    "time_limit": lambda g: gg.GraphAllocator(CPU, "best", time_limit="x"),
    "time_limit nan": lambda g: gg.measure(g, time_limit=float("nan")), "target": lambda g: gg.measure(g, target=3),
    "rules": lambda g: gg.Scheduler([CPU], rules=[]), "plan.numpy": lambda g: planned(g).numpy("x"),
    "compute_and_read": lambda g: planned(g).compute_and_read(None),
    "run_nodes": lambda g: planned(g).run_nodes(-1, 99),
    "plan's placement": lambda g: CPU.graph_plan_create(g, placement=3),
    "parse_seq": lambda g: gg.Allocr.new_measure().set_parse_seq("x"),
    "parse_seq floats": lambda g: gg.Allocr.new_measure().set_parse_seq([0.5]),
    "plan_offsets alignment": lambda g: gg.alloc.plan_offsets([0], [1], [1], alignment="x"),
    "plan_offsets half": lambda g: gg.alloc.plan_offsets([0], [1], [1], alignment=32.5),
    "plan_offsets capacity": lambda g: gg.alloc.plan_offsets([0], [1], [1], capacity="x"),
    "plan_offsets time": lambda g: gg.alloc.plan_offsets([0], [1], [1], time_limit="x")}
ALLOCATOR = gg.GraphAllocator(CPU)


def planned(graph):
    gg.GraphAllocator(CPU).alloc_graph(graph)
    return CPU.graph_plan_create(graph)


@pytest.mark.parametrize("use", PLACING.values(), ids=PLACING)
def test_allocators_and_plans_refuse_what_they_cannot_use(use, x):
    graph = graph_of(x)
    with pytest.raises(gg.GgjitError, match=r"expected|takes|integers|holds pairs|nodes -1 to 99"):
        use(graph)
    ALLOCATOR.alloc_graph(graph)
    CPU.graph_compute(graph)
    assert graph.outputs[0].numpy().shape == (4, 8)


@pytest.mark.parametrize("call,words", [
    (lambda: gg.GraphAllocator(), r"GraphAllocator: missing a required argument: 'target'; .*\(target, planner='ggml'"),
    (lambda: gg.GraphAllocator(CPU, plan="best"), "GraphAllocator: got an unexpected keyword argument 'plan'"),
    (lambda: gg.Scheduler(), "Scheduler: missing a required argument: 'backends'"),
    (lambda: gg.Graph(orders="memory"), "Graph: got an unexpected keyword argument 'orders'"),
    (lambda: load_gguf(), r"load_gguf: missing a required argument: 'path'; it is called as load_gguf\(path, "),
    (lambda: load_gguf(file_path="m.gguf"), "load_gguf: missing a required argument: 'path'"),
    (lambda: load_vad(), "load_vad: missing a required argument: 'path'")])
def test_calls_with_missing_or_unknown_arguments_show_the_signature(call, words):
    with pytest.raises(gg.TypeMismatch, match=words):
        call()
