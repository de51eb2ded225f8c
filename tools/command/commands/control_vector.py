"""`ggjit control-vector`: the direction from some texts to others, for `--control-vector`."""
from ggjit.display.progress import compiling
from ggjit.models.core.checks import read_text
from ggjit.models.files.save import refuse_existing, refuse_source
from ggjit.models.networks.parts.steering import METHODS, make_control_vector
from ggjit.ops.core.errors import ParamError
from ggjit.tools.command.common import add_n_ctx, add_strict, add_threads
from ggjit.tools.command.helpers import load
from ggjit.train.checkpoint import require_folder

EXAMPLES = (("ggjit control-vector m.gguf --positive-file happy.txt --negative-file sad.txt -o happy.gguf",
             "then: ggjit generate -m m.gguf --control-vector happy.gguf=2 -p TEXT"),
            ("ggjit control-vector m.gguf --positive-file a.txt --negative-file b.txt --method mean", ""))


def add_arguments(c):
    c.add_model("a GGUF that generates text")
    for side in ("positive", "negative"):
        c.add_file(f"--{side}-file", required=True, metavar="FILE", help=f"the {side} texts, UTF-8, one a line; the "
                   "first lines of both files are a pair, and so on")
    c.add_argument("--method", choices=METHODS, default=METHODS[0],
                   help="the differences' first principal component, or their mean (pca)")
    c.add_file("-o", "--output", metavar="OUT", default="control_vector.gguf",
               help="the file to write (control_vector.gguf)")
    c.add_argument("--force", action="store_true", help="replace OUT if it is there")
    add_n_ctx(c, "context size (the model's own)")
    add_strict(c)
    add_threads(c)


def run(args):
    refuse_existing(args.output, args.force)                # refuse before computing, not after
    refuse_source(args.output, args.model, args.positive_file, args.negative_file)
    require_folder(args.output)
    positive, negative = (read_text(path).splitlines() for path in (args.positive_file, args.negative_file))
    empty = next((i for i, pair in enumerate(zip(positive, negative, strict=False), 1) if not all(pair)), None)
    if empty is not None:
        raise ParamError(f"line {empty} of {args.positive_file} or {args.negative_file} is empty; a text is expected "
                         f"in each")
    with compiling():
        m = load(args.model, args, n_ctx=args.n_ctx, reserve=False)
        vector = make_control_vector(m, positive, negative, args.method)
    vector.save(args.output)
    if not args.json:
        print(f"{args.output}: {len(vector.directions)} layers, of {len(positive)} pairs of texts")
    return {"path": args.output, "layers": len(vector.directions), "pairs": len(positive)}
