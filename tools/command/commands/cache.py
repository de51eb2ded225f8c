"""`ggjit cache`: lists the kernel cache, and exports and imports compiled kernels."""
import time

from ggjit.core.html_repr import size_text
from ggjit.display.progress import compiling
from ggjit.models.files import kept_layout
from ggjit.models.files.save import refuse_existing
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.printable import printable
from ggjit.ops.native.cache_files import cache_dir
from ggjit.ops.native.kernel_pack import install
from ggjit.tools.command.kernel_pack import export

EXAMPLES = (("ggjit cache list", "kernels and repacked weights that are kept; every file may be removed"),
            ("ggjit cache export kernels.pack -m m.gguf", "the kernels of a model, compiled if they are not there"),
            ("ggjit cache import kernels.pack", "on a processor of the same level: nothing is compiled there"))


def add_arguments(c):
    c.add_argument("mode", choices=("list", "export", "import"))
    c.add_file("file", nargs="?", metavar="FILE",
               help="the pack; it holds machine code, import it only from people you trust")
    c.add_argument("--force", action="store_true", help="export: replace FILE if it is there")
    c.add_file("-m", "--model", metavar="MODEL", help="export: the kernels this GGUF needs alone")


def run(args):
    if args.mode == "list":
        if args.file is not None or args.model is not None:
            raise ParamError("`ggjit cache list` takes no file and no model: it lists all there is")
        return _listed(args.json)
    if args.file is None:
        raise ParamError(f"name the pack: ggjit cache {args.mode} FILE")
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


def _listed(as_json):
    kernels = [file.stat().st_size for file in (cache_dir() / "kernels").glob("*.o")]
    layouts = [{"model": model, "nbytes": nbytes, "last_used": used, "file": str(file)}
               for model, nbytes, used, file in kept_layout.entries()]
    limit = kept_layout.limit_nbytes()
    if not as_json:
        print(f"{cache_dir()}\n{len(kernels)} kernels, {size_text(sum(kernels))}\n{len(layouts)} models' repacked "
              f"weights, {size_text(sum(x['nbytes'] for x in layouts))} (GGJIT_REPACKED: "
              f"{'off' if not limit else 'up to ' + size_text(limit)})")
        for x in layouts:
            print(f"  {size_text(x['nbytes']):>10}  {time.strftime('%Y-%m-%d %H:%M', time.localtime(x['last_used']))}  "
                  f"{printable(x['model'])}")
    return {"folder": str(cache_dir()), "kernels": len(kernels), "kernels_nbytes": sum(kernels), "repacked": layouts,
            "limit_nbytes": limit}
