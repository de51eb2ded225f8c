"""Compiling in parallel: helper processes compile a model's kernels from the other end.

    this process      alloc.alias ... walk.run   get_rows   rope   mul_mat ->
    a helper                                               <- mul_mat   swiglu   flash_attn   set_rows

A helper maps the same file, builds the same graphs and chooses the same kernels, without memory or a plan.  All
processes look into the kernel cache before they compile, so what one has made the others load; where two meet, one
kernel is compiled twice and nothing is harmed.

    python -m ggjit.tools.command.helpers '{"path": ..., "options": {...}, "share": [0, 1]}'     (what a helper runs)
"""
import atexit
import collections
import functools
import json
import os
import subprocess
import sys
import threading

from ggjit.cpu import walk
from ggjit.cpu.cpu_plan import likely_parts
from ggjit.cpu.tuning import LEAST_NBYTES, tune
from ggjit.models.networks.load import load_model
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.machine import available_cores
from ggjit.ops.core.traits import all_traits
from ggjit.ops.native.cache_files import cache_dir
from ggjit.ops.native.jit import CACHE, kernel_address
from ggjit.tools.command.common import count, patterns

MAX_HELPERS = 3                 # a model has some 20 kernels, and each helper imports Numba first


def add_lora(c):
    c.add_file("--lora", action="append", default=[], metavar="PATH[=SCALE]",
               help="an adapter in llama.cpp's format; may be given several times")


def add_control(c):
    """Control vectors under llama.cpp's names; `load` takes them."""
    c.add_file("--control-vector", action="append", default=[], metavar="PATH[=SCALE]",
               help="a control vector in llama.cpp's format; may be given several times")
    c.add_argument("--control-vector-layer-range", nargs=2, type=count, default=None, metavar=("FIRST", "LAST"),
                   help="the layers that it is added to (all from 1 on)")


def add_vision(c):
    c.add_file("-mm", "--mmproj", metavar="PATH", help="the part of the model that sees or hears, for --image "
               "and --audio")
    c.add_file("--image", action="append", default=[], metavar="PATH",
               help="a picture before the text, or at its mark <__media__>; may be given several times")
    c.add_file("--audio", action="append", default=[], metavar="PATH",
               help="a sound before the text, or at its mark behind the pictures'; may be given several times")


def scaled(texts):
    """[(path, scale)] of "PATH=SCALE" and "PATH": what follows the last "=" is a scale where it is a number."""
    found = []
    for text in texts:
        path, _, scale = text.rpartition("=")
        try:
            found.append((path, float(scale)) if path else (text, 1.0))
        except ValueError:
            found.append((text, 1.0))
    return found


def load(path, args, reserve=True, **options):
    """The network of `path` for a command's arguments, with helpers for the kernels it still has to compile."""
    options |= {"strict": getattr(args, "strict", True)}
    if getattr(args, "lora", None):
        options |= {"lora": scaled(args.lora)}
    if getattr(args, "mmproj", None):
        options |= {"vision": args.mmproj}
    help_when_compiling(path, options | {"n_threads": args.threads})
    gpu = {k: getattr(args, k) for k in ("n_gpu_layers", "cpu_moe") if hasattr(args, k)}
    if getattr(args, "override_tensor", None):
        gpu["override_tensor"] = patterns(args.override_tensor)
    vectors, layers = getattr(args, "control_vector", []), getattr(args, "control_vector_layer_range", None)
    if layers and not vectors:
        raise ParamError("--control-vector-layer-range says where --control-vector is added; give one")
    m = load_model(path, n_threads=args.threads, reserve=reserve, **gpu, **options)
    if vectors:
        m.set_control_vectors(scaled(vectors), *layers or ())
    return m


def tune_for(network):
    """Measure how products read the types whose matrices a token of this model streams: {type: Choice} of the new."""
    if not hasattr(network, "decode"):                  # an encoder: always many columns
        return {}
    nbytes = collections.Counter()
    for info in network.file.tensors.values():
        if len(info.ne) > 1 and info.type in all_traits():
            nbytes[info.type] += info.nbytes
    return tune([t for t, n in nbytes.items() if n >= LEAST_NBYTES])


def jobs(network):
    """{name: function that compiles it}: kernels of the network's common graphs, last nodes first; after the first
    graph the thread pool, which is when the command needs it."""
    n_threads, found = network.backend.n_threads, {}
    for shape in network._common_shapes():
        for p in reversed(likely_parts(network.graph(*shape), n_threads)):
            found.setdefault(p.kernel.name, functools.partial(
                kernel_address, p.kernel.name, p.kernel.make, (p.module, *p.kernel.modules)))
        for f in (walk.run, walk.worker, walk.poll, walk.clock):
            found.setdefault(f.name, lambda f=f: f.address)
    return found


def kept_kernels():
    """Names of the files in the kernel cache."""
    return {p.name for p in (cache_dir() / "kernels").glob("*.o")}


def compile_share(path, options, share):
    """Compile every n-th kernel of the model's, from the i-th on; share = (i, n)."""
    i, n = share
    asked = options.pop("repack", None)
    with load_model(path, reserve=False, repack=False, **options) as network:
        network._repack(asked, move=False)          # the same kernels without moving gigabytes once more
        for compile_one in list(jobs(network).values())[i::n]:
            compile_one()


def start_helper(path, options, share):
    """A helper process.  It ends with this one at the latest, however that ends: its standard input closes then."""
    job = json.dumps({"path": path and str(path), "options": options, "share": share})
    process = subprocess.Popen([sys.executable, "-m", "ggjit.tools.command.helpers", job], stdin=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(_end, process)
    return process


def _end(process):
    process.terminate()
    process.wait()


def help_when_compiling(path, options):
    """Start helpers at the first compilation, one for each further core; a warm cache starts none."""
    show, n_helpers = CACHE.on_compile, min(available_cores() - 1, MAX_HELPERS)

    def first(name):
        CACHE.on_compile = show
        for i in range(n_helpers):
            start_helper(path, options, (i, n_helpers))
        if show:
            show(name)
    CACHE.on_compile = first


def end_with_parent():
    """End this process when the one that started it does."""
    def wait():
        os.read(sys.stdin.fileno(), 1)          # nothing is ever written: returns when the other end closes
        os._exit(1)
    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    compile_share(**json.loads(sys.argv[1]))
