"""`ggjit peak`: peak memory of a model, without allocating or reading weights."""
from ggjit.alloc.report import mib
from ggjit.display.progress import compiling
from ggjit.models.networks.peak import explore_model, model_peak, what_if
from ggjit.tools.command.common import add_n_ctx, add_repack, add_strict, console, positive, table

EXAMPLES = (("ggjit peak llama-70b -c 4096 --flash", "a shape alone"),
            ("ggjit peak m.gguf --what-if", "batch sizes, flash attention, planners"),
            ("ggjit peak m.gguf --png plan.png --explore plan.html", "a picture, and a page to play with"))


def add_arguments(c):
    c.add_model("a GGUF, or a shape: llama-7b, llama-70b, ...")
    add_n_ctx(c, "context (what it was trained for)")
    c.add_argument("-b", "--n-batch", type=positive, default=512, metavar="N", help="tokens per batch (512)")
    c.add_argument("--flash", action="store_true", help="with flash attention")
    c.add_argument("--planner", choices=("ggml", "ggml-2023", "best"), default="best",
                   help="who places the tensors (best)")
    c.add_argument("--order", choices=("graph", "memory"), default="graph", help="execution order (graph)")
    c.add_argument("--all-logits", action="store_true", help="logits of every token, as llama.cpp reserves them")
    add_repack(c)
    add_strict(c)
    c.add_argument("--what-if", action="store_true", help="a table over planner, batch and flash attention")
    c.add_file("--png", metavar="FILE", help="write the picture: offset by time")
    c.add_file("--csv", metavar="FILE", help="write one line per tensor")
    c.add_file("--explore", metavar="FILE", help="write an interactive page (.html): batch, flash, planner, every step")


def run(args):
    options = dict(order=args.order, all_logits=args.all_logits, repack=args.repack, strict=args.strict)
    with compiling():
        report = model_peak(args.model, args.n_ctx, args.n_batch, args.flash, args.planner, **options)
        rows = what_if(args.model, (args.n_ctx,), sorted({1, 128, args.n_batch}), **options) if args.what_if else None
    if args.explore:
        explore_model(args.model, args.n_ctx, sorted({1, 128, args.n_batch}), strict=args.strict).save(args.explore)
    if args.png:
        report.plot(path=args.png)
    if args.csv:
        report.to_csv(args.csv)
    result = {"peak": report.peak, "lower_bound": report.lower_bound, "planner": args.planner,
              "n_nodes": report.n_nodes, "n_buffers": report.n_buffers, "seconds": report.total_seconds,
              "kinds": report.kinds, "memory": report.memory.as_dict()}
    if rows:
        result["what_if"] = rows
    if not args.json:
        console().print(report)
        console().print(f"a process that runs it\n{report.memory}")
        if rows:
            console().print(table("what if", rows[0], [[text(*item) for item in r.items()] for r in rows],
                                  justify="right"))
    return result


def text(column, value):
    return mib(value) if column in ("peak", "lower_bound", "kv", "total") else str(value)
