"""Names of NumPy and PyTorch with their equivalents in ggjit, for the message of an AttributeError."""
import difflib

from ggjit.ops.core.spec import builders

PLAN = "cpu.graph_plan_create(graph) to run it often, or gg.measure(graph) for where its tensors lie"
OF_TENSORS = {
    **dict.fromkeys(("astype", "half", "bfloat16", "float", "double"), 'gg.cast(t, "F16"), "BF16" or "F32"'),
    "to": 'gg.cast(t, "F16") for a type; gg.compute(y, backend=gpu) and gg.Scheduler choose where nodes run',
    "dtype": "t.type", "copy": "gg.dup(t)", "clone": "gg.dup(t)", "contiguous": "gg.cont(t)",
    "flatten": "t.reshape(-1)", "ravel": "t.reshape(-1)",
    "view": "t.reshape(...)", "permute": "t.transpose(...), which takes the same axes", "swapaxes": "t.transpose(...)",
    "squeeze": "t.reshape(...)", "unsqueeze": "t[None]", "tolist": "gg.compute(t).tolist()",
    **dict.fromkeys(("cpu", "cuda", "detach", "requires_grad_", "eval"), "nothing: t.numpy() copies its values"),
    "plan": "gg.measure(t) for where its sources lie, or cpu.graph_plan_create(gg.Graph(t))",
    "max": "gg.compute(t).max()", "min": "gg.compute(t).min()", "std": "gg.compute(t).std()",
    "sum": "gg.sum(t), or gg.sum_rows(t) of each row", "mean": "gg.mean(t) of each row", "softmax": "gg.soft_max(t)",
    "matmul": "t @ u", "dot": "t @ u", "backward": "gg.grad(t, [w])", "grad": "gg.grad(loss, [t])"}
OF_MODULE = {
    "matmul": "gg.mul_mat(w, x), which is x @ w.T", "linear": "gg.mul_mat(w, x)", "dot": "gg.mul_mat(w, x)",
    "einsum": "gg.mul_mat(w, x)", "concatenate": "gg.concat(a, b, dim)", "cat": "gg.concat(a, b, dim)",
    "array": "gg.tensor(values)", "zeros": "gg.tensor(np.zeros(...))",
    "ones": "gg.tensor(np.ones(...))", "embedding": "gg.get_rows(table, ids)", "layer_norm": "gg.norm(x, eps)",
    "where": "gg.compute(t) and NumPy", "max": "gg.compute(t).max()", "min": "gg.compute(t).min()",
    "no_grad": "nothing: gradients are asked for, by gg.grad(loss, [w])", "float16": "gg.F16", "float32": "gg.F32",
    "bfloat16": "gg.BF16", "int32": "gg.I32", "int64": "gg.I64",
    # names of ggml for which there is no function here
    "init": "gg.Context()", "free": "ctx.free()", "to_numpy": "t.numpy(), or gg.compute(t) of a result",
    **dict.fromkeys(("new_graph", "build_forward", "build_forward_expand"), "gg.Graph(y)"),
    **dict.fromkeys(("graph_compute", "graph_compute_with_ctx", "run"), "gg.compute(y), or cpu.graph_compute(graph)"),
    **dict.fromkeys(("new_tensor", "new_tensor_1d", "new_tensor_2d", "new_tensor_3d", "new_tensor_4d"),
                    "ctx.new_tensor(gg.F32, (ne0, ne1))"),
    **dict.fromkeys(("backend_cpu_init", "backend_init", "backend_init_by_name"), "gg.init_backend(\"CPU\")"),
    **dict.fromkeys(("gallocr_new", "gallocr_alloc_graph"), "gg.GraphAllocator(cpu).alloc_graph(graph)"),
    "backend_sched_new": "gg.Scheduler([gpu, cpu])", "nbytes": "t.nbytes", "nelements": "t.size",
    "get_data": "t.numpy()", **dict.fromkeys(("set_f32", "set_data"), "t.set(values)"),
    **dict.fromkeys(("load_model", "load", "Model", "Llama", "from_pretrained"),
                    "from ggjit.models import load_model"),
    "generate": "from ggjit.models import load_model; load_model(path).generate(prompt)",
    **dict.fromkeys(("plan", "graph_plan", "graph_plan_create"), PLAN)}
OF_GRAPHS = {
    **dict.fromkeys(("compute", "run", "eval", "execute", "forward"), "gg.compute(graph)"),
    **dict.fromkeys(("plot", "show"), "graph.draw()"), "peak": "gg.measure(graph).peak",
    **dict.fromkeys(("measure", "memory"), "gg.measure(graph)"), "n_nodes": "len(graph.nodes)",
    "backward": "gg.grad(loss, [w])",
    "plan": PLAN,
    "pareto": "gg.measure(graph).pareto()"}

OF_PLANS = {
    **dict.fromkeys(("run", "execute", "eval", "forward", "replay"), "plan.compute()"),
    **dict.fromkeys(("profile", "time"), "with gg.profile() as p: plan.compute()"),
    **dict.fromkeys(("outputs", "results", "values"), "plan.numpy(y)"),
    **dict.fromkeys(("memory", "measure", "peak"), "gg.measure(plan.graph)")}


def of_a_plan(name):
    """"; write ..." for a name that plans lack, or ""."""
    return f"; write {OF_PLANS[name]}" if name in OF_PLANS else ""


def of_a_graph(name):
    """"; write ..." for a name that graphs lack, or ""."""
    return f"; write {OF_GRAPHS[name]}" if name in OF_GRAPHS else ""


def of_a_tensor(name):
    """"; write ..." for a name that tensors lack, or ""."""
    instead = OF_TENSORS.get(name) or name in builders() and f"gg.{name}(t)"
    return f"; write {instead}" if instead else ""


def of_the_module(name, known):
    """"; write ..." or the nearest of the known names, for one that the module lacks."""
    own = name.removeprefix("ggml_")
    if own in OF_MODULE:
        return f"; write {OF_MODULE[own]}"
    if own in known:
        return f"; ggml's names have no prefix here: gg.{own}"
    close = difflib.get_close_matches(name, known, 1, 0.75)
    return f" (did you mean {close[0]}?)" if close else ""
