"""`ggjit plan`: place buffers with given lifetimes."""
from ggjit.alloc.csvio import run_plan_csv
from ggjit.display.progress import clock, compiling
from ggjit.ops.core.errors import BadFile
from ggjit.tools.command.common import add_threads, count, pairs

EXAMPLES = (("ggjit plan buffers.csv -o placed.csv --time-limit 10", "as low a peak as ten seconds find"),
            ("ggjit plan snapshot.json", "PyTorch's allocator beside a static plan"),
            ("ggjit plan model.onnx --dim batch=1 --dim seq=128 --png plan.png", "what its results need, by shape"))


def add_arguments(c):
    c.add_file("input", metavar="IN", help="a CSV, one line per buffer; lower, upper: half-open steps; a "
               "snapshot of PyTorch's allocator (.json, .pickle) or a trace of its profiler (.json), a log of ggml's "
               "(.log, .txt), an ONNX graph (.onnx)")
    c.add_file("-o", "--output", metavar="OUT.csv", help="the input with an offset column")
    c.add_file("--png", metavar="FILE", help="write the picture: offset by time")
    c.add_argument("--dim", action="append", default=[], metavar="NAME=N",
                   help="of an ONNX graph, the size of a dimension that it leaves open")
    c.add_argument("--capacity", type=count, default=None, metavar="BYTES", help="exit 1 if it cannot be met")
    c.add_argument("--time-limit", type=float, default=1.0, metavar="S", help="seconds of search (1)")
    c.add_argument("--node-limit", type=count, default=None, metavar="N",
                   help="search nodes instead of seconds: the same layout everywhere, with any number of threads")
    c.add_argument("-s", "--seed", type=count, default=0, metavar="N", help="of the local search (0)")
    add_threads(c, "that search at a time (1)", default=1)


def run(args):
    search = dict(time_limit=args.time_limit, node_limit=args.node_limit, seed=args.seed, n_threads=args.threads)
    with compiling(), clock(f"searching at most {args.time_limit:g} s", args.time_limit):
        try:
            result = run_plan_csv(args.input, args.output, args.capacity, pairs("--dim", args.dim), args.png, **search)
        except OSError as e:
            raise BadFile(f"{e.filename}: {e.strerror}; check the path") from None
    verdict = result["fits"]                    # "fits", "does not fit" (proved), "not found in time"
    result |= {"fits": args.capacity is None or result["peak"] <= args.capacity, "verdict": verdict}
    if not args.json:
        if result.get("taken") is not None:
            print(f"{result['what']} held {result['taken']:,} bytes")
        print(f"peak {result['peak']:,}  lower bound {result['proved_bound']:,}  {verdict}  {result['seconds']:.3f} s")
    return result
