"""The command line: `ggjit <command>`.  Results go to stdout (one JSON object with --json), progress to stderr.

Exit status: 0 done, 1 could not be done (one line on stderr: what, and how to mend it), 2 wrong usage, 130 Ctrl-C.
"""
import argparse
import json
import os
import sys

from ggjit.ops.errors import GgjitError


def _positive(text):
    n = int(text)
    if n < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return n


def _count(text):
    n = int(text)
    if n < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return n


_positive.__name__, _count.__name__ = "positive integer", "integer"       # as argparse names them in its errors


def _parser():
    p = argparse.ArgumentParser(prog="ggjit", description="ggml's engine as a Numba JIT: run, measure and inspect "
                                "models.  Start with `ggjit demo`.")
    from ggjit import __version__
    p.add_argument("--version", action="version", version=f"ggjit {__version__}")
    sub = p.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name, help, **kw):
        c = sub.add_parser(name, help=help, description=help, **kw)
        c.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
        return c

    def threads(c, *names):
        c.add_argument(*(names or ("--threads",)), type=_positive, default=None, metavar="N",
                       help="threads (default: the cores this process may use)")
    c = command("demo", "the main job: real sentences through the real MiniLM, nearest neighbours, speed, memory plan")
    threads(c)
    c = command("embed", "sentence embeddings")
    c.add_argument("--model", metavar="PATH", help="a bert GGUF (default: MiniLM, made on first use)")
    threads(c)
    c.add_argument("text", nargs="+", metavar="TEXT")
    c = command("generate", "continue a text")
    c.add_argument("--model", required=True, metavar="PATH", help="a llama GGUF")
    c.add_argument("--prompt", required=True)
    c.add_argument("--n-predict", type=_count, default=64, metavar="N", help="tokens to generate (64)")
    c.add_argument("--temp", type=float, default=0.8, metavar="T", help="temperature, 0: greedy (0.8)")
    c.add_argument("--top-k", type=_count, default=40, metavar="K")
    c.add_argument("--top-p", type=float, default=0.95, metavar="P")
    c.add_argument("--seed", type=int, default=None)
    c.add_argument("--kv-type", default="F16", metavar="TYPE", help="type of the KV cache: F16 or F32 (F16)")
    c.add_argument("--n-ctx", type=_positive, default=None, metavar="N", help="context size (what the model allows)")
    threads(c)
    c = command("bench", "speed of a model, as llama-bench: pp = prompt processing, tg = text generation")
    c.add_argument("model", metavar="MODEL", help="a llama GGUF; no vocabulary needed")
    c.add_argument("-p", type=_count, default=128, metavar="N", help="prompt tokens, 0 skips (128)")
    c.add_argument("-n", type=_count, default=64, metavar="N", help="generated tokens, 0 skips (64)")
    threads(c, "-t", "--threads")
    c.add_argument("-r", type=_positive, default=3, metavar="N", help="repetitions (3)")
    c.add_argument("--kv-type", default="F16", metavar="TYPE")
    c = command("vad", "where somebody speaks in a recording (Silero VAD)")
    c.add_argument("wav", metavar="FILE.wav", help="16 kHz PCM")
    c.add_argument("--model", required=True, metavar="PATH", help="a Silero VAD model in whisper.cpp's file form")
    c.add_argument("--threshold", type=float, default=0.5, metavar="P", help="probability of speech (0.5)")
    c.add_argument("--min-speech-ms", type=_count, default=250, metavar="MS", help="shorter speech is dropped (250)")
    c.add_argument("--min-silence-ms", type=_count, default=100, metavar="MS", help="silence that ends speech (100)")
    c.add_argument("--max-speech-s", type=float, default=float("inf"), metavar="S", help="longer speech is cut (never)")
    c.add_argument("--pad-ms", type=_count, default=30, metavar="MS", help="added on both sides (30)")
    c.add_argument("--conv-type", choices=("F32", "F16"), default="F32", help="F16: round as ggml does (F32)")
    threads(c)
    c = command("peak", "peak memory of a model, measured without allocating or reading weights")
    c.add_argument("model", metavar="MODEL", help="a GGUF, or a shape: llama-7b, llama-70b, ...")
    c.add_argument("--n-ctx", type=_positive, default=None, metavar="N", help="context (what it was trained for)")
    c.add_argument("--n-batch", type=_positive, default=512, metavar="N", help="tokens per batch (512)")
    c.add_argument("--flash", action="store_true", help="with flash attention")
    c.add_argument("--planner", choices=("ggml", "ggml-2023", "best"), default="best")
    c.add_argument("--order", choices=("graph", "memory"), default="graph", help="execution order")
    c.add_argument("--all-logits", action="store_true", help="logits of every token, as llama.cpp reserves them")
    c.add_argument("--what-if", action="store_true", help="a table over planner, batch and flash attention")
    c.add_argument("--png", metavar="FILE", help="write the picture: offset by time")
    c.add_argument("--csv", metavar="FILE", help="write one line per tensor")
    c = command("plan", "place buffers with given lifetimes (MiniMalloc's CSV: id,lower,upper,size)")
    c.add_argument("input", metavar="IN.csv")
    c.add_argument("-o", "--output", metavar="OUT.csv", help="the input with an offset column")
    c.add_argument("--capacity", type=_count, default=None, metavar="BYTES", help="exit 1 if it cannot be met")
    c.add_argument("--time-limit", type=float, default=1.0, metavar="S", help="seconds of search (1)")
    c = command("ops", "the op suite of ggml's test-backend-ops: check, time or list the cases")
    c.add_argument("mode", choices=("test", "perf", "support"))
    c.add_argument("-o", "--op", metavar="OP", help="ops or classes, comma separated, or one whole \"OP(params)\"")
    c.add_argument("-b", "--backend", metavar="DEVICE", default="CPU", help="device (CPU)")
    c.add_argument("-p", "--params", metavar="REGEX", help="cases whose parameters match")
    c.add_argument("--seed", type=_count, default=0, metavar="N", help="of the inputs and the sample (0)")
    c.add_argument("--sample", type=_positive, default=None, metavar="N", help="at most N cases, drawn by the seed")
    c.add_argument("--threads", type=_positive, default=1, metavar="N", help="threads of both sides (1)")
    c.add_argument("-j", "--jobs", type=_positive, default=None, metavar="N",
                   help="processes that share the test (one a core)")
    c = command("info", "version, processor, devices, and which types and ops each device supports")
    c.add_argument("op", nargs="?", metavar="OP", help="one op: its builders, types and files (\"soft_max\")")
    c = command("warm-up", "compile the kernels a model needs into the cache")
    c.add_argument("model", nargs="?", metavar="MODEL", help="a GGUF (default: MiniLM)")
    return p


def main(argv=None):
    """Entry point of the `ggjit` command; returns the exit status."""
    from ggjit.models import commands
    if sys.stderr is None:                  # closed by the caller
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="replace")        # a terminal that cannot show a character shows ? instead
    args = _parser().parse_args(argv)
    run = getattr(commands, args.command.replace("-", "_"))
    try:
        result = run(args)
        if args.json:
            print(json.dumps(result))
        if not result.get("fits", True):
            print(f"ggjit plan: over the capacity of {args.capacity:,} bytes: {result['verdict']}; the best layout "
                  f"found has {result['peak']:,}", file=sys.stderr)
            return 1
        return int(result.get("failed", False))
    except GgjitError as e:
        print(f"ggjit {args.command}: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:                # before OSError, of which it is one
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # the reader left; say nothing more
        return 1
    except OSError as e:
        print(f"ggjit {args.command}: {e.filename or 'output'}: {e.strerror}; check the path and the space there",
              file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
