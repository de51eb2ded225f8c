"""Announced bytes beside the buffers in llama.cpp's log, by architecture.

    python -m benchmarks.buffers [NAME ...] [--n-ctx 512]

Files hold random weights in F16, embeddings of 256.  llama.cpp loads each, makes a context and logs what it
allocates; ggjit announces the same without loading: weights, what is kept of a text, and the compute buffer with logits
of all tokens and with the inputs, which lie in llama.cpp's.  MiB; llama.cpp rounds to hundredths.
"""
import argparse
import os
import pathlib
import sys
import tempfile

from benchmarks.families import sizes_of
from benchmarks.worker import ROOT, EngineError, Worker
from ggjit.alloc.graph_alloc import plan_graph
from ggjit.graphs.requests import asked_for
from ggjit.models.families.registry import DECODERS, ENCODERS
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.networks.base.memory import unique_memory
from ggjit.models.networks.peak import null_network
from ggjit.ops.core.errors import GgjitError

MIB = 1 << 20
SMALL = {"embd": 256, "ff": 704, "heads": 8, "ffx": 192, "ffs": 192}       # instead of those of benchmarks.families
KINDS = "weights", "kept", "compute"


def announced(path, n_ctx):
    """{kind: MiB} of ggjit, the compute buffer also with the planner "best"."""
    with null_network(GGUFFile(path), n_ctx=n_ctx, n_batch=n_ctx, flash=True, n_seqs=1, repack=False) as m:
        graph = m.largest_graph(all_logits=True)
        mine = {t.id for t in m.weights.ctx.tensors}
        inputs = {x.buffer.id: x.buffer for x in graph.leafs if x.base.id not in mine and x.buffer is not None}
        n_inputs = sum(a.nbytes for a in unique_memory(b._arena for b in inputs.values() if b._arena is not None))
        peaks = {p: plan_graph(*asked_for(graph, m._allocator.bufts, p, 1.0)[:2]).peak for p in ("ggml", "best")}
        return {"weights": m.weights.nbytes / MIB, "kept": getattr(m, "kv_nbytes", 0) / MIB,
                "compute": (peaks["ggml"] + n_inputs) / MIB, "best": (peaks["best"] + n_inputs) / MIB}


def main():
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    p.add_argument("names", nargs="*")
    p.add_argument("--n-ctx", type=int, default=512)
    args = p.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import arch_files
    tools = pathlib.Path(os.environ.get("GGJIT_SHARED", ROOT.parent / "shared"), "tools")
    print("| architecture | weights | llama.cpp | kept of a text | llama.cpp | compute | llama.cpp | by best |\n"
          + "| --- " * 8 + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder, Worker("engines.peer", OMP_NUM_THREADS="1") as peer:
        path = pathlib.Path(folder, "model.gguf")
        for name in args.names or sorted(DECODERS | ENCODERS):
            try:
                sizes = sizes_of(name, arch_files)
                sizes |= {k: v for k, v in SMALL.items() if k in sizes}
                arch_files.write(tools, name, path, kind="F16", **sizes)
                encoder = name in ENCODERS
                peer.ask("load", str(path), n_threads=1, n_ctx=args.n_ctx, embed=encoder)
                theirs = peer.ask("buffers")
                peer.ask("unload")
                ours = announced(path, args.n_ctx)
            except (EngineError, GgjitError, KeyError, ValueError) as e:
                print(f"| {name} | not measured: {str(e).splitlines()[0]} |", flush=True)
                continue
            cells = [f"{x[kind]:.2f}" for kind in KINDS for x in (ours, theirs)]
            print(f"| {name} | {' | '.join(cells)} | {ours['best']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
