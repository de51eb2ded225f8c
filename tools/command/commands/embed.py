"""`ggjit embed`: sentence embeddings, of a few texts or of a file of them."""
import time

import numpy as np

from ggjit.display.progress import compiling
from ggjit.models.files.minilm import minilm_path
from ggjit.models.networks.bulk import embed_texts
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.printable import printable
from ggjit.ops.core.whole_file import whole_file
from ggjit.tools.command.common import add_repack, add_strict, add_threads
from ggjit.tools.command.helpers import load
from ggjit.tools.command.texts import add_texts, compute_file, write_jsonl, write_parquet

EXAMPLES = (('ggjit embed "a cat" "a dog"', "MiniLM"),
            ('ggjit embed --json -m encoder.gguf "a text"', "a model of yours, all numbers"),
            ("ggjit embed --input docs.jsonl --output docs.npy --workers 2", "a file of texts, on two processes"))


def add_arguments(c):
    c.add_file("-m", "--model", metavar="PATH", help="a bert GGUF (default: MiniLM, made on first use)")
    add_threads(c)
    add_repack(c)
    add_strict(c)
    add_texts(c, "vectors: .npy, .jsonl or .parquet")
    c.add_argument("text", nargs="*", metavar="TEXT")


def run(args):
    if args.input is not None:
        return _file(args)
    if not args.text or args.output is not None or args.cluster is not None or args.workers is not None:
        raise ParamError("embed takes TEXT..., or --input FILE with --output FILE")
    with compiling():
        m = load(args.model or minilm_path(), args, repack=args.repack)
        ids = [m.tokenize(t) for t in args.text]
        m.embed(args.text[:1])                      # plans and kernels, not timed
        t0 = time.perf_counter()
        vectors = m.embed(args.text)
        seconds = time.perf_counter() - t0
    if not args.json:
        for text, v in zip(args.text, vectors, strict=True):
            print(f"{' '.join(f'{x:.4f}' for x in v[:6])} ...  ({len(v)} numbers)  {printable(text)}")
    return {"tokens": ids, "embeddings": vectors.tolist(), "tokens_per_second": sum(map(len, ids)) / seconds}


# ---------------------------------------------------------------- files of texts
def _file(args):
    if args.text:
        raise ParamError("embed takes TEXT..., or --input FILE, not both")
    path, t0 = str(args.model or minilm_path()), time.perf_counter()
    found = compute_file(args, (".npy", ".jsonl", ".parquet"), lambda texts, cluster, keep, progress: embed_texts(
        path, texts, cluster, keep, progress=progress), _write)
    found["seconds"] = time.perf_counter() - t0
    if not args.json:
        print(f"{found['texts']} texts in {found['seconds']:.1f} s: {args.output}")
    return found


def _write(path, texts, vectors):
    if path.endswith(".npy"):
        with whole_file(path) as f:
            np.save(f, vectors)
    elif path.endswith(".jsonl"):
        write_jsonl(path, ({"embedding": v.tolist()} for v in vectors))
    else:
        write_parquet(path, {"text": texts, "embedding": vectors})
    return {"dimension": vectors.shape[1]}
