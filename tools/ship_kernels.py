"""Compiles the kernels that a wheel carries: `python -m ggjit.tools.ship_kernels`, in the checkout, before it is built.

One for each level (ggjit.ops.native.isa) and for the Python that runs this, where ggjit.ops.native.kernel_pack looks.

In them are the kernels of MiniLM, of llamas with weights of every type and heads of 64 and 128, of attention with one
to eight heads a head of K and V, and of one case of every class of ops.  Which tile reads a type best is one choice on
AMD's processors and another on Intel's: both are in.  Planning is jitted, too, and runs while this does, so a level
needs a processor that has it.
"""
import argparse
import concurrent.futures
import contextlib
import functools
import itertools
import os
import subprocess
import sys
import tempfile

import numpy as np

import ggjit as gg
from ggjit.cpu import walk
from ggjit.cpu.cpu_plan import likely_parts
from ggjit.models.files.minilm import TYPES, minilm_path
from ggjit.models.files.save import Entry, encoded, write_gguf
from ggjit.models.networks.load import load_model
from ggjit.ops.core.errors import ParamError
from ggjit.ops.native import isa, kernel_pack
from ggjit.ops.native.jit import kernel_address
from ggjit.tools.command.kernel_pack import export
from ggjit.tools.command.main import main as command
from ggjit.tools.suite.sample import balanced

WEIGHTS = ("F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4").split()
COMMON = ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")        # of these, prompts of many lengths
PROMPTS, MANY = (1, 4, 16, 64), (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 128, 512)
SENTENCES = (*range(3, 33), 48, 64, 96, 128, 192, 256)  # tokens of MiniLM's; tiles differ with every number
HEADS = 64, 128
GROUPS = range(1, 9)                                    # heads of Q that share one of K and V
D, FF, VOCABULARY, CONTEXT = 1024, 2816, 256, 1024      # sizes of the llama models whose kernels are compiled
N_SUITE = 300                                           # cases of the op suite whose kernels are compiled


# ---------------------------------------------------------------- which kernels
def llama(path, type, d_head):
    """Write a llama of one layer, its weights zeros."""
    n_head, kv, matrix = D // d_head, D // 4, functools.partial(_zeros, getattr(gg, type))
    layer = {"attn_q": (D, D), "attn_k": (D, kv), "attn_v": (D, kv), "attn_output": (D, D), "ffn_gate": (D, FF),
             "ffn_up": (D, FF), "ffn_down": (FF, D)}
    norms = "output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"
    entries = [matrix("token_embd.weight", (D, VOCABULARY)), matrix("output.weight", (D, VOCABULARY)),
               *(matrix(f"blk.0.{name}.weight", ne) for name, ne in layer.items()),
               *(_zeros(gg.F32, f"{name}.weight", (D,)) for name in norms)]
    facts = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab", "llama.vocab_size": VOCABULARY,
             "llama.context_length": CONTEXT, "llama.embedding_length": D, "llama.block_count": 1,
             "llama.feed_forward_length": FF, "llama.attention.head_count": n_head,
             "llama.attention.head_count_kv": n_head // 4, "llama.rope.dimension_count": d_head,
             "llama.attention.layer_norm_rms_epsilon": 1e-5}
    write_gguf(path, {key: encoded(value, key) for key, value in facts.items()}, [entries])


def _zeros(type, name, ne):
    nbytes = type.row_nbytes(ne[0]) * int(np.prod(ne[1:]))
    return Entry(name, type, ne, lambda: iter((bytes(nbytes),)))


def kernels_of_models(folder):
    """Yields (name, make, modules) of what plans of the models need, many of them several times."""
    for d_head in HEADS:
        for type in WEIGHTS if d_head == HEADS[0] else COMMON:
            path = os.path.join(folder, f"{type}-{d_head}.gguf")
            llama(path, type, d_head)
            for repack in (False, True):
                with load_model(path, n_threads=1, reserve=False, repack=False, n_ctx=CONTEXT) as network:
                    with contextlib.suppress(ParamError):           # a type without a layout
                        network._repack(repack, move=False)
                    for n in MANY if type in COMMON else PROMPTS:
                        yield from _needs(network.graph(n, network.cells.rounded(n), 1, False, 1))
            os.unlink(path)
    for type in TYPES:
        with load_model(minilm_path(type), n_threads=1, reserve=False) as network:
            for n in SENTENCES:
                yield from _needs(network.graph(n))


def kernels_of_attention():
    """The same of attention to a cache, from one token."""
    ctx = gg.Context()
    for d_head, group in itertools.product(HEADS, GROUPS):
        q, kv = ctx.new_tensor(gg.F32, (d_head, 1, 2 * group)), ctx.new_tensor(gg.F16, (d_head, 256, 2))
        yield from _needs(gg.Graph(gg.flash_attn_ext(q, kv, kv, ctx.new_tensor(gg.F16, (256, 1)), d_head ** -0.5)))


def _needs(graph):
    for n_threads in (1, 2):
        for p in likely_parts(graph, n_threads):
            yield p.kernel.name, p.kernel.make, (p.module, *p.kernel.modules)


def kernels_of_ops():
    """The same of single ops."""
    for name, (kernel, module) in balanced(N_SUITE, 1, gg.init_backend("CPU", n_threads=1), N_SUITE)[1].items():
        yield name, kernel.make, (module, *kernel.modules)


# ---------------------------------------------------------------- packs
def compile_all(pack, only=""):
    """Compile kernels (those with `only` in their names) and write what the cache holds then: the number.

    The caller chose the cache; it holds nothing else.
    """
    with tempfile.TemporaryDirectory() as folder:
        sources = kernels_of_models(folder), kernels_of_attention(), kernels_of_ops()
        found = {(name, modules): make for source in sources for name, make, modules in source if only in name}
        small = os.path.join(folder, "small.gguf")
        llama(small, "Q4_0", HEADS[0])
        command(["bench", small, "-p", "4", "-n", "1", "-t", "2", "-r", "1", "--json"])     # jitted planning
    for (name, modules), make in found.items():
        kernel_address(name, make, modules)
    _ = walk.quit_workers.address                           # the last that a process needs
    return export(pack)


def ship(level, folder):
    """Make the pack of a level in the folder, for processors of Intel and AMD: a line that says so."""
    family = isa.MODELS[level]                              # as LLVM schedules: the key of all kernels of the level
    with tempfile.TemporaryDirectory(prefix="ggjit-ship-") as cache:
        for processor in (family, "znver4"):
            env = {"NUMBA_CPU_FEATURES": isa.features_text(isa.LEVELS[level]), "NUMBA_CPU_NAME": processor,
                   "GGJIT_CACHE_DIR": cache, "GGJIT_TUNE": "off"}
            done = subprocess.run([sys.executable, "-c", CHILD, folder], env={**os.environ, **env}, check=True,
                                  text=True, capture_output=True)
    return done.stdout.splitlines()[-1]


CHILD = """
import pathlib, sys
from ggjit.ops.native import kernel_pack
from ggjit.tools.ship_kernels import compile_all
pack = pathlib.Path(sys.argv[1]) / kernel_pack.shipped_name()
n = compile_all(pack)
print(f"{pack.name}: {n} kernels, {pack.stat().st_size / 1e6:.1f} MB")
"""


def main(argv=None):
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    p.add_argument("levels", nargs="*", metavar="LEVEL", help="default: all that this processor has, of "
                   + ", ".join(isa.LEVELS))
    p.add_argument("--into", metavar="FOLDER", default=str(kernel_pack.SHIPPED.path.parent))
    args = p.parse_args(argv)
    able = [level for level, features in isa.LEVELS.items() if features <= isa.HOST_FEATURES]
    for level in args.levels:
        if level not in able:
            p.error(f"{level}: this processor makes {', '.join(able) or 'no level'}; run it on one that has that")
    os.makedirs(args.into, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(lambda level: ship(level, args.into), args.levels or able):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
