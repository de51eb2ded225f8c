"""What is compared: a Work is a line of the table for every peer and number of threads.

    peers     wheel        llama.cpp and its ggml out of the xllamacpp wheel
              native       a build with GGML_NATIVE in a folder that GGML_LIB_DIR names
              llamafile    such a build with GGML_LLAMAFILE=ON
              ik           ik_llama.cpp in a folder that IK_LIB_DIR names, weights repacked as it loads them
              onnxruntime, openvino, numpy, torch
"""
import dataclasses
import os
import pathlib
from collections.abc import Callable

import numpy as np

import ggjit as gg
from benchmarks.worker import ROOT, Missing
from ggjit.profiling.machine_limits import BUFFER_NBYTES

ALONE_SECONDS = 300e-6              # a graph shorter than this mostly measures the call
MOST_SECONDS = 0.03                 # cold copies stop here: what takes longer does not wait for memory
GUESSED_FLOPS, GUESSED_BANDWIDTH, GUESSED_CALL = 100e9, 20e9, 100e-9
CACHE_BANDWIDTH = 100e9              # of the last-level cache, at least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """targets: {peer: our speed over the peer's, at least; None where it is only shown}; quick: part of --quick."""
    key: str
    text: str
    targets: dict
    quick: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(Work):
    """measure: "pp" (a prompt of n tokens), "tg" (n tokens one by one), "embed" (a text of n); file: gives the path.

    share: the least share of the machine's limit, or None: of the measured read bandwidth for "tg", of the peak of
    `arithmetic`, "int8" or "f32", for "pp".
    """
    file: Callable
    measure: str
    n: int
    share: float | None = None
    arithmetic: str = "f32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graph(Work):
    """Nodes of one kind, timed together: the time of one is reported.

    build     (new) -> tensor, with new(type, ne, values=None) for a leaf: `values`, or normal random ones;
              new.weights(type, ne): a matrix of products, on our side as a loaded model has it
    cold      every node has leaves of its own, more of them than caches hold
    n_nodes   how many `build` makes (a chain); otherwise 1
    max_nmse  between our result and the peer's; peer_nmse: {peer: another} for some
    share     the least share of the measured read bandwidth, or None
    """
    build: Callable
    cold: bool = False
    n_nodes: int = 1
    max_nmse: float = 1e-6
    peer_nmse: dict = dataclasses.field(default_factory=dict)
    share: float | None = None

    def copies(self, nbytes, flops):
        """How often `build` is repeated in one graph, for a result that touches nbytes and takes flops."""
        bandwidth = GUESSED_BANDWIDTH if self.cold else CACHE_BANDWIDTH
        seconds = flops / GUESSED_FLOPS + nbytes / bandwidth + GUESSED_CALL * self.n_nodes
        if self.cold:
            return max(1, min(BUFFER_NBYTES // nbytes, int(MOST_SECONDS / seconds)))
        return max(1, min(256, int(ALONE_SECONDS / seconds)))


class Leaves:
    """The `new` of Graph.build.  The n-th leaf of every copy holds the same bytes, in shared memory unless cold."""

    def __init__(self, ctx, cold, weights_ctx):
        self.ctx, self.cold, self.weights_ctx = ctx, cold, weights_ctx
        self.tensors, self.raw, self.by_id, self._next = [], [], {}, 0

    def again(self):
        self._next = 0

    def weights(self, type, ne):
        return self(type, ne, ctx=self.weights_ctx)

    def __call__(self, type, ne, values=None, ctx=None):
        i, self._next = self._next, self._next + 1
        if i == len(self.raw):
            self.raw.append(content(type, ne, values, np.random.default_rng(i)))
            self.tensors.append(None)
        if self.cold or self.tensors[i] is None:
            self.tensors[i] = t = (ctx or self.ctx).new_tensor(type, ne)
            self.by_id[t.id] = t, self.raw[i]
        return self.tensors[i]


def content(type, ne, values, rng, n_rows=32):
    """Bytes of a leaf.  Quantised rows repeat after n_rows: what they hold does not matter, and some types are slow."""
    shape = tuple(reversed(ne))
    if values is not None:
        return np.ascontiguousarray(values, type.dtype).reshape(shape).tobytes()
    if type.dtype is not None and type.dtype.kind == "f":
        return rng.standard_normal(shape, np.float32).astype(type.dtype).tobytes()
    total = int(np.prod(shape[:-1]))
    rows = gg.quantize(type, rng.standard_normal((min(total, n_rows), ne[0]), np.float32) * 0.05)
    return np.resize(rows.view(np.uint8), (total, type.row_nbytes(ne[0]))).tobytes()


def reference_file(*parts):
    """A function that gives the path of a file of the reference data, or raises Missing."""
    def path():
        folder = pathlib.Path(os.environ.get("GGJIT_SHARED", ROOT.parent / "shared"))
        found = folder.joinpath(*parts)
        if not found.exists():
            raise Missing(f"{found.name} is not among the reference data (GGJIT_SHARED names its folder)")
        return str(found)
    return path
