"""onnxruntime as an engine of the comparison: MiniLM only."""
import numpy as np

from benchmarks import engine
from benchmarks.minilm_onnx import onnx_path
from benchmarks.worker import Missing

try:
    import onnxruntime
except ImportError:
    onnxruntime = None


class Engine(engine.Engine):
    def __init__(self):
        if onnxruntime is None:
            raise Missing("onnxruntime is not installed (pip install onnxruntime onnx)")
        self.session = None

    def about(self):
        return {"name": "onnxruntime", "version": onnxruntime.__version__, "features": "CPUExecutionProvider"}

    def load(self, path, n_threads, n_ctx=512, embed=True):
        """path: the GGUF file; its ONNX form is made beside it."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = n_threads
        self.session = onnxruntime.InferenceSession(onnx_path(path), options, providers=["CPUExecutionProvider"])

    def unload(self):
        self.session = None

    def encode(self, ids):
        return self.session.run(None, {"ids": ids[None].astype(np.int64)})[0][0]

    def vector(self, ids):
        """The embedding of `ids`."""
        return self.encode(np.array(ids)).tolist()
