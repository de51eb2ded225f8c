"""MiniLM as an ONNX graph with the weights of our GGUF file, for onnxruntime.

Written as PyTorch's exporter would: [batch, tokens] ids, linear layers as MatMul + Add, heads by Reshape and Transpose,
so that onnxruntime's graph optimiser finds the patterns it knows.
"""
import math
import pathlib

import numpy as np

from benchmarks.synth import fresh_file
from benchmarks.worker import Missing
from ggjit.models.files.gguf import GGUFFile

OPSET, IR_VERSION = 20, 9           # 20: Gelu; LayerNormalization since 17


def onnx_path(gguf_path):
    """Path of the ONNX form of a bert GGUF file of type F32, beside it in the cache, made if it is not there."""
    gguf_path = pathlib.Path(gguf_path)
    path = gguf_path.with_suffix(".onnx")
    if not path.exists():
        try:
            import onnx
        except ImportError as e:
            raise Missing("onnx, which writes onnxruntime's model, is not installed (pip install onnx)") from e
        with fresh_file(path, gguf_path.stat().st_size) as partial:
            onnx.save(_Writer(GGUFFile(gguf_path)).model(), partial)
    return str(path)


class _Writer:
    def __init__(self, file):
        import onnx
        self.onnx, self.file = onnx, file
        self.nodes, self.constants = [], {}

    def _op(self, kind, *inputs, **attributes):
        out = f"{kind}_{len(self.nodes)}"
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [out], **attributes))
        return out

    def _constant(self, name, value):
        value = np.ascontiguousarray(value)
        self.constants.setdefault(name, self.onnx.numpy_helper.from_array(value, name))
        return name

    def _array(self, name):
        info = self.file.tensors[name]
        return self.file.tensor_bytes(name).view(np.float32).reshape(info.shape)

    def _weight(self, name):
        return self._constant(name, self._array(name))

    def _linear(self, x, name):
        w = self._constant(f"{name}.transposed", self._array(f"{name}.weight").T)
        return self._op("Add", self._op("MatMul", x, w), self._weight(f"{name}.bias"))

    def _norm(self, x, name):
        return self._op("LayerNormalization", x, self._weight(f"{name}.weight"), self._weight(f"{name}.bias"),
                        axis=-1, epsilon=self.eps)

    def _shape(self, name, *dims):
        return self._constant(name, np.array(dims, np.int64))

    def model(self):
        get, h, T = self.file.arch_get, self.onnx.helper, self.onnx.TensorProto
        self.eps = get("attention.layer_norm_epsilon", kind=float)
        self.d, self.n_head = get("embedding_length"), get("attention.head_count")
        length = self._op("Shape", "ids", start=1, end=2)
        positions = self._op("Slice", self._weight("position_embd.weight"), self._shape("zero", 0), length,
                             self._shape("first axis", 0))
        x = self._op("Add", self._op("Gather", self._weight("token_embd.weight"), "ids"), positions)
        x = self._op("Add", x, self._constant("token type 0", self._array("token_types.weight")[0]))
        x = self._norm(x, "token_embd_norm")
        for i in range(get("block_count")):
            x = self._layer(x, f"blk.{i}.")
        mean = self._op("ReduceMean", x, self._shape("token axis", 1), keepdims=0)
        length = self._op("ReduceL2", mean, self._shape("last axis", -1), keepdims=1)
        self.nodes.append(h.make_node("Div", [mean, length], ["embedding"]))
        graph = h.make_graph(self.nodes, "bert", [h.make_tensor_value_info("ids", T.INT64, ["batch", "tokens"])],
                             [h.make_tensor_value_info("embedding", T.FLOAT, ["batch", self.d])],
                             list(self.constants.values()))
        return h.make_model(graph, opset_imports=[h.make_opsetid("", OPSET)], ir_version=IR_VERSION)

    def _layer(self, x, p):
        o = self._op("Reshape", self._attention(x, p), self._shape("joined", 0, 0, self.d))
        x = self._norm(self._op("Add", x, self._linear(o, p + "attn_output")), p + "attn_output_norm")
        h = self._op("Gelu", self._linear(x, p + "ffn_up"))
        return self._norm(self._op("Add", x, self._linear(h, p + "ffn_down")), p + "layer_output_norm")

    def _attention(self, x, p):
        d_head = self.d // self.n_head
        split = self._shape("split", 0, 0, self.n_head, d_head)
        q, k, v = (self._op("Transpose", self._op("Reshape", self._linear(x, p + name), split), perm=perm)
                   for name, perm in (("attn_q", (0, 2, 1, 3)), ("attn_k", (0, 2, 3, 1)), ("attn_v", (0, 2, 1, 3))))
        scores = self._op("Mul", self._op("MatMul", q, k), self._constant("scale", np.float32(1 / math.sqrt(d_head))))
        return self._op("Transpose", self._op("MatMul", self._op("Softmax", scores, axis=-1), v), perm=(0, 2, 1, 3))
