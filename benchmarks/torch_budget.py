"""What PyTorch's activation-memory budget pays on a network: its partitioned graphs, counted.

    forward and loss --AOTAutograd--> one graph --min cut, then knapsack over saved bytes--> forward, backward

Both graphs are walked in their order: bytes alive (storages, freed behind their last reader; parameters and the batch
count nothing, gradients of parameters do), and max(operations, 16 bytes moved) as the cost of a node.  The peak of a
budget is that of these graphs; PyTorch itself looks at the bytes that are saved between them.
"""
import torch
import torch._functorch.config as settings
from functorch.compile import (
    aot_function,
    default_partition,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch.utils.flop_counter import flop_registry

FLOPS_PER_BYTE = 16             # that a machine does while it moves one
BUDGETS = 1.0, 0.8, 0.6, 0.45, 0.3, 0.2, 0.1, 0.0


def graphs(net, batch, budget):
    """[forward, backward] as torch.fx graphs; budget None: everything that is read later is saved."""
    forward, params = net.torch()
    shape = (batch, *net.shape) if hasattr(net, "shape") else (batch, 3, net.side, net.side) if hasattr(net, "side") \
        else (batch, net.n_ctx)
    x = torch.zeros(shape, dtype=torch.int64 if hasattr(net, "n_ctx") else torch.float32)
    with torch.no_grad():
        labels = torch.zeros(forward(x).shape[0], dtype=torch.int64)
    found = []

    def keep(graph, _):
        found.append(graph.graph)
        return make_boxed_func(graph.forward)

    def loss(x, labels, *values):
        for p, v in zip(list(params), values, strict=True):
            params[p] = v
        return torch.nn.functional.cross_entropy(forward(x), labels)
    partition = default_partition if budget is None else min_cut_rematerialization_partition
    values = x, labels, *params.values()
    with settings.patch(activation_memory_budget=1.0 if budget is None else budget):
        aot_function(loss, fw_compiler=keep, bw_compiler=keep, partition_fn=partition)(*values).backward()
    return found


def tensors(value):
    """The tensors among a node's values."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors(v)] if isinstance(value, tuple | list) else []


def storage(t):
    return t.untyped_storage()._cdata


def cost_of(node):
    """Operations, or what moving its bytes is worth; nothing for views."""
    out = tensors(node.meta.get("val"))
    ins = [t for n in node.all_input_nodes for t in tensors(n.meta.get("val"))]
    if not out or {storage(t) for t in out} <= {storage(t) for t in ins}:
        return 0
    moved = sum(t.numel() * t.element_size() for t in (*out, *ins))
    packet, flops = getattr(node.target, "overloadpacket", None), 0
    if packet in flop_registry:
        def val(a):
            return torch.fx.node.map_arg(a, lambda n: n.meta["val"])
        flops = flop_registry[packet](*val(node.args), **val(node.kwargs), out_val=node.meta["val"])
    return max(flops, FLOPS_PER_BYTE * moved)


def storages(nodes):
    """{storage: bytes} of the values of nodes."""
    return {storage(t): t.untyped_storage().nbytes() for n in nodes for t in tensors(n.meta.get("val"))}


def walk(graph, resident):
    """(most bytes alive, cost) of a graph whose inputs count until they are read last; resident: names of those that
    do not."""
    nodes = list(graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    free = storages(n for n in inputs if n.name in resident)
    alive = storages(n for n in inputs if n.name not in resident)
    last = {key: k for k, node in enumerate(nodes) for key in storages((*node.all_input_nodes, node))}
    most, cost = sum(alive.values()), 0
    for k, node in enumerate(nodes):
        if node.op == "call_function":
            cost += cost_of(node)
            for key, nbytes in storages([node]).items():
                if key not in free:
                    alive.setdefault(key, nbytes)
            most = max(most, sum(alive.values()))
            for key in [key for key in alive if last[key] <= k]:        # what is put out is read by the last node
                del alive[key]
    return most, cost


def step(net, batch, budget):
    """(peak bytes, cost) of a training step."""
    forward, backward = graphs(net, batch, budget)
    stays = {n.name for n in forward.nodes if n.op == "placeholder"}
    parts = [walk(graph, stays) for graph in (forward, backward)]
    return max(peak for peak, _ in parts), sum(cost for _, cost in parts)


def cheapest(net, batch, shares):
    """([extra cost within each share of the peak without recomputation; None: no budget has such a peak], least peak
    as a share)."""
    peak, cost = step(net, batch, None)
    found = [step(net, batch, budget) for budget in BUDGETS]
    return ([min((c / cost - 1 for p, c in found if p <= share * peak), default=None) for share in shares],
            min(p for p, _ in found) / peak)
