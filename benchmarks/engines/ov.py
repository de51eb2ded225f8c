"""OpenVINO as an engine of the comparison: products with weights of 4 and 8 bits."""
import numpy as np

from benchmarks.engines import blocks, engine
from benchmarks.worker import Missing

try:
    import openvino
    from openvino import opset13 as ops
except ImportError:
    openvino = None


class Engine(engine.Engine):
    def __init__(self):
        if openvino is None:
            raise Missing("OpenVINO is not installed (pip install openvino)")
        self.core, self.request = openvino.Core(), None

    def about(self):
        return {"name": "OpenVINO", "version": openvino.get_version(),
                "features": " ".join(self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"))}

    def unload(self):
        self.request = None

    def load_graph(self, path, n_threads):
        """Activations are rounded to 8 bits for every 32, as ggml rounds them."""
        self.unload()
        made = blocks.products(path, "OpenVINO")
        config = {"INFERENCE_NUM_THREADS": n_threads, "NUM_STREAMS": 1,
                  "DYNAMIC_QUANTIZATION_GROUP_SIZE": blocks.BLOCK, "INFERENCE_PRECISION_HINT": "f32"}
        self.request = self.core.compile_model(_model(made), "CPU", config).create_infer_request()
        self.request.set_input_tensor(openvino.Tensor(made[0].x))

    def run_graph(self):
        self.request.infer()

    def graph_result(self, path):
        self.request.get_output_tensor(0).data.tofile(path)


def _weights(p):
    """codes -> (codes - zero point) scale, as OpenVINO's own compression writes it."""
    m, k = p.codes.shape
    groups, type = (m, k // blocks.BLOCK, blocks.BLOCK), getattr(openvino.Type, f"u{p.bits}")
    # a zero point of another type than the codes': the weights would be unpacked to floats before the first run
    zero = np.full(1, p.zero_point * (0x11 if p.bits == 4 else 1), np.uint8)
    codes, zero = (ops.convert(ops.constant(_tensor(a, shape, type)), "f16")
                   for a, shape in ((p.packed(), groups), (zero, (1, 1, 1))))
    scaled = ops.multiply(ops.subtract(codes, zero), ops.constant(p.scales[:, :, None]))
    return ops.convert(ops.reshape(scaled, np.array([m, k]), False), "f32")


def _tensor(packed, shape, type):
    """A tensor of its own memory: openvino.Tensor(array, ...) does not keep the array."""
    t = openvino.Tensor(type, openvino.Shape(shape))
    t.data[...] = packed.reshape(t.data.shape)
    return t


def _model(products):
    x = ops.parameter(products[0].x.shape, np.float32)
    return openvino.Model([ops.matmul(x, _weights(p), False, True) for p in products], [x], "products")
