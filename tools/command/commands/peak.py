"""`ggjit peak`: peak memory of a model, without allocating or reading weights."""
import argparse

from ggjit.alloc.report import mib
from ggjit.display.progress import compiling
from ggjit.models.networks.peak import explore_model, model_peak, what_if
from ggjit.tools.command.common import (
    add_n_ctx,
    add_repack,
    add_strict,
    console,
    n_layers,
    pairs,
    patterns,
    positive,
    table,
)

EXAMPLES = (("ggjit peak llama-70b -c 4096 --png plan.png", "a shape alone, with a picture of the plan"),
            ("ggjit peak m.gguf --device GPU0=24G -ot exps=CPU", "what lies where, for devices that need not be here"),
            ("ggjit peak m.gguf --mmproj mmproj.gguf --image 1920x1080", "with a picture that it reads"))


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
    c.add_argument("--device", action="append", default=[], metavar="NAME=SIZE",
                   help="a GPU, which need not be here: GPU0=24G; several share the layers")
    c.add_argument("-ngl", "--n-gpu-layers", type=n_layers, default=None, metavar="N",
                   help="layers on these devices, -1: all and the output (all)")
    c.add_argument("--cpu-moe", action="store_true", help="the weights of experts stay on the host")
    c.add_argument("-ot", "--override-tensor", action="append", default=[], metavar="PATTERN=DEVICE",
                   help="tensors whose names match lie on that device, or CPU")
    c.add_file("-mm", "--mmproj", metavar="PATH", help="the model's vision part, for --image")
    c.add_argument("--image", type=size, metavar="WxH", help="with a picture of so many pixels: 1920x1080")
    c.add_file("--draft", metavar="PATH", help="a draft model beside it, as generate's --speculative")
    c.add_argument("--what-if", action="store_true", help="a table over planner, batch and flash attention")
    c.add_file("--png", metavar="FILE", help="write the picture: offset by time")
    c.add_file("--csv", metavar="FILE", help="write one line per tensor")
    c.add_file("--explore", metavar="FILE", help="write an interactive page (.html): batch, flash, planner, every step")


def run(args):
    options = dict(order=args.order, all_logits=args.all_logits, repack=args.repack, strict=args.strict)
    placed = dict(devices=pairs("--device", args.device), n_gpu_layers=args.n_gpu_layers, cpu_moe=args.cpu_moe,
                  override_tensor=patterns(args.override_tensor))
    more = dict(vision=args.mmproj, image=args.image, draft=args.draft)
    with compiling():
        report = model_peak(args.model, args.n_ctx, args.n_batch, args.flash, args.planner, **options, **placed, **more)
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


def size(text):
    """(width, height) of "1920x1080"."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected WxH, such as 1920x1080, got {text!r}")
    return tuple(map(int, parts))


def text(column, value):
    return mib(value) if column in ("peak", "lower_bound", "kv", "total") else str(value)
