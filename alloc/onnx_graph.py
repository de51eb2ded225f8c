"""The intermediate results of an ONNX graph as an offset problem.  Shapes are read, and of weights only small
ones, on which shapes may depend.

A result lives from its node to the last node that reads it, an output of the graph to the end; steps are nodes.
Inputs and weights lie elsewhere, as they do in onnxruntime.  Nodes that only name memory anew (Reshape, Squeeze,
Unsqueeze, Flatten, Identity) take none.  A name in a subgraph (If, Loop, Scan) counts as read by its node; what lies
inside does not count.
"""
import math
import os

import numpy as np

from ggjit.alloc.traces import AllocationTrace
from ggjit.ops.core.errors import BadFile, ParamError, extra

RENAMES = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}
MAX_FOLDED = 1 << 12            # items of values that are computed, since shapes may depend on them
_ITEM_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2, "STRING": 64}


def read_onnx(path, dims=()):
    """The AllocationTrace of a model.  dims: {name of a dimension: its size}, for those that the file leaves open.

    Errors: BadFile; ParamError for a dimension that is still open, with its name; MissingExtra without onnx.
    """
    onnx = extra("onnx", "onnx")
    try:
        model = onnx.load(os.fspath(path), load_external_data=False)
        if not model.graph.node:
            raise BadFile("not an ONNX model, or one without nodes")
        _set_dims(model.graph, dict(dims))
        _without_weights(onnx, model.graph)
        constants, graph = _Constants(onnx, model), None
        while graph is None or constants.fold(graph):       # more shapes are known then
            model = onnx.shape_inference.infer_shapes(model)
            graph = model.graph
    except OSError:
        raise
    except (ParamError, BadFile):
        raise
    except Exception as e:                      # protobuf and onnx have errors of many kinds, some of them bare
        said = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise BadFile(f"not an ONNX model that onnx can read: {said}") from None
    return _trace(onnx, graph)


def _without_weights(onnx, graph):
    """Large initializers become inputs of their type and shape, since each inference copies the model."""
    large = [x for x in graph.initializer if math.prod(x.dims) > MAX_FOLDED]
    small = [x for x in graph.initializer if math.prod(x.dims) <= MAX_FOLDED]
    inputs = {v.name for v in graph.input}
    graph.input.extend(onnx.helper.make_tensor_value_info(x.name, x.data_type, list(x.dims)) for x in large
                       if x.name not in inputs)
    del graph.initializer[:]
    graph.initializer.extend(small)


class _Constants:
    """Values of a model that follow from its shapes and constants, such as the length of a position table's slice."""

    def __init__(self, onnx, model):
        self.onnx, self.opsets = onnx, {o.domain: o.version for o in model.opset_import}
        self.evaluator = extra("onnx.reference", "onnx").ReferenceEvaluator
        self.failed = set()                     # names of values that onnx's own evaluator cannot compute

    def fold(self, graph):
        """Nodes of known values become initializers; whether there was one."""
        values = {x.name: self.onnx.numpy_helper.to_array(x) for x in graph.initializer
                  if x.data_location != self.onnx.TensorProto.EXTERNAL}
        types = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input, *graph.output)}
        left = []
        for node in graph.node:
            found = self._computed(node, values, types)
            values |= found
            graph.initializer.extend(self.onnx.numpy_helper.from_array(a, name) for name, a in found.items())
            left += [] if found else [node]
        n_before = len(graph.node)
        del graph.node[:]
        graph.node.extend(left)
        return len(left) < n_before

    def _computed(self, node, values, types):
        """{name: array} of the node's results; {} where its inputs are not known or its results are large."""
        sizes = [_sizes(types.get(name)) for name in node.output]
        if None in sizes or sum(map(math.prod, sizes)) > MAX_FOLDED or node.domain not in ("", "ai.onnx") or \
                node.op_type.startswith("Random") or any(a.HasField("g") or a.graphs for a in node.attribute) or \
                not self.failed.isdisjoint(node.output):
            return {}
        inputs = {name: values.get(name) for name in node.input if name}
        if node.op_type == "Shape" and _sizes(types.get(node.input[0])) is not None:
            inputs = {node.input[0]: np.broadcast_to(np.False_, _sizes(types[node.input[0]]))}
        if any(value is None for value in inputs.values()):
            return {}
        try:
            made = self.evaluator(node, opsets=self.opsets).run(None, inputs)
        except Exception:                       # whatever NumPy or the evaluator refuses: the shape stays unknown
            self.failed |= set(node.output)
            return {}
        return dict(zip(node.output, map(np.asarray, made), strict=True))


def _sizes(t):
    """The shape of a tensor type, None where a dimension is open."""
    if t is None or not t.HasField("shape") or not all(d.HasField("dim_value") for d in t.shape.dim):
        return None
    return tuple(d.dim_value for d in t.shape.dim)


def _set_dims(graph, dims):
    """Write the sizes of named dimensions into the graph's inputs.  Errors: ParamError for a name that none has."""
    named = _open_dims(graph)
    for name, size in dims.items():
        if name not in named:
            raise ParamError(f"--dim {name}: the model's inputs have no such dimension; they have "
                             f"{', '.join(named) or 'none that is open'}")
        if not str(size).isdecimal() or not 0 < int(size) < 1 << 40:
            raise ParamError(f"--dim {name}={size}: expected a size, 1 or more")
        for d in named[name]:
            d.dim_value = int(size)
    if dims:                                    # what was inferred for open dimensions is inferred again
        del graph.value_info[:]
        for value in graph.output:
            for d in value.type.tensor_type.shape.dim:
                if d.dim_param in dims:
                    d.dim_value = int(dims[d.dim_param])


def _open_dims(graph):
    """{name: [dimension]} of the inputs' dimensions without a size."""
    named = {}
    for value in graph.input:
        for d in value.type.tensor_type.shape.dim:
            if d.dim_param and not d.HasField("dim_value"):
                named.setdefault(d.dim_param, []).append(d)
    return named


def _trace(onnx, graph):
    types = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.output)}
    kept, nodes = {v.name for v in graph.output}, list(graph.node)
    given = {v.name for v in (*graph.input, *graph.initializer)}
    base, last = {}, {}
    for i, node in enumerate(nodes):
        if node.op_type in RENAMES and node.input:
            base[node.output[0]] = base.get(node.input[0], node.input[0])
        for name in _reads(node):
            last[base.get(name, name)] = i
    for name in kept:
        last[base.get(name, name)] = len(nodes)
    found, named = AllocationTrace([], [], [], [], None, "ONNX"), _open_dims(graph)
    remedy = f"give {' '.join(f'--dim {x}=SIZE' for x in named)}" if named else \
        "save the model with the shapes of its results"
    for i, node in enumerate(nodes):
        for name in node.output:
            if name and name not in base and name not in given:
                found.add(i, max(last.get(name, i), i) + 1, _nbytes(onnx, types, name, node, remedy), name)
    return found


def _reads(node):
    """Names that a node reads, subgraphs included."""
    yield from (name for name in node.input if name)
    for a in node.attribute:
        for inner in ([a.g] if a.HasField("g") else []) + list(a.graphs):
            for child in inner.node:
                yield from _reads(child)
            yield from (v.name for v in inner.output)


def _nbytes(onnx, types, name, node, remedy):
    sizes = _sizes(types.get(name))
    if sizes is None:
        raise ParamError(f"the shape of {name!r} of node {node.name or node.op_type!r} ({node.op_type}) is open; "
                         f"{remedy}")
    kind = onnx.TensorProto.DataType.Name(types[name].elem_type)
    bits = _ITEM_BITS.get(kind) or 8 * onnx.helper.tensor_dtype_to_np_dtype(types[name].elem_type).itemsize
    return -(-math.prod(sizes) * bits // 8)
