"""`ggjit embed`: sentence embeddings, of a few texts or of a file of them."""
import csv
import json
import os
import time

import numpy as np

import ggjit as gg
from ggjit.display.progress import bar, compiling
from ggjit.models.files.minilm import minilm_path
from ggjit.models.networks.bulk import drop_kept, embed_texts
from ggjit.ops.core.errors import BadFile, ParamError
from ggjit.ops.core.printable import printable
from ggjit.ops.core.whole_file import whole_file
from ggjit.tools.command.common import add_repack, add_strict, add_threads, positive
from ggjit.tools.command.helpers import load

EXAMPLES = (('ggjit embed "a cat" "a dog"', "MiniLM"),
            ('ggjit embed --json -m encoder.gguf "a text"', "a model of yours, all numbers"),
            ("ggjit embed --input docs.jsonl --output docs.npy --workers 2", "a file of texts, on two processes"))


def add_arguments(c):
    c.add_file("-m", "--model", metavar="PATH", help="a bert GGUF (default: MiniLM, made on first use)")
    add_threads(c)
    add_repack(c)
    add_strict(c)
    c.add_file("--input", metavar="FILE", help="texts: .jsonl (an object a line), .csv (with a header), "
               ".txt (a text a line)")
    c.add_file("--output", metavar="FILE", help="vectors, in the order of the input: .npy, or .jsonl; a run that was "
               "stopped goes on where it was")
    c.add_argument("--column", default="text", metavar="NAME", help="key or column that holds the text (text)")
    where = c.add_mutually_exclusive_group()
    where.add_argument("--cluster", metavar="ADDRESS", help="a Dask scheduler, whose workers read the same model file")
    where.add_argument("--workers", type=positive, metavar="N", help="so many processes of this machine")
    c.add_file("--tls", metavar="DIR", help="certificates for --cluster")
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
    if args.output is None or os.path.splitext(args.output)[1] not in (".npy", ".jsonl"):
        raise ParamError(f"--output {args.output}: expected a file .npy or .jsonl")
    if args.text:
        raise ParamError("embed takes TEXT..., or --input FILE, not both")
    texts, keep, path = texts_of(args.input, args.column), f"{args.output}.parts", str(args.model or minilm_path())
    t0 = time.perf_counter()
    with _cluster(args) as cluster, bar("texts", len(texts)) as step:
        vectors = embed_texts(path, texts, cluster, keep, progress=step)
    seconds = time.perf_counter() - t0
    with whole_file(args.output) as f:
        if args.output.endswith(".npy"):
            np.save(f, vectors)
        else:
            for v in vectors:
                f.write(json.dumps({"embedding": v.tolist()}).encode() + b"\n")
    drop_kept(keep)
    if not args.json:
        print(f"{len(texts)} texts in {seconds:.1f} s: {args.output}")
    return {"texts": len(texts), "dimension": vectors.shape[1], "seconds": seconds, "output": args.output}


class _NoCluster:
    def __enter__(self):
        return None

    def __exit__(self, *exc):
        """Nothing was started."""


def _cluster(args):
    if args.cluster is not None:
        return gg.cluster.connect(args.cluster, tls=args.tls)
    return _NoCluster() if args.workers is None else gg.cluster.local(args.workers)


def texts_of(path, column):
    """The texts of a file, in its order.  Errors: ParamError (another kind of file), BadFile with the line."""
    kind = os.path.splitext(path)[1]
    if kind not in (".jsonl", ".csv", ".txt"):
        raise ParamError(f"--input {path}: expected a file .jsonl, .csv or .txt")
    with open(path, encoding="utf-8", newline="" if kind == ".csv" else None) as f:
        try:
            if kind == ".txt":
                return [line.rstrip("\n") for line in f]
            if kind == ".csv":
                rows = csv.DictReader(f, strict=True)
                return [_text(row, column, path, rows.line_num) for row in rows]
            return [_text(json.loads(line), column, path, k) for k, line in enumerate(f, 1) if line.strip()]
        except (UnicodeDecodeError, json.JSONDecodeError, csv.Error, RecursionError) as e:
            raise BadFile(f"{path}: {e}; expected UTF-8 text of a {kind} file") from None


def _text(row, column, path, line):
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        names = ", ".join(map(str, row)) if isinstance(row, dict) else repr(row)
        raise BadFile(f"{path} line {line}: no text under {column!r} ({names:.80}); name the column with --column")
    return text
