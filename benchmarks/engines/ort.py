"""onnxruntime as an engine of the comparison: MiniLM, and products of 4 and 8 bits (MatMulNBits)."""
import numpy as np

from benchmarks.engines import blocks, engine
from benchmarks.engines.minilm_onnx import IR_VERSION, OPSET, onnx_path
from benchmarks.worker import Missing

try:
    import onnxruntime
except ImportError:
    onnxruntime = None

INT8_ACTIVATIONS = 4                # accuracy_level: the fastest


class Engine(engine.Engine):
    def __init__(self):
        if onnxruntime is None:
            raise Missing("onnxruntime is not installed (pip install onnxruntime onnx)")
        self.session = self.binding = None

    def about(self):
        return {"name": "onnxruntime", "version": onnxruntime.__version__, "features": "CPUExecutionProvider"}

    def _start(self, model, n_threads):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = n_threads
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def load(self, path, n_threads, n_ctx=512, embed=True):
        """path: the GGUF file; its ONNX form is made beside it."""
        self._start(onnx_path(path), n_threads)

    def unload(self):
        self.session = self.binding = None

    def encode(self, ids):
        return self.session.run(None, {"ids": ids[None].astype(np.int64)})[0][0]

    def vector(self, ids):
        """The embedding of `ids`."""
        return self.encode(np.array(ids)).tolist()

    # ------------------------------------------------------------ products
    def load_graph(self, path, n_threads):
        self.unload()
        made = blocks.products(path, "onnxruntime")
        self._start(_model(made), n_threads)
        self.binding, x = self.session.io_binding(), made[0].x
        self.outs = [np.empty((len(x), len(p.codes)), np.float32) for p in made]
        self.x = onnxruntime.OrtValue.ortvalue_from_numpy(x)
        self.values = [onnxruntime.OrtValue.ortvalue_from_numpy(out) for out in self.outs]
        self.binding.bind_ortvalue_input("x", self.x)
        for i, value in enumerate(self.values):
            self.binding.bind_ortvalue_output(f"y{i}", value)

    def run_graph(self):
        self.session.run_with_iobinding(self.binding)

    def graph_result(self, path):
        self.values[0].numpy().tofile(path)


def _model(products):
    """An ONNX model of all products, over one x."""
    try:
        from onnx import TensorProto, helper, numpy_helper
    except ImportError as e:
        raise Missing("onnx, which writes onnxruntime's model, is not installed (pip install onnx)") from e
    nodes, constants, outs = [], [], []
    for i, p in enumerate(products):
        m, k = p.codes.shape
        codes = p.packed().reshape(m, k // blocks.BLOCK, -1)
        constants += [numpy_helper.from_array(codes, f"w{i}"),
                      numpy_helper.from_array(p.scales.astype(np.float32).ravel(), f"s{i}")]
        nodes.append(helper.make_node(
            "MatMulNBits", ["x", f"w{i}", f"s{i}"], [f"y{i}"], domain="com.microsoft", K=k, N=m, bits=p.bits,
            block_size=blocks.BLOCK, accuracy_level=INT8_ACTIVATIONS))
        outs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [len(p.x), m]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, list(products[0].x.shape))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "products", [x], outs, constants)
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString()
