"""`ggjit cache`: compiled kernels, carried to other processors of the same level (`ggjit info` names it)."""
from ggjit.display.progress import compiling
from ggjit.models.files.save import refuse_existing
from ggjit.ops.core.errors import ParamError
from ggjit.ops.native.kernel_pack import install
from ggjit.tools.command.kernel_pack import export

EXAMPLES = (("ggjit cache export kernels.pack -m m.gguf", "the kernels of a model, compiled if they are not there"),
            ("ggjit cache export kernels.pack", "all there are"),
            ("ggjit cache import kernels.pack", "on a processor of the same level: nothing is compiled there"))


def add_arguments(c):
    c.add_argument("mode", choices=("export", "import"))
    c.add_file("file", metavar="FILE", help="the pack; it holds machine code, import it only from people you trust")
    c.add_argument("--force", action="store_true", help="export: replace FILE if it is there")
    c.add_file("-m", "--model", metavar="MODEL", help="export: the kernels this GGUF needs alone")


def run(args):
    if args.mode == "import":
        if args.model is not None:
            raise ParamError("-m goes with export; `ggjit cache import FILE` takes a whole pack")
        n, new = install(args.file)
        if not args.json:
            print(f"{n} kernels in {args.file}, {new} of them new here")
        return {"kernels": n, "new": new}
    refuse_existing(args.file, args.force)
    with compiling():
        n = export(args.file, args.model)
    if not args.json:
        print(f"{n} kernels written to {args.file}")
    return {"kernels": n}
