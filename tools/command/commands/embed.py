"""`ggjit embed`: sentence embeddings."""
import time

from ggjit.display.progress import compiling
from ggjit.models.files.minilm import minilm_path
from ggjit.ops.core.printable import printable
from ggjit.tools.command.common import add_repack, add_strict, add_threads
from ggjit.tools.command.helpers import load

EXAMPLES = (('ggjit embed "a cat" "a dog"', "MiniLM"),
            ('ggjit embed -m encoder.gguf "a text"', "a model of yours"),
            ('ggjit embed --json "a text" > vector.json', "all numbers"))


def add_arguments(c):
    c.add_file("-m", "--model", metavar="PATH", help="a bert GGUF (default: MiniLM, made on first use)")
    add_threads(c)
    add_repack(c)
    add_strict(c)
    c.add_argument("text", nargs="+", metavar="TEXT")


def run(args):
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
