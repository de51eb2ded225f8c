"""The intermediate results of an ONNX graph as an offset problem, by shape: no weight is read.

A result lives from its node to the last node that reads it, an output of the graph to the end; steps are nodes.
Inputs and weights lie elsewhere, as they do in onnxruntime.  Nodes that only name memory anew (Reshape, Squeeze,
Unsqueeze, Flatten, Identity) take none.  A name in a subgraph (If, Loop, Scan) counts as read by its node; what lies
inside does not count.
"""
import math
import os

from ggjit.alloc.traces import AllocationTrace
from ggjit.ops.core.errors import BadFile, ParamError, extra

RENAMES = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}
_ITEM_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2, "STRING": 64}


def read_onnx(path, dims=()):
    """The AllocationTrace of a model.  dims: {name of a dimension: its size}, for those that the file leaves open.

    Errors: BadFile; ParamError for a dimension that is still open, with its name; MissingExtra without onnx.
    """
    onnx = extra("onnx", "onnx")
    try:
        model = onnx.load(os.fspath(path), load_external_data=False)
        _set_dims(model.graph, dict(dims))
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except OSError:
        raise
    except (ParamError, BadFile):
        raise
    except Exception as e:                      # protobuf and onnx have errors of many kinds, some of them bare
        raise BadFile(f"no ONNX model that onnx can read: {str(e).splitlines()[0] if str(e) else type(e).__name__}") \
            from None
    return _trace(onnx, graph)


def _set_dims(graph, dims):
    """Write the sizes of named dimensions into the graph's inputs.  Errors: ParamError for a name that none has."""
    named = {}
    for value in graph.input:
        for d in value.type.tensor_type.shape.dim:
            if d.dim_param:
                named.setdefault(d.dim_param, []).append(d)
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
    found = AllocationTrace([], [], [], [], None, "ONNX")
    for i, node in enumerate(nodes):
        for name in node.output:
            if name and name not in base and name not in given:
                found.add(i, max(last.get(name, i), i) + 1, _nbytes(onnx, types, name, node), name)
    return found


def _reads(node):
    """Names that a node reads, subgraphs included."""
    yield from (name for name in node.input if name)
    for a in node.attribute:
        for inner in ([a.g] if a.HasField("g") else []) + list(a.graphs):
            for child in inner.node:
                yield from _reads(child)
            yield from (v.name for v in inner.output)


def _nbytes(onnx, types, name, node):
    t = types.get(name)
    where = f"{name!r} of node {node.name or node.op_type!r} ({node.op_type})"
    if t is None or not t.HasField("shape"):
        raise ParamError(f"the shape of {where} cannot be told from the file; give its open dimensions with --dim "
                         f"NAME=SIZE, or save the model with the shapes of its results")
    sizes = []
    for d in t.shape.dim:
        if not d.HasField("dim_value"):
            raise ParamError(f"{where} has an open dimension{' ' + d.dim_param if d.dim_param else ''}; give the open "
                             f"dimensions of the inputs with --dim NAME=SIZE")
        sizes.append(d.dim_value)
    kind = onnx.TensorProto.DataType.Name(t.elem_type)
    bits = _ITEM_BITS.get(kind) or 8 * onnx.helper.tensor_dtype_to_np_dtype(t.elem_type).itemsize
    return -(-math.prod(sizes) * bits // 8)
