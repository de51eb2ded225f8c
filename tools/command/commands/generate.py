"""`ggjit generate`: continue a text."""
import contextlib
import sys
import time

from ggjit.display.progress import bar, compiling
from ggjit.models.networks.bulk import generate_texts
from ggjit.models.networks.load import load_model
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.printable import TEXT, printable
from ggjit.tools.command.common import (
    add_diffusion,
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
    diffusion,
    n_predict,
    rope_args,
    sampling,
)
from ggjit.tools.command.helpers import add_control, add_lora, add_vision, load
from ggjit.tools.command.texts import add_texts, compute_file, write_jsonl, write_parquet

EXAMPLES = (('ggjit generate -p "It was a truth"', "the model that comes with ggjit"),
            ('ggjit generate -m m.gguf -p "1, 2, 3" --temp 0', "always the likeliest token"),
            ("ggjit generate -m m.gguf -p Who? --json-schema '{\"enum\": [\"Tom\", \"Max\"]}'", "one of these"))


def add_arguments(c):
    c.add_file("-m", "--model", metavar="PATH", help="a llama GGUF (default: the small model that comes with ggjit)")
    add_lora(c)
    add_control(c)
    add_vision(c)
    c.add_argument("-p", "--prompt", metavar="TEXT")
    add_texts(c, "texts: .jsonl or .parquet")
    c.add_argument("-n", "--n-predict", type=n_predict, default=64, metavar="N",
                   help="tokens to generate, -1: until the text ends (64)")
    c.add_argument("-r", "--reverse-prompt", "--stop", dest="stop", action="append", default=[], metavar="TEXT",
                   help="stop before this text (may be given several times)")
    c.add_argument("--ignore-eos", action="store_true", help="the model's own ends are never chosen")
    c.add_argument("--logprobs", type=count, default=None, metavar="N",
                   help="with --json: log-probabilities of every token and the N likeliest there, before sampling")
    c.add_argument("--context-shift", action="store_true", help="drop older tokens when the context is full")
    c.add_argument("--keep", dest="n_keep", type=count, default=0, metavar="N",
                   help="with --context-shift: the first N tokens stay (0)")
    c.add_file("--speculative", metavar="lookup|mtp|PATH",
               help="guess what follows from the text itself, by a layer that the model has for it, or by a smaller "
                    "model of the same vocabulary or one that reads its layers (EAGLE-3, DFlash)")
    add_diffusion(c)
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
    if args.input is not None:
        return _file(args)
    if args.logprobs is not None and not args.json:
        raise ParamError("--logprobs is printed with --json; add --json")
    if args.prompt is None or args.output is not None or args.cluster is not None or args.workers is not None:
        raise ParamError("generate takes --prompt TEXT, or --input FILE with --output FILE")
    with compiling():
        m = load(args.model, args, kv_type=args.kv_type, n_ctx=args.n_ctx, repack=args.repack, **rope_args(args))
        pieces = m.generate(args.prompt, args.n_predict, stop=args.stop, ignore_eos=args.ignore_eos,
                            context_shift=args.context_shift, n_keep=args.n_keep, logprobs=args.logprobs,
                            speculative=_speculative(args), images=args.image, audio=args.audio, **diffusion(args),
                            **sampling(args))
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


def _speculative(args):
    """What `generate` takes: "lookup", "mtp", the loaded draft model, or None."""
    if args.speculative in (None, "lookup", "mtp"):
        return args.speculative
    return load_model(args.speculative, n_threads=args.threads, n_ctx=args.n_ctx, strict=args.strict)


def _file(args):
    """Every text of a file, several at once; on workers, if there are any."""
    if args.prompt is not None or args.context_shift or args.lora or args.logprobs is not None or args.speculative \
            or args.control_vector:
        raise ParamError("generate --input FILE goes without --prompt, --context-shift, --logprobs, --lora, "
                         "--control-vector and --speculative")
    t0, load = time.perf_counter(), {"n_ctx": args.n_ctx, "kv_type": args.kv_type, "repack": args.repack,
                                     "strict": args.strict, "n_threads": args.threads, **rope_args(args)}
    options = {"n_predict": args.n_predict, "stop": tuple(args.stop), "ignore_eos": args.ignore_eos, **sampling(args)}
    found = compute_file(args, (".jsonl", ".parquet"), lambda texts, cluster, keep, progress: generate_texts(
        args.model, texts, cluster, keep, progress=progress, load=load, **options), _write)
    found["seconds"] = time.perf_counter() - t0
    if not args.json:
        print(f"{found['texts']} texts in {found['seconds']:.1f} s: {args.output}")
    return found


def _write(path, texts, answers):
    if path.endswith(".parquet"):
        write_parquet(path, {"text": texts, "answer": answers})
    else:
        write_jsonl(path, ({"text": text, "answer": answer} for text, answer in zip(texts, answers, strict=True)))
    return {}
