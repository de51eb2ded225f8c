"""Code that several commands share: types of arguments, options, tables on stdout."""
import argparse
import os
import re
import sys

from ggjit.core.arguments import nbytes_of
from ggjit.models.blocks.hparams import ROPE_KINDS, ROPE_OPTIONS
from ggjit.models.core.checks import read_text
from ggjit.models.text.sampling import OPTIONS
from ggjit.ops.core.errors import ParamError, extra
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.printable import TEXT, printable
from ggjit.ops.types.shared.dot import OWN

PIPE_WIDTH = 200                    # columns where there is no terminal: nothing is cut off for the next program


# ---------------------------------------------------------------- types of arguments
def _at_least(low, words, name):
    """A type for argparse: an int from `low` on.  name: how argparse calls it in its errors."""
    def integer(text):
        n = int(text)
        if n < low:
            raise argparse.ArgumentTypeError(words)
        return n
    integer.__name__ = name
    return integer


positive = _at_least(1, "must be at least 1", "positive integer")
count = _at_least(0, "must not be negative", "integer")
n_predict = _at_least(-1, "must not be negative, or -1: until the text ends", "integer")
n_layers = _at_least(-1, "must be a number of layers, or -1 for all", "integer")


def nbytes(text):
    """Bytes of "1500000000", "1.5G" or "1.4GiB", for argparse; a k is 1000, as in llama-gguf-split."""
    try:
        return nbytes_of(text, "a size")
    except ParamError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def pairs(option, texts):
    """{NAME: VALUE} of "NAME=VALUE" texts.  Errors: ParamError."""
    wrong = next((text for text in texts if not text.partition("=")[0] or "=" not in text), None)
    if wrong is not None:
        raise ParamError(f"{option} takes NAME=VALUE, got {wrong!r}")
    names = [text.partition("=")[0] for text in texts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ParamError(f"{option} is given twice for {twice!r}; leave one of them out")
    return dict(text.split("=", 1) for text in texts)


def value(text):
    """What a text says as JSON; anything else is that text."""
    try:
        return parse_json(text)
    except ValueError:
        return text


# ---------------------------------------------------------------- options
# short names mean what they mean in llama.cpp; a test holds every command to them
SHORT_NAMES = {"-m": "--model", "-p": "--prompt", "-n": "--n-predict", "-t": "--threads", "-c": "--n-ctx",
               "-b": "--n-batch", "-s": "--seed", "-ngl": "--n-gpu-layers", "-ot": "--override-tensor"}


def add_threads(c, what="(default: the cores this process may use)", default=None):
    c.add_argument("-t", "--threads", type=positive, default=default, metavar="N", help=f"threads {what}")


def add_out(c):
    c.add_file("output", metavar="OUT", help="the new file; it appears when it is whole")
    c.add_argument("--force", action="store_true", help="replace OUT if it is there")


def add_files(c, what="a GGUF"):
    """The arguments of a command that makes one GGUF of another: IN, OUT, the size of parts."""
    c.add_file("input", metavar="IN", help=f"{what}; the first one of a model in several files")
    add_out(c)
    c.add_argument("--split-max-size", type=nbytes, metavar="SIZE", help="several files of at most 500M, 2G, ...")


def add_data(c, required=True):
    c.add_file("--data", required=required, metavar="FILE", help="a text, UTF-8")
    c.add_argument("-c", "--n-ctx", type=positive, default=512, metavar="N", help="tokens of a chunk (512)")
    c.add_argument("--chunks", type=positive, default=None, metavar="N", help="the first N chunks (all)")


def chunk_options(args):
    return {"n_ctx": args.n_ctx, "n_chunks": args.chunks}


def add_n_ctx(c, help):
    c.add_argument("-c", "--n-ctx", "--ctx", type=positive, default=None, metavar="N", help=help)


def add_repack(c):
    c.add_argument("--repack", action=argparse.BooleanOptionalAction, default=None,
                   help="all matrices, or none, in the layout that products read faster, for a slower load and memory "
                   "that is not shared (large ones where this processor is faster for it)")


def add_strict(c):
    c.add_argument("--no-strict", dest="strict", action="store_false",
                   help="compute also what is another model: tensors and settings that are not used are left out")


def add_kv_type(c):
    c.add_argument("--kv-type", default="F16", metavar="TYPE",
                   help="type of the KV cache: F16, F32, BF16, Q8_0, Q5_1, Q5_0, Q4_1, Q4_0, IQ4_NL; Q8_0/Q4_0: of "
                   "keys and of values (F16)")



def add_gpu(c):
    c.add_argument("-ngl", "--n-gpu-layers", type=n_layers, default=None, metavar="N",
                   help="the last N layers on the first GPU, -1: all and the output (none)")
    c.add_argument("--cpu-moe", action="store_true", help="with -ngl: the weights of experts stay on the CPU")
    c.add_argument("-ot", "--override-tensor", action="append", default=[], metavar="PATTERN=DEVICE",
                   help="with -ngl: tensors whose names match lie on that device, or CPU, before all other rules")


def patterns(texts):
    """{PATTERN: DEVICE}; a pattern may hold "=", a device's name does not."""
    wrong = next((t for t in texts if not all(t.rpartition("="))), None)
    if wrong is not None:
        raise ParamError(f"-ot takes PATTERN=DEVICE, such as exps=CPU, got {wrong!r}")
    return {pattern: device for pattern, _, device in (t.rpartition("=") for t in texts)}


def add_sampling(c):
    """The options of the sampler under its own names and llama.cpp's; `sampling(args)` has those that were given."""
    group = c.add_argument_group("sampling")
    for o in OPTIONS.values():
        names = [*(["-s"] if o.name == "seed" else []), "--" + o.name.replace("_", "-"), *o.flags]
        type_, more = _SAMPLING_TYPES.get(o.name, (o.kind, {}))
        default = "" if o.default in (None, {}) or o.name in _SAMPLING_TYPES else f" ({o.default})"
        group.add_argument(*names, dest=o.name, type=type_, default=argparse.SUPPRESS, metavar=o.metavar,
                           help=o.help + default, **more)


def add_grammar(c):
    """What an answer has to fit, under llama.cpp's names; `sampling(args)` has it, too."""
    group = c.add_argument_group("grammar").add_mutually_exclusive_group()
    group.add_argument("--grammar", metavar="GBNF", help="a grammar that the text fits")
    group.add_argument("--json-schema", metavar="JSON", help="a JSON Schema that the text fits")
    for name in ("grammar", "json-schema"):
        c.file_actions.append(group.add_argument(f"--{name}-file", metavar="FILE", help=f"--{name} from a file"))


def add_diffusion(c):
    """The options of models that write all tokens at once, under llama.cpp's names; `diffusion(args)` has them."""
    group = c.add_argument_group("diffusion", "of models that write all tokens of an answer at once")
    for name, type_, metavar, about in DIFFUSION:
        group.add_argument("--diffusion-" + name.replace("_", "-"), dest="diffusion_" + name, type=type_,
                           default=argparse.SUPPRESS, metavar=metavar, help=about)


def _algorithm(text):
    """A name, or llama.cpp's number of it."""
    return LLAMACPP_ALGORITHMS[int(text)] if text.isdecimal() and int(text) < len(LLAMACPP_ALGORITHMS) else text


LLAMACPP_ALGORITHMS = "origin", "entropy", "margin", "random", "confidence"
DIFFUSION = (("steps", int, "N", "steps of an answer (one for each token)"),
             ("eps", float, "X", "where the time of the steps ends (0.001, or by blocks, as the model was trained)"),
             ("block_length", int, "N", "tokens of a block, one block after the other"),
             ("algorithm", _algorithm, "NAME", f"what is decided first: {', '.join(LLAMACPP_ALGORITHMS)}, or 0 to 4 "
                                               f"(confidence)"),
             ("alg_temp", float, "X", "temperature of that (0)"),
             ("cfg_scale", float, "X", "how far logits move from those without the prompt (0)"))


def diffusion(args):
    """{name: value} of these options on the command line, for m.generate."""
    return {name: vars(args)["diffusion_" + name] for name, *_ in DIFFUSION if "diffusion_" + name in vars(args)}


def sampling(args):
    """{name: value} of the sampling and grammar options on the command line, for m.generate."""
    found = {name: value for name, value in vars(args).items() if name in OPTIONS}
    for name in ("grammar", "json_schema"):
        path, value = getattr(args, f"{name}_file"), getattr(args, name)
        if path or value is not None:
            found[name] = read_text(path) if path else value
    if "logit_bias" in found:
        found["logit_bias"] = dict(found["logit_bias"])
    if found.get("dry_sequence_breakers") == ["none"]:
        found["dry_sequence_breakers"] = ()
    return found


def _id_and_bias(text):
    """"42+1.5", "42-1.5", "42-inf" -> (42, bias)."""
    found = re.fullmatch(r"(\d+)([+-](?:inf|\d*\.?\d+(?:e[+-]?\d+)?))", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 42+1.5 or 42-inf")
    return int(found[1]), float(found[2])


_SAMPLING_TYPES = {"logit_bias": (_id_and_bias, {"action": "append"}), "samplers": (str, {}), "seed": (int, {}),
                   "dry_sequence_breakers": (str, {"action": "append"})}


def add_rope(c):
    """llama.cpp's options of RoPE; rope_args(args): those that were given."""
    group = c.add_argument_group("RoPE, instead of what the file states")
    group.add_argument("--rope-scaling", choices=ROPE_KINDS[:-1], default=None, help="how positions are scaled")
    for name, help in (("rope-scale", "contexts grow by this factor"), ("rope-freq-base", "base of the angles"),
                       ("rope-freq-scale", "1 / --rope-scale"), ("yarn-ext-factor", "0: none of YaRN, 1: all"),
                       ("yarn-attn-factor", "of the scores"), ("yarn-beta-fast", "angles that are kept"),
                       ("yarn-beta-slow", "angles that are scaled")):
        group.add_argument("--" + name, type=float, default=None, metavar="X", help=help)
    group.add_argument("--yarn-orig-ctx", type=positive, default=None, metavar="N", help="context of the training")


def rope_args(args):
    return {name: getattr(args, name) for name in ROPE_OPTIONS if getattr(args, name) is not None}


# ---------------------------------------------------------------- output
def console():
    """rich's, on stdout.  Names of files and tensors are no markup, whatever brackets they hold."""
    extra("rich", "models")
    from rich.console import Console
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH,
                   markup=False, emoji=False)


def table(title, columns, rows, **options):
    """A table for console().  columns: their titles; rows: of str.  options: of every column."""
    extra("rich", "models")
    from rich.table import Table
    out = Table(title=title, title_justify="left")
    for column in columns:
        out.add_column(column, **options)
    for row in rows:
        out.add_row(*(printable(cell, keep=TEXT) for cell in row))
    return out


def text_nbytes(n):
    """1,234,567 bytes -> "1.2 MB"."""
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB" if n >= 1e5 else f"{n / 1e3:.1f} kB"


def tiles_json(choices):
    """The JSON of measured choices, from {type: Choice}."""
    return {t.name: {"rows": c.tile.rows, "prefetch": c.tile.prefetch, "gain": c.gain, "repacked": c.layout is not None,
                     "layout_gain": c.layout_gain} for t, c in choices.items()}


def tiles_line(tiles):
    """tiles_json's dict in words."""
    return ", ".join(f"{name} {c['rows']}{'' if c['prefetch'] == OWN else ' ' + c['prefetch']} ({c['gain']:.2f} x)"
                     + (f", repacked ({c['layout_gain']:.2f} x)" if c["repacked"] else "") for name, c in tiles.items())
