"""numpy and PyTorch as engines of the comparison: products of float32 matrices only."""
import pickle

import numpy as np

from benchmarks.engines import engine
from benchmarks.worker import EngineError, Missing


class Numpy:
    name, version = "numpy", np.__version__

    def features(self):
        blas = np.show_config("dicts")["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas['version']}"

    def threads(self, n):
        """OPENBLAS_NUM_THREADS was set before the process started."""

    def array(self, a):
        return a

    def product(self, a, b, out):
        """out = b a^T"""
        np.matmul(b, a.T, out=out)


class Torch:
    name = "torch"

    def __init__(self):
        try:
            import torch
        except ImportError as e:
            raise Missing("PyTorch is not installed (pip install torch)") from e
        self.torch, self.version = torch, torch.__version__

    def features(self):
        return self.torch.backends.cpu.get_cpu_capability()

    def threads(self, n):
        self.torch.set_num_threads(n)

    def array(self, a):
        return self.torch.from_numpy(a)

    def product(self, a, b, out):
        self.torch.matmul(b, a.T, out=out)


class Engine(engine.Engine):
    """library: "numpy" or "torch"."""

    def __init__(self, library):
        self.library = {"numpy": Numpy, "torch": Torch}[library]()
        self.products = []

    def about(self):
        return {"name": self.library.name, "version": self.library.version, "features": self.library.features()}

    def unload(self):
        self.products = []

    def load_graph(self, path, n_threads):
        with open(path, "rb") as f:
            records, leaves, wanted = pickle.load(f)
        self.library.threads(n_threads)
        self.products = [self._product(records, leaves, records[k]) for k in wanted]

    def _product(self, records, leaves, node):
        if node["op"] != "MUL_MAT" or any(records[s]["type"] != 0 for s in node["src"][:2]):
            raise EngineError(f"{self.library.name} is asked for products of float32 matrices only")
        a, b = (np.frombuffer(leaves[s], np.float32).reshape(records[s]["ne"][1::-1]).copy() for s in node["src"][:2])
        return [self.library.array(x) for x in (a, b, np.empty((len(b), len(a)), np.float32))]

    def run_graph(self):
        for a, b, out in self.products:
            self.library.product(a, b, out)

    def graph_result(self, path):
        np.asarray(self.products[0][2]).tofile(path)
