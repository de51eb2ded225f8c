"""ggjit as an engine of the comparison."""
import math
import pathlib
import time

import ggjit
from benchmarks import machine
from benchmarks.catalogue import GRAPHS
from benchmarks.engines import engine
from benchmarks.engines.our_graphs import Prepared, column_speeds
from ggjit.cpu.tuning import all_kept
from ggjit.models import load_model
from ggjit.models.files.gguf import GGUFFile
from ggjit.ops.matmul import choices
from ggjit.ops.matmul.repack import layouts as repack
from ggjit.ops.native import isa
from ggjit.ops.native.jit import CACHE
from ggjit.profiling.machine_limits import Reader, peak_f32, read_bandwidth


class Engine(engine.Engine):
    def __init__(self):
        self.model = self.prepared = None

    def about(self):
        tuned = ", ".join(f"{t.name} {choices.layout_name(c.layout) if c.layout else c.tile}"
                          for t, c in all_kept().items())
        rule = ", ".join(t.name for t in repack.LAYOUTS if choices.pays_repacked(t))
        return {"name": "ggjit", "version": ggjit.__version__,
                "features": f"{isa.LEVEL}; repacked by default: {rule or 'none'}; settings of `ggjit warm-up`: "
                            f"{tuned or 'none'}"}

    def load(self, path, n_threads, n_ctx=512, embed=False):
        """Bytes: weights that a token reads, KV cache, compute arena.  Operations: of one prompt token."""
        self.unload()
        n_ctx = n_ctx and min(n_ctx, GGUFFile(path).arch_get("context_length", n_ctx))
        self.model = m = load_model(path, n_threads=n_threads, n_ctx=n_ctx)
        self.n_vocab, tensors = m.n_vocab, m.file.tensors
        by_row = "token_embd.weight" if "output.weight" in tensors or embed else None      # read a row at a time
        layers = [t for name, t in tensors.items() if name.startswith("blk.") and len(t.ne) == 2]
        return {"read_per_token": sum(t.nbytes for name, t in tensors.items() if name != by_row),
                "flops_per_token": 2 * sum(math.prod(t.ne) for t in layers),
                "kv": getattr(m, "kv_nbytes", 0), "compute": m.compute_nbytes}

    def unload(self):
        if self.model is not None:
            self.model.free()
        if self.prepared is not None:
            self.prepared.free()
        self.model = self.prepared = None

    def warm(self, measure, n):
        getattr(self, measure)(n)           # plans and kernels are made for a size

    def write_graph(self, key, path, n_threads):
        """Graph `key` of benchmarks/catalogue.py, kept ready and written to a file.  What one node of it takes."""
        self.unload()
        self.prepared = p = Prepared(GRAPHS[key], n_threads)
        p.write(path)
        self.run_graph()
        return {"n": p.n, "nbytes": p.nbytes, "flops": p.flops}

    def run_graph(self):
        self.prepared.plan.compute()

    def difference(self, path):
        """NMSE between the result in a file and ours."""
        return self.prepared.difference(pathlib.Path(path).read_bytes())

    def reset(self):
        self.model.reset()

    def decode(self, ids):
        return self.model.decode(ids)

    def encode(self, ids):
        return self.model.embed_ids(ids)

    def logits(self, ids):
        """Logits after the last of `ids`."""
        self.reset()
        return self.decode(ids).tolist()

    def metadata(self, path, reps=20):
        """Seconds of opening a GGUF file: every key and every tensor's place, checked."""
        out = []
        for _ in range(reps):
            t0 = time.perf_counter()
            GGUFFile(path)
            out.append(time.perf_counter() - t0)
        return out

    def limits(self, n_threads):
        """Bytes a second of all threads; operations a second of one core."""
        return {"bandwidth": read_bandwidth(n_threads, now=self.now), "f32": peak_f32(now=self.now),
                "int8": machine.peak_int8(now=self.now)}

    def tg_and_reads(self, n, n_threads, seed=0):
        """[(seconds of a token, bytes a second that memory gave right after it)] of n tokens.

        In turn, and both as they come: what memory gives changes by a fifth within a second on a shared machine, and
        the best moment of one says nothing of the average of the other.
        """
        ids, out = self._ids(n, seed), []
        with Reader(n_threads, self.now) as reader:
            for i in range(n):
                t0 = self.now()
                self.decode(ids[i:i + 1])
                out.append((self.now() - t0, reader.once()))
        return out

    def graph_and_reads(self, n, n_threads):
        """[(seconds of a run of the graph, bytes a second that memory gave right after it)] of n runs."""
        out = []
        with Reader(n_threads, self.now) as reader:
            self.run_graph()
            for _ in range(n):
                t0 = self.now()
                self.run_graph()
                out.append((self.now() - t0, reader.once()))
        return out

    def column_speeds(self, type, columns, n_threads, rounds):
        """[[columns, GFLOP/s]] of products with weights of the type, by name."""
        return list(column_speeds(getattr(ggjit, type), columns, n_threads, rounds, self.now).items())

    def compiled(self):
        """[kernels compiled, loaded, seconds compiling] in this process."""
        return [CACHE.compiled, CACHE.loaded, CACHE.compile_seconds]
