"""`ggjit warm-up`: compile a model's kernels into the cache and measure how its weights are read fastest."""
import time

from ggjit.cpu.tuning import tune_sharing
from ggjit.display.progress import bar, compiling
from ggjit.models.files.minilm import minilm_path
from ggjit.models.networks.load import load_model
from ggjit.ops.native.jit import CACHE
from ggjit.tools.command.common import add_repack, add_strict, tiles_json, tiles_line
from ggjit.tools.command.helpers import help_when_compiling, jobs, kept_kernels, tune_for

EXAMPLES = (("ggjit warm-up", "MiniLM's"), ("ggjit warm-up m.gguf", "of a llama: the first answer comes at once"))


def add_arguments(c):
    c.add_model("a GGUF (default: MiniLM)", required=False)
    add_repack(c)
    add_strict(c)


def run(args):
    t0, before = time.perf_counter(), kept_kernels()
    path, options = args.model or minilm_path(), {"repack": args.repack, "strict": args.strict}
    with compiling():
        m = load_model(path, **{**options, "repack": False})
        tuned = tune_for(m)                     # before there are helpers: nothing else may run beside it
        shared_from = tune_sharing(m.backend.n_threads)
        m._repack(args.repack)                  # repack by what was just measured
        help_when_compiling(path, options)
        todo = list(jobs(m).values())
        with bar("kernels", len(todo)) as step:
            for compile_one in reversed(todo):          # the helpers come from the other end
                compile_one()
                step()
        m.warm_up()
    n = CACHE.compiled + CACHE.loaded
    compiled = min(n, len(kept_kernels() - before))         # kernels compiled here and by helpers
    result = {"kernels": n, "compiled": compiled, "cached": n - compiled, "seconds": time.perf_counter() - t0,
              "tiles": tiles_json(tuned), "shared_from_nanoseconds": shared_from}
    if not args.json:
        print(f"{n} kernels ready: {compiled} compiled, {n - compiled} from the cache, {result['seconds']:.1f} s")
        if tuned:
            print(f"measured rows of decode tiles and layouts: {tiles_line(result['tiles'])}")
        if shared_from:
            print(f"nodes of {shared_from / 1000:g} us and more are shared among {m.backend.n_threads} threads")
    return result
