"""Other programs' traces: ggml's log, ONNX graphs, plans as CSV; what was taken, and where one contradicts itself."""
import re

import numpy as np
import pytest
from helpers.processes import ggjit, result

import ggjit as gg
from ggjit.alloc.csvio import read_trace, run_plan_csv
from ggjit.alloc.graph_alloc import plan_graph
from ggjit.alloc.plan_request import PlanOptions
from ggjit.graphs.requests import plan_request
from ggjit.ops.core.errors import BadFile, ParamError

TAKE = "ggml_dyn_tallocr_alloc: allocating {} ({} bytes) - block 0, offset {}, chunk {}"
FREE = "ggml_gallocr_free_node: freeing {} at {{chunk={}, offset={}}} ({} bytes) - n_free_blocks = 1"


def write(path, *lines):
    path.write_text("load: something else\n" + "\n".join(lines) + "\n")
    return path


def log_of(plan):
    """The lines that ggml writes while it makes this GraphPlan."""
    lines = []
    for kind, a, nbytes, _ in plan.events.tolist():
        name, at, chunk = f"t{a}", int(plan.a_offs[a]), int(plan.a_chunk[a])
        if kind == 0:
            lines.append(TAKE.format(name, nbytes, at, chunk))
        elif kind == 1:
            lines.append(FREE.format(name, chunk, at, nbytes))
        else:
            lines.append(f"freeing extra {int(plan.a_size[a]) - nbytes} bytes from parent {name} for t")
    return lines


@pytest.fixture(scope="module")
def plan():
    ctx, rng = gg.Context(), np.random.default_rng(7)
    live = [gg.relu(ctx.new_tensor(gg.F32, (64, 8)))]
    for _ in range(40):
        a = live[rng.integers(max(0, len(live) - 4), len(live))]
        live.append(gg.mul_mat(ctx.new_tensor(gg.F32, (a.ne[0], int(rng.integers(1, 9)) * 32)), a))
    gg.alloc_ctx_tensors(ctx, gg.init_backend("NULL"))
    graph = gg.Graph(live[-1])
    return plan_graph(plan_request(graph, [gg.init_backend("NULL").default_buffer_type]), PlanOptions())


def test_ggmls_log_is_its_plan(plan, tmp_path):
    trace = read_trace(write(tmp_path / "ggml.log", *log_of(plan)))
    assert trace.taken == plan.peak and trace.what == "ggml"
    assert sorted(trace.size) == sorted(plan.a_size.tolist())
    found = run_plan_csv(tmp_path / "ggml.log", picture=tmp_path / "plan.png")
    assert found["lower_bound"] == plan.lower_bound <= found["peak"] <= found["taken"]
    assert (tmp_path / "plan.png").stat().st_size > 1000
    assert f"ggml held {plan.peak:,} bytes" in ggjit("plan", tmp_path / "ggml.log").stdout


def test_a_log_of_several_graphs_gives_the_largest(plan, tmp_path):
    """They are reserved one after the other: outputs of the first still lie there when the next one begins."""
    small = [TAKE.format("x", 320, 0, 0), TAKE.format("y", 64, 320, 0), FREE.format("x", 0, 0, 320)]
    for lines in (small + log_of(plan), log_of(plan) + small, log_of(plan) * 2):
        trace = read_trace(write(tmp_path / "ggml.log", *lines))
        assert trace.taken == plan.peak and len(trace.ids) >= len(plan.a_id)


def test_older_logs_and_ends_that_are_given_back(tmp_path):
    path = write(tmp_path / "old.txt", "alloc: allocating a b (100 bytes) - block 0, offset 0",
                 "freeing extra 40 bytes from parent a b for c", "alloc: allocating d (40 bytes) - block 0, offset 60",
                 "free: freeing c at 0 (60 bytes) - n_free_blocks = 1")
    trace = read_trace(path)
    assert trace.taken == 100 and list(zip(trace.lower, trace.upper, trace.size, strict=True)) == [
        (0, 4, 60), (0, 2, 40), (2, 4, 40)]
    assert run_plan_csv(path)["lower_bound"] == 100


def test_buffers_of_no_bytes_lie_where_others_begin(tmp_path):
    path = write(tmp_path / "empty.log", TAKE.format("none", 0, 0, 0), TAKE.format("a", 64, 0, 0),
                 FREE.format("none", 0, 0, 0), FREE.format("a", 0, 0, 64), TAKE.format("b", 64, 0, 0))
    trace = read_trace(path)
    assert trace.taken == 64 and list(zip(trace.lower, trace.upper, trace.size, strict=True)) == [
        (0, 2, 64), (2, 3, 64)]


@pytest.mark.parametrize(("lines", "text"), [
    ([], "no line was written by ggml's allocator"),
    ([TAKE.format("a", 64, 0, 0), TAKE.format("b", 64, 32, 0)],
     "line 3: 64 bytes at 32 overlap the 64 bytes at 0 of line 2, which were not freed"),
    ([TAKE.format("a", 64, 0, 0), FREE.format("a", 0, 32, 64)], "line 3: nothing that was allocated lies at offset 32"),
    ([TAKE.format("a", 1 << 63, 0, 0)], "do not fit 62 bits")])
def test_damaged_logs_say_where(tmp_path, lines, text):
    path = write(tmp_path / "bad.log", *lines)
    with pytest.raises(BadFile, match=re.escape(text)):
        read_trace(path)


def test_a_csv_with_offsets_is_somebodys_plan(tmp_path):
    path = tmp_path / "plan.csv"
    path.write_text("id,lower,upper,size,offset\na,0,2,64,0\nb,1,3,32,64\nc,2,4,64,0\nd,9,9000000000,1,200\n")
    assert result(ggjit, "plan", path)["taken"] == 201
    assert run_plan_csv(path, picture=tmp_path / "plan.svg")["peak"] == 96
    path.write_text("id,lower,upper,size,offset\na,0,3,64,0\nb,1,3,32,64\n\nc,2,4,64,0\n")
    with pytest.raises(BadFile, match="line 5: 64 bytes at 0 overlap the 64 bytes at 0 of line 2"):
        run_plan_csv(path)
    path.write_text("id,lower,upper,size,offset\na,0,3,64,-1\n")
    with pytest.raises(BadFile, match="line 2: offset -1 is negative"):
        run_plan_csv(path)


# ---------------------------------------------------------------- ONNX
def model_of(onnx, n="batch"):
    h, kind = onnx.helper, onnx.TensorProto.FLOAT
    w = h.make_tensor("w", kind, [8, 16], np.zeros(128).tolist())
    shape = h.make_tensor("shape", onnx.TensorProto.INT64, [2], [-1, 32])
    nodes = [h.make_node("MatMul", ["x", "w"], ["a"]), h.make_node("Relu", ["a"], ["b"]),
             h.make_node("Reshape", ["b", "shape"], ["c"]), h.make_node("Add", ["c", "c"], ["y"])]
    graph = h.make_graph(nodes, "g", [h.make_tensor_value_info("x", kind, [n, 8])],
                         [h.make_tensor_value_info("y", kind, None)], [w, shape])
    return h.make_model(graph)


def test_onnx_graphs_by_shape(tmp_path):
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "m.onnx"
    onnx.save(model_of(onnx), path)
    trace = read_trace(path, {"batch": "4"})
    assert list(zip(trace.ids, trace.lower, trace.upper, trace.size, strict=True)) == [
        ("a", 0, 2, 256), ("b", 1, 4, 256), ("y", 3, 5, 256)], "c is b by another name"
    found = result(ggjit, "plan", path, "--dim", "batch=4")
    assert found["peak"] == found["lower_bound"] == 512 and "taken" not in found
    with pytest.raises(ParamError, match="is open; give --dim batch=SIZE$"):
        read_trace(path)
    with pytest.raises(ParamError, match="no such dimension; they have batch"):
        read_trace(path, {"seq": "4"})
    with pytest.raises(ParamError, match="expected a size"):
        read_trace(path, {"batch": "-4"})
    path.write_bytes(b"no model")
    with pytest.raises(BadFile, match="not an ONNX model"):
        read_trace(path)
    with pytest.raises(ParamError, match="for ONNX graphs"):
        read_trace(tmp_path / "x.csv", {"batch": "4"})


def test_onnx_shapes_that_follow_from_shapes(tmp_path):
    """Each layer cuts a table at the length of its input; a shape that no dimension of the inputs tells stays open."""
    onnx = pytest.importorskip("onnx")
    h, kind = onnx.helper, onnx.TensorProto.FLOAT
    constants = [onnx.numpy_helper.from_array(np.array(v, np.int64), name) for name, v in (("0", [0]), ("1", [1]))]
    table = onnx.numpy_helper.from_array(np.zeros((512, 32), np.float32), "table")
    nodes, x = [], "x"
    for i in range(3):
        nodes += [h.make_node("Shape", [x], [f"s{i}"]), h.make_node("Gather", [f"s{i}", "1"], [f"n{i}"]),
                  h.make_node("Slice", ["table", "0", f"n{i}", "0"], [f"t{i}"]),
                  h.make_node("Add", [x, f"t{i}"], [f"x{i}"])]
        x = f"x{i}"
    last = [h.make_node("NonZero", [x], ["where"]), h.make_node("Cast", ["where"], ["y"], to=kind)]

    def save(nodes, out):
        graph = h.make_graph(nodes, "g", [h.make_tensor_value_info("x", kind, [2, "n", 32])],
                             [h.make_tensor_value_info(out, kind, None)], [*constants, table])
        onnx.save(h.make_model(graph), tmp_path / "m.onnx")
        return tmp_path / "m.onnx"
    trace = read_trace(save(nodes, x), {"n": "10"})
    assert dict(zip(trace.ids, trace.size, strict=True)) == {f"{k}{i}": n for i in range(3)
                                                             for k, n in (("t", 1280), ("x", 2560))}
    with pytest.raises(ParamError, match="'Slice' .Slice. is open; give --dim n=SIZE$"):
        read_trace(save(nodes, x))
    with pytest.raises(ParamError, match="NonZero. is open; save the model with the shapes of its results"):
        read_trace(save([*nodes, *last], "y"), {"n": "10"})
    (tmp_path / "m.onnx").write_bytes(b"")
    with pytest.raises(BadFile, match="or one without nodes"):
        read_trace(tmp_path / "m.onnx")
