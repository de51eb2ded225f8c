"""What the commands of `ggjit` do: each takes the parsed arguments, prints unless --json, and returns the JSON dict."""
import contextlib
import os
import statistics
import sys
import time

from ggjit.models.core.progress import bar, clock, compiling
from ggjit.ops.core.errors import BadFile, ModelError, ParamError, extra


def _load(path, args, reserve=True, **options):
    from ggjit.models.networks.load import load_model
    from ggjit.tools.command.warm import help_when_compiling
    help_when_compiling(path, options | {"n_threads": args.threads})
    gpu = {k: getattr(args, k) for k in ("n_gpu_layers", "cpu_moe") if hasattr(args, k)}
    return load_model(path, n_threads=args.threads, reserve=reserve, **gpu, **options)


PIPE_WIDTH = 200                    # columns where there is no terminal: nothing is cut off for the next program


def _stdout():
    """Where tables are printed; names of files and tensors are no markup, whatever brackets they hold."""
    extra("rich", "models")
    from rich.console import Console
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH,
                   markup=False, emoji=False)


# ---------------------------------------------------------------- embed, demo
def embed(args):
    from ggjit.models.files.minilm import minilm_path
    with compiling():
        m = _load(args.model or minilm_path(), args, repack=args.repack)
        ids = [m.tokenize(t) for t in args.text]
        m.embed(args.text[:1])                      # plans and kernels, not timed
        t0 = time.perf_counter()
        vectors = m.embed(args.text)
        seconds = time.perf_counter() - t0
    result = {"tokens": ids, "embeddings": vectors.tolist(), "tokens_per_second": sum(map(len, ids)) / seconds}
    if not args.json:
        for text, v in zip(args.text, vectors, strict=True):
            print(f"{' '.join(f'{x:.4f}' for x in v[:6])} ...  ({len(v)} numbers)  {text}")
    return result


DEMO_TEXTS = (
    "The cat sits on the warm windowsill.", "A kitten is sleeping in the sun.",
    "The stock market fell sharply today.", "Shares lost value after the announcement.",
    "How do I bake sourdough bread?", "A recipe for a crusty loaf with wild yeast.",
    "The spacecraft entered orbit around Mars.", "A probe has reached the red planet.",
)


def demo(args):
    from ggjit.models.files.minilm import minilm_path
    with compiling():
        t0 = time.perf_counter()
        m = _load(minilm_path(), args)
        vectors = m.embed(DEMO_TEXTS)
        first = time.perf_counter() - t0
    n_tokens = sum(len(m.tokenize(t)) for t in DEMO_TEXTS)
    times = []
    for _ in range(5):
        t0 = time.perf_counter()
        m.embed(DEMO_TEXTS)
        times.append(time.perf_counter() - t0)
    likeness = vectors @ vectors.T
    nearest = []
    for i, text in enumerate(DEMO_TEXTS):
        row = likeness[i].copy()
        row[i] = -1
        j = int(row.argmax())
        nearest.append({"text": text, "nearest": DEMO_TEXTS[j], "cosine": float(row[j])})
    plan = m._allocator.last
    result = {"nearest": nearest, "tokens_per_second": n_tokens / statistics.median(times),
              "first_result_seconds": first, "memory": {"weights": m.weights.nbytes, "compute": m.compute_nbytes,
                                                        "last_plan_peak": plan.peak,
                                                        "lower_bound": plan.lower_bound}}
    if not args.json:
        _show_demo(m, result)
    return result


def _show_demo(m, r):
    out = _stdout()
    from rich.table import Table
    table = Table(title="Nearest neighbours by MiniLM embeddings", title_justify="left")
    for column in ("sentence", "nearest", "cosine"):
        table.add_column(column)
    for row in r["nearest"]:
        table.add_row(row["text"], row["nearest"], f"{row['cosine']:.3f}")
    out.print(table)
    mem = r["memory"]
    out.print(f"{m.backend!r}: {r['tokens_per_second']:,.0f} tokens/s, first result after "
              f"{r['first_result_seconds']:.2f} s")
    repacked = m.weights.repacked_nbytes
    out.print(f"memory: weights {(mem['weights'] - repacked) / 1e6:.1f} MB mapped in place, {repacked / 1e6:.1f} MB "
              f"repacked, compute arena {mem['compute'] / 1e3:.0f} kB; the last plan's peak "
              f"{mem['last_plan_peak'] / 1e3:.0f} kB, lower bound {mem['lower_bound'] / 1e3:.0f} kB")


# ---------------------------------------------------------------- generate, bench
def generate(args):
    with compiling():
        m = _load(args.model, args, kv_type=args.kv_type, n_ctx=args.n_ctx, repack=args.repack)
        run = m.generate(args.prompt, args.n_predict, temp=args.temp, top_k=args.top_k, top_p=args.top_p,
                         seed=args.seed)
        if not args.json:
            print(args.prompt, end="", flush=True)
        with bar("tokens", args.n_predict) if args.json else contextlib.nullcontext() as step:
            for piece in run:
                if args.json:
                    step()
                else:
                    print(piece, end="", flush=True)
    if not args.json:
        print()
        s = run.stats
        print(f"[{s['prompt_tokens']} prompt tokens at {s['prefill_tokens_per_second']:,.0f}/s, {len(s['tokens'])} "
              f"generated at {s['decode_tokens_per_second']:,.0f}/s]", file=sys.stderr)
    return run.stats


def bench(args):
    import numpy as np
    if not args.p and not args.n:
        raise ParamError("nothing to measure: -p and -n are both 0")
    with compiling():
        # without a prompt nothing as large as a batch is ever computed
        m = _load(args.model, args, kv_type=args.kv_type, n_ctx=None, repack=args.repack, reserve=args.p > 0)
        if not hasattr(m, "decode"):
            raise ModelError(f"{args.model}: bench measures llama models; time sentence encoders with `ggjit embed`")
        if max(args.p, args.n) > m.n_ctx:
            raise ParamError(f"-p {args.p} and -n {args.n} must fit the context of {m.n_ctx} tokens")
        ids = np.random.default_rng(0).integers(0, m.n_vocab, max(args.p, args.n))
        todo = [(f"pp{args.p}", lambda: m.decode(ids[:args.p]), args.p)] if args.p else []
        if args.n:
            todo.append((f"tg{args.n}", lambda: [m.decode(ids[i:i + 1]) for i in range(args.n)], args.n))
        results = []
        with bar(f"bench {args.model}", len(todo) * (args.r + 1)) as step:
            for name, work, n in todo:
                m.reset()
                if name.startswith("tg"):
                    m.decode(ids[:1])               # one step plans and warms; the whole text is not needed
                else:
                    work()
                step()
                speeds = []
                for _ in range(args.r):
                    m.reset()
                    t0 = time.perf_counter()
                    work()
                    speeds.append(n / (time.perf_counter() - t0))
                    step()
                results.append({"test": name, "threads": m.backend.n_threads, "tokens_per_second": {
                    "median": statistics.median(speeds), "min": min(speeds), "max": max(speeds)}})
    if not args.json:
        for r in results:
            s = r["tokens_per_second"]
            print(f"{r['test']:>8}  {r['threads']} threads  {s['median']:10.2f} tokens/s  "
                  f"({s['min']:.2f} - {s['max']:.2f})")
    return {"results": results}


# ---------------------------------------------------------------- vad
def vad(args):
    from ggjit.models.files.wav import read_wav
    from ggjit.models.networks.silero import SAMPLE_RATE, load_vad
    from ggjit.models.networks.speech import find_segments
    samples = read_wav(args.wav, SAMPLE_RATE)
    with compiling():
        model = load_vad(args.model, n_threads=args.threads or 1, conv_type=args.conv_type)
        t0 = time.perf_counter()
        p = model.probabilities(samples)
        seconds = time.perf_counter() - t0
    found = find_segments(p, model.n_window, SAMPLE_RATE, args.threshold, args.min_speech_ms, args.min_silence_ms,
                          args.max_speech_s, args.pad_ms)
    length = len(samples) / SAMPLE_RATE
    result = {"segments": [{"start": start, "end": end} for start, end in found], "probabilities": p.tolist(),
              "window_seconds": model.n_window / SAMPLE_RATE, "seconds": seconds, "audio_seconds": length}
    if not args.json:
        for start, end in found:
            print(f"{start:9.2f} - {end:8.2f} s")
        print(f"{len(found)} stretches of speech, {sum(e - s for s, e in found):.2f} of {length:.2f} s; took "
              f"{seconds:.3f} s", file=sys.stderr)
    return result


# ---------------------------------------------------------------- peak, plan
def peak(args):
    from ggjit.models.networks.peak import model_peak, what_if
    options = dict(order=args.order, all_logits=args.all_logits, repack=args.repack)
    with compiling():
        report = model_peak(args.model, args.n_ctx, args.n_batch, args.flash, args.planner, **options)
        table = what_if(args.model, (args.n_ctx,), sorted({1, 128, args.n_batch}), **options) if args.what_if else None
    if args.png:
        report.plot(path=args.png)
    if args.csv:
        report.to_csv(args.csv)
    result = {"peak": report.peak, "lower_bound": report.lower_bound, "planner": args.planner,
              "n_nodes": report.n_nodes, "n_buffers": report.n_buffers, "seconds": report.total_seconds,
              "kinds": report.kinds}
    if table:
        result["what_if"] = table
    if not args.json:
        _stdout().print(report)
        if table:
            _stdout().print(_what_if_table(table))
    return result


def _what_if_table(rows):
    from rich.table import Table

    from ggjit.alloc.report import mib
    out = Table(title="what if", title_justify="left")
    for column in rows[0]:
        out.add_column(column, justify="right")
    for r in rows:
        out.add_row(*(mib(v) if k in ("peak", "lower_bound", "kv", "total") else str(v) for k, v in r.items()))
    return out


def plan(args):
    from ggjit.alloc.csvio import run_plan_csv
    with compiling(), clock(f"searching at most {args.time_limit:g} s", args.time_limit):
        try:
            result = run_plan_csv(args.input, args.output, capacity=args.capacity, time_limit=args.time_limit)
        except OSError as e:
            raise BadFile(f"{e.filename}: {e.strerror}; check the path") from None
    verdict = result["fits"]                    # "fits", "does not fit" (proved), "not found in time"
    result |= {"fits": args.capacity is None or result["peak"] <= args.capacity, "verdict": verdict}
    if not args.json:
        print(f"peak {result['peak']:,}  lower bound {result['lower_bound']:,}  {verdict}  {result['seconds']:.3f} s")
    return result


# ---------------------------------------------------------------- ops, info, warm-up
def ops(args):
    from ggjit.tools.suite.command import run
    return run(args)


def info(args):
    if args.op:
        facts, page = _op_info(args.op)
        if not args.json:
            print(page, end="")
        return facts
    from ggjit import __version__
    from ggjit.api.registry import registry
    from ggjit.cpu.tuning import all_kept
    from ggjit.tools.command.support import supported
    devices = registry.props()
    ops, types = supported()
    result = {"version": __version__, "cpu": registry.by_type("cpu").description, "devices": devices,
              "tiles": _tiles(all_kept()), "types": types, "ops": ops}
    if not args.json:
        from ggjit.tools.command.op_page import op_list
        print(f"ggjit {result['version']} on {result['cpu']}")
        for d in devices:
            print(f"device {d['name']}: {d['description']}, {d['memory_free'] / 1e9:.1f} GB of "
                  f"{d['memory_total'] / 1e9:.1f} GB free")
        tiles = _tiles_line(result["tiles"]) or "the rule's; `ggjit warm-up MODEL` measures others"
        print(f"rows of decode tiles (speed over the rule's): {tiles}")
        for title, table in (("types", types), ("ops", ops)):
            served = [n for n, where in table.items() if where]
            print(f"{title}: {len(served)} of {len(table)}" + (f": {' '.join(served)}" if table is types else ""))
        print("\n".join(op_list()))
        print("`ggjit info OP` tells more of one op.")
    return result


def _op_info(name):
    from ggjit.tools.command.op_page import find, op_facts, op_page
    op = find(name)
    return op_facts(op), op_page(op)


def warm_up(args):
    from ggjit.models.files.minilm import minilm_path
    from ggjit.models.networks.load import load_model
    from ggjit.ops.native.jit import CACHE
    from ggjit.tools.command.warm import help_when_compiling, jobs, kept_kernels, tune_for
    t0, before = time.perf_counter(), kept_kernels()
    path, options = args.model or minilm_path(), {"repack": args.repack}
    with compiling():
        m = load_model(path, **options)
        tuned = tune_for(m, **options)                  # nothing else may run beside it
        help_when_compiling(path, options)
        todo = list(jobs(m).values())
        with bar("kernels", len(todo)) as step:
            for compile_one in reversed(todo):          # the helpers come from the other end
                compile_one()
                step()
        m.warm_up()
    n = CACHE.compiled + CACHE.loaded
    compiled = min(n, len(kept_kernels() - before))         # here and by helpers
    result = {"kernels": n, "compiled": compiled, "cached": n - compiled, "seconds": time.perf_counter() - t0,
              "tiles": _tiles(tuned)}
    if not args.json:
        print(f"{result['kernels']} kernels ready: {result['compiled']} compiled, {result['cached']} from the cache, "
              f"{result['seconds']:.1f} s")
        if tuned:
            print(f"measured rows of decode tiles: {_tiles_line(result['tiles'])}")
    return result


def _tiles(choices):
    return {t.name: {"rows": c.rows, "gain": c.gain} for t, c in choices.items()}


def _tiles_line(tiles):
    return ", ".join(f"{name} {c['rows']} ({c['gain']:.2f} x)" for name, c in tiles.items())


def completion(args):
    from ggjit.tools.command.completion import script
    print(script(args.shell))
    return {}
