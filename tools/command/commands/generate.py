"""`ggjit generate`: continue a text."""
import contextlib
import sys

from ggjit.display.progress import bar, compiling
from ggjit.ops.core.printable import TEXT, printable
from ggjit.tools.command.common import (
    add_gpu,
    add_grammar,
    add_kv_type,
    add_n_ctx,
    add_repack,
    add_rope,
    add_sampling,
    add_strict,
    add_threads,
    count,
    n_predict,
    rope_args,
    sampling,
)
from ggjit.tools.command.helpers import add_lora, load

EXAMPLES = (('ggjit generate -p "It was a truth"', "the model that comes with ggjit"),
            ('ggjit generate -m m.gguf -p "1, 2, 3" --temp 0', "always the likeliest token"),
            ("ggjit generate -m m.gguf -p Who? --json-schema '{\"enum\": [\"Tom\", \"Max\"]}'", "one of these"))


def add_arguments(c):
    c.add_file("-m", "--model", metavar="PATH", help="a llama GGUF (default: the small model that comes with ggjit)")
    add_lora(c)
    c.add_argument("-p", "--prompt", required=True, metavar="TEXT")
    c.add_argument("-n", "--n-predict", type=n_predict, default=64, metavar="N",
                   help="tokens to generate, -1: until the text ends (64)")
    c.add_argument("-r", "--reverse-prompt", "--stop", dest="stop", action="append", default=[], metavar="TEXT",
                   help="stop before this text (may be given several times)")
    c.add_argument("--ignore-eos", action="store_true", help="the model's own ends are never chosen")
    c.add_argument("--context-shift", action="store_true", help="drop older tokens when the context is full")
    c.add_argument("--keep", dest="n_keep", type=count, default=0, metavar="N",
                   help="with --context-shift: the first N tokens stay (0)")
    add_kv_type(c)
    add_n_ctx(c, "context size (the model's own)")
    add_repack(c)
    add_rope(c)
    add_strict(c)
    add_gpu(c)
    add_threads(c)
    add_sampling(c)
    add_grammar(c)


def run(args):
    with compiling():
        m = load(args.model, args, kv_type=args.kv_type, n_ctx=args.n_ctx, repack=args.repack, **rope_args(args))
        pieces = m.generate(args.prompt, args.n_predict, stop=args.stop, ignore_eos=args.ignore_eos,
                            context_shift=args.context_shift, n_keep=args.n_keep, **sampling(args))
        if not args.json:
            print(printable(args.prompt, keep=TEXT), end="", flush=True)
        total = args.n_predict if args.n_predict > 0 else None
        with bar("tokens", total) if args.json else contextlib.nullcontext() as step:
            for piece in pieces:
                if args.json:
                    step()
                else:
                    print(printable(piece, keep=TEXT), end="", flush=True)
    s = pieces.stats
    if not args.json:
        print()
        print(f"[{s['prompt_tokens']} prompt tokens at {s['prefill_tokens_per_second']:,.0f}/s, {len(s['tokens'])} "
              f"generated at {s['decode_tokens_per_second']:,.0f}/s; {s['stop_reason']}]", file=sys.stderr)
    return s
