"""`ggjit bench`: speed of a llama, as llama-bench measures it."""
import statistics
import time

import numpy as np

from ggjit.display.progress import bar, compiling
from ggjit.ops.core.errors import ModelError, ParamError
from ggjit.tools.command.common import (
    add_gpu,
    add_kv_type,
    add_n_ctx,
    add_repack,
    add_rope,
    add_strict,
    add_threads,
    count,
    positive,
    rope_args,
)
from ggjit.tools.command.helpers import load

EXAMPLES = (("ggjit bench m.gguf", "a prompt of 128, then 64 tokens"),
            ("ggjit bench m.gguf -p 512 -n 0 -t 1 -r 5", "prompts alone, one thread"),
            ("ggjit bench m.gguf -p 0 --parallel 8 --repack", "one text, then eight at once"))


def add_arguments(c):
    c.add_model("a llama GGUF; no vocabulary needed")
    c.add_argument("-p", "--n-prompt", dest="p", type=count, default=128, metavar="N",
                   help="prompt tokens, 0 skips (128)")
    c.add_argument("-n", "--n-gen", dest="n", type=count, default=64, metavar="N",
                   help="generated tokens, 0 skips (64)")
    c.add_argument("--parallel", type=positive, default=1, metavar="N", help="also generate N texts at once (1: not)")
    add_gpu(c)
    add_threads(c)
    c.add_argument("-r", "--repetitions", dest="r", type=positive, default=3, metavar="N", help="repetitions (3)")
    add_kv_type(c)
    add_n_ctx(c, "context size (the model's own)")
    add_repack(c)
    add_rope(c)
    add_strict(c)


def run(args):
    if not args.p and not args.n:
        raise ParamError("nothing to measure: -p and -n are both 0")
    with compiling():
        # without a prompt no batch is computed: memory is not reserved for one
        m = load(args.model, args, kv_type=args.kv_type, n_ctx=args.n_ctx, repack=args.repack, reserve=args.p > 0,
                 n_seqs=args.parallel, **rope_args(args))
        if not hasattr(m, "decode"):
            raise ModelError(f"{args.model}: bench measures llama models; time sentence encoders with `ggjit embed`")
        if max(args.p, args.n * args.parallel) > m.n_ctx:
            raise ParamError(f"-p {args.p} and -n {args.n} of {args.parallel} texts must fit the context of {m.n_ctx} "
                             f"tokens")
        results = measure(m, args)
    if not args.json:
        for r in results:
            s = r["tokens_per_second"]
            print(f"{r['test']:>8}  {r['threads']} threads  {s['median']:10.2f} tokens/s  "
                  f"({s['min']:.2f} - {s['max']:.2f})")
    return {"results": results}


def measure(m, args):
    """One dict per test: pp, a prompt in one batch; tg, tokens one by one, tg64x8: of 8 texts at once.  Each starts
    with an empty context."""
    ids = np.random.default_rng(0).integers(0, m.n_vocab, max(args.p, args.n))

    def prompt():
        m.decode(ids[:args.p])

    def tokens():
        for i in range(args.n):
            m.decode(ids[i:i + 1])

    def texts(n=args.n):
        m.hand_over(None)
        found = [m.cells.open(n) for _ in range(args.parallel)]
        for i in range(n):
            m.feed([(text, ids[i:i + 1]) for text in found])
    # name, timed work, its tokens, the run before it: one step plans and warms the decoding
    tests = [(f"pp{args.p}", prompt, args.p, prompt), (f"tg{args.n}", tokens, args.n, lambda: m.decode(ids[:1]))]
    if args.parallel > 1:
        tests.append((f"tg{args.n}x{args.parallel}", texts, args.n * args.parallel, lambda: texts(1)))
    tests = [t for t in tests if t[2]]
    results = []
    with bar(f"bench {args.model}", len(tests) * (args.r + 1)) as step:
        for name, work, n_tokens, warm in tests:
            m.reset()
            warm()
            step()
            speeds = []
            for _ in range(args.r):
                m.reset()
                t0 = time.perf_counter()
                work()
                speeds.append(n_tokens / (time.perf_counter() - t0))
                step()
            results.append({"test": name, "threads": m.backend.n_threads, "tokens_per_second": {
                "median": statistics.median(speeds), "min": min(speeds), "max": max(speeds)}})
    return results
