"""`ggjit finetune`: train a LoRA adapter beside the frozen weights of a model."""
import contextlib
import signal
import threading

from ggjit.alloc.report import mib
from ggjit.display.progress import compiling
from ggjit.models.networks.finetune import TARGETS, finetune
from ggjit.tools.command.common import add_n_ctx, add_threads, count, nbytes, positive

EXAMPLES = (("ggjit finetune --data letters.txt -o letters.gguf", "the model that comes with ggjit"),
            ("ggjit finetune m.gguf --data notes.jsonl --memory 1.5G -o notes.gguf",
             "within so many bytes; then ggjit generate -m m.gguf --lora notes.gguf -p Hello"))


def add_arguments(c):
    c.add_model("a GGUF, also a quantised one (the model that comes with ggjit)", required=False)
    c.add_file("--data", required=True, metavar="FILE", help='text, or .jsonl with a "text" a line')
    c.add_file("-o", "--out", required=True, metavar="FILE", help="the adapter to write, in llama.cpp's format")
    c.add_argument("--force", action="store_true", help="replace it if it is there")
    c.add_argument("--rank", type=positive, default=8, metavar="R", help="of the two matrices beside a weight (8)")
    c.add_argument("--alpha", type=float, default=None, metavar="A", help="they count alpha / rank times (2 rank)")
    c.add_argument("--targets", default=None, metavar="NAMES",
                   help=f"matrices to adapt, with commas between (all there are of {','.join(TARGETS)})")
    c.add_argument("--memory", type=nbytes, default=None, metavar="BYTES",
                   help="of the whole process, such as 1.5G: what does not fit is computed again (no limit)")
    add_n_ctx(c, "tokens of a row (256; a short text has four rows)")
    c.add_argument("--epochs", type=positive, default=None, metavar="N",
                   help="times through the data (once; a short text as often as makes 40 steps)")
    c.add_argument("--steps", type=positive, default=None, metavar="N", help="stop after so many steps")
    c.add_argument("--batch", type=positive, default=1, metavar="N", help="rows of a step (1)")
    c.add_argument("--lr", type=float, default=None, metavar="RATE",
                   help="learning rate of AdamW (0.08 / steps, between 2e-4 and 2e-3)")
    c.add_argument("-s", "--seed", type=count, default=0, metavar="N", help="of the first values and the order (0)")
    c.add_argument("--sample", metavar="PROMPT", help="show what the model writes after it, before and after")
    c.add_file("--checkpoint", metavar="FILE", help="written every minute and at the end; the same command goes on "
               "from it")
    add_threads(c)


@contextlib.contextmanager
def ended_by_sigterm():
    """SIGTERM does what Ctrl-C does: the adapter of the last finished step is written, and the checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(args):
    def planned(job):
        found["peak"] = job.peak
        if not args.json:
            print(f"{job.n_params:,} parameters, {job.n_steps} steps; memory: {job.peak:,} bytes ({mib(job.peak)})",
                  flush=True)

    def stepped(history):
        n = len(history.steps)
        if not args.json and (n < 10 or n % 10 == 0):
            print(f"step {n}: loss {history.steps[-1]:.4f}", flush=True)
    found = {}
    targets = None if args.targets is None else [t.strip() for t in args.targets.split(",") if t.strip()]
    with compiling(), ended_by_sigterm():
        h = finetune(args.model, args.data, args.out, args.rank, args.alpha, targets, args.n_ctx, args.memory,
                     args.epochs, args.steps, args.lr, args.batch, args.seed, args.threads, args.checkpoint, stepped,
                     on_plan=planned, force=args.force, sample=args.sample)
    if not args.json:
        for what, text in (("before", h.before), ("after", h.after)) if args.sample else ():
            print(f"{what}: {args.sample}{text}")
        print(f"wrote {args.out}")
    sample = {"before": h.before, "after": h.after} if args.sample else {}
    return found | {"out": args.out, "steps": len(h.steps), "loss": h.steps} | sample
