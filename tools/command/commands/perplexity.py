"""`ggjit perplexity`: how well a model predicts a text, and how far its predictions are from a better model's."""
from ggjit.display.progress import compiling
from ggjit.models.core.checks import read_text
from ggjit.models.files.gguf import MAGIC
from ggjit.models.files.save import refuse_existing
from ggjit.models.networks.evaluate import SavedLogits, perplexity
from ggjit.models.networks.multiple_choice import multiple_choice
from ggjit.ops.core.errors import ParamError
from ggjit.tools.command.common import (
    add_data,
    add_gpu,
    add_kv_type,
    add_strict,
    add_threads,
    chunk_options,
    positive,
)
from ggjit.tools.command.helpers import load

EXAMPLES = (("ggjit perplexity q4.gguf --data wiki.txt", "as llama-perplexity: chunks of 512 tokens"),
            ("ggjit perplexity q4.gguf --data wiki.txt --kl-divergence-base f16.gguf", "what quantising costs"),
            ("ggjit perplexity q4.gguf --hellaswag hellaswag_val_full.txt --tasks 400", "endings it finds likeliest"))


def add_arguments(c):
    c.add_model("a GGUF that generates text")
    add_data(c, required=False)
    c.add_file("--hellaswag", "--multiple-choice", dest="tasks", metavar="FILE",
               help="instead of --data: endings to choose from, llama.cpp's six lines a task or .jsonl")
    c.add_argument("--tasks", dest="n_tasks", type=positive, default=None, metavar="N",
                   help="the first N of them (all)")
    c.add_file("--kl-divergence-base", metavar="FILE", help="a better model, or its log-probabilities in a file")
    c.add_file("--save-logits", metavar="FILE", help="write the log-probabilities, 16 bits each")
    c.add_argument("--force", action="store_true", help="replace the file of --save-logits if it is there")
    add_kv_type(c)
    add_strict(c)
    add_gpu(c)
    add_threads(c)


def run(args):
    if args.tasks is not None:
        return _choices(args)
    if args.data is None:
        raise ParamError("perplexity takes a text, --data FILE, or tasks, --hellaswag FILE")
    if args.save_logits is not None:
        refuse_existing(args.save_logits, args.force)       # refuse before computing, not after
    text, options, base = read_text(args.data), chunk_options(args), args.kl_divergence_base
    with compiling():
        if base is not None and is_model(base):
            base = load(base, args, n_ctx=args.n_ctx, kv_type=args.kv_type)
        elif base is not None and SavedLogits(base).n_ctx != args.n_ctx:
            raise ParamError(f"{base}: made from chunks of {SavedLogits(base).n_ctx} tokens; say so with -c")
        m = load(args.model, args, n_ctx=args.n_ctx, kv_type=args.kv_type)
        r = perplexity(m, text, base=base, save_logits=args.save_logits, force=args.force, **options)
    if not args.json:
        print(f"perplexity {r['perplexity']:.4f} +/- {r['error']:.5f}, {r['n_tokens']:,} tokens predicted in "
              f"{r['n_chunks']} chunks of {r['n_ctx']}")
        if base is not None:
            print(f"base {r['base_perplexity']:.4f}; KL divergence {r['kl_divergence']:.6f} +/- {r['kl_error']:.6f}, "
                  f"median {r['kl_median']:.6f}, 99 % {r['kl_99']:.6f}, largest {r['kl_max']:.6f}; same likeliest "
                  f"token {100 * r['same_top']:.2f} %")
    return r


def _choices(args):
    if args.data is not None or args.kl_divergence_base is not None or args.save_logits is not None:
        raise ParamError("--hellaswag goes without --data, --kl-divergence-base and --save-logits")
    with compiling():
        r = multiple_choice(load(args.model, args, n_ctx=args.n_ctx, kv_type=args.kv_type), args.tasks, args.n_tasks)
    if not args.json:
        print(f"{100 * r['accuracy']:.2f} % +/- {100 * r['error']:.2f} of {r['n_tasks']:,} tasks are right")
    return r


def is_model(path):
    """Is the file a GGUF?  One that cannot be read is left to the loader's error."""
    try:
        with open(path, "rb") as f:
            return f.read(len(MAGIC)) == MAGIC
    except OSError:
        return True
