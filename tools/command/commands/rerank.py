"""`ggjit rerank`: which of some texts answer a query best."""
import time

from ggjit.display.progress import compiling
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.printable import printable
from ggjit.tools.command.common import add_repack, add_strict, add_threads, positive
from ggjit.tools.command.helpers import load
from ggjit.tools.command.texts import texts_of

EXAMPLES = (('ggjit rerank -m reranker.gguf "who wrote Emma?" "Jane Austen did." "It rains."', "the best text first"),
            ('ggjit rerank -m reranker.gguf --input docs.jsonl --top 5 "who wrote Emma?"', "the five best of a file"))


def add_arguments(c):
    c.add_file("-m", "--model", metavar="PATH", required=True, help="a GGUF of a reranker: BERT, XLM-RoBERTa, "
               "ModernBERT with a classifier, Qwen3-Reranker")
    add_threads(c)
    add_repack(c)
    add_strict(c)
    c.add_file("--input", metavar="FILE", help="texts: .jsonl (an object a line), .csv (with a header), .txt (a text a "
               "line), .parquet")
    c.add_argument("--column", default="text", metavar="NAME", help="key or column that holds the text (text)")
    c.add_argument("--top", type=positive, metavar="N", help="the N best texts (all)")
    c.add_argument("query", metavar="QUERY")
    c.add_argument("text", nargs="*", metavar="TEXT")


def run(args):
    if bool(args.text) == (args.input is not None):
        raise ParamError("rerank takes QUERY TEXT..., or QUERY and --input FILE")
    texts = args.text or texts_of(args.input, args.column)
    with compiling():
        m = load(args.model, args, repack=args.repack)
        t0 = time.perf_counter()
        scores = m.rerank(args.query, texts)
        seconds = time.perf_counter() - t0
    order = (-scores).argsort(kind="stable")[:args.top].tolist()
    results = [{"index": i, "score": float(scores[i]), "text": texts[i]} for i in order]
    if not args.json:
        for r in results:
            print(f"{r['score']:9.4f}  {printable(r['text'])}")
    return {"results": results, "seconds": seconds}
