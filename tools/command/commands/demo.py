"""`ggjit demo`: nearest neighbours of real sentences, speed and memory plan of MiniLM; an answer of SmolLM2."""
import statistics
import time

from ggjit.display.progress import compiling
from ggjit.models.files.minilm import minilm_path
from ggjit.models.files.smollm2 import INSTALL, smollm2_path
from ggjit.ops.core.printable import TEXT, printable
from ggjit.tools.command.common import add_threads, console, table
from ggjit.tools.command.helpers import load

EXAMPLES = (("ggjit demo", ""), ("ggjit demo --threads 1 --json", "the same as numbers"))
TEXTS = (
    "The cat sits on the warm windowsill.", "A kitten is sleeping in the sun.",
    "The stock market fell sharply today.", "Shares lost value after the announcement.",
    "How do I bake sourdough bread?", "A recipe for a crusty loaf with wild yeast.",
    "The spacecraft entered orbit around Mars.", "A probe has reached the red planet.",
)

QUESTION = "What is gravity?"
ANSWER_TOKENS = 48


def add_arguments(c):
    add_threads(c)


def run(args):
    with compiling():
        t0 = time.perf_counter()
        m = load(minilm_path(), args)
        vectors = m.embed(TEXTS)
        first = time.perf_counter() - t0
    lengths = [len(m.tokenize(t)) for t in TEXTS]
    times = []
    for _ in range(5):
        t0 = time.perf_counter()
        m.embed(TEXTS)
        times.append(time.perf_counter() - t0)
    plan = m._allocator.last
    result = {"nearest": nearest(vectors), "tokens_per_second": sum(lengths) / statistics.median(times),
              "first_result_seconds": first, "longest_text_tokens": max(lengths),
              "memory": {"weights": m.weights.nbytes, "compute": m.compute_nbytes, "last_plan_peak": plan.peak,
                         "lower_bound": plan.lower_bound},
              "chat": answered(args)}
    if not args.json:
        show(m, result)
    return result



def answered(args):
    """The beginning of SmolLM2's answer to QUESTION; None where it is not installed."""
    path = smollm2_path(missing_ok=True)
    if path is None:
        return None
    with compiling(), load(path, args, n_ctx=256) as m:
        m.warm_up()                         # plans and kernels, not timed
        answer = m.chat([{"role": "user", "content": QUESTION}], ANSWER_TOKENS, temp=0)
        return {"question": QUESTION, "answer": answer.text,
                "tokens_per_second": answer.stats["decode_tokens_per_second"]}


def nearest(vectors):
    """The nearest other text of each."""
    cosines = vectors @ vectors.T
    found = []
    for i, text in enumerate(TEXTS):
        row = cosines[i].copy()
        row[i] = -1
        j = int(row.argmax())
        found.append({"text": text, "nearest": TEXTS[j], "cosine": float(row[j])})
    return found


def show(m, r):
    out, mem, repacked = console(), r["memory"], m.weights.repacked_nbytes
    out.print(table("Nearest neighbours by MiniLM embeddings", ("sentence", "nearest", "cosine"),
                    [(row["text"], row["nearest"], f"{row['cosine']:.3f}") for row in r["nearest"]]))
    out.print(f"{m.backend!r}: {r['tokens_per_second']:,.0f} tokens/s, first result after "
              f"{r['first_result_seconds']:.2f} s")
    out.print(f"memory: weights {(mem['weights'] - repacked) / 1e6:.1f} MB mapped in place, {repacked / 1e6:.1f} MB "
              f"repacked, compute arena {mem['compute'] / 1e3:.0f} kB (texts of up to {r['longest_text_tokens']} "
              f"tokens); the last plan's peak {mem['last_plan_peak'] / 1e3:.0f} kB, lower bound "
              f"{mem['lower_bound'] / 1e3:.0f} kB")
    if r["chat"] is None:
        out.print(f"a model that chats is not installed: {INSTALL}, then `ggjit chat`")
    else:
        out.print(f"\nSmolLM2-135M, {r['chat']['tokens_per_second']:,.0f} tokens/s; `ggjit chat` goes on\n"
                  f"> {QUESTION}\n{printable(r['chat']['answer'], keep=TEXT)} ...")
