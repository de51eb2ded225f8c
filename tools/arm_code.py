"""The machine code of products for ARM processors, made on any machine: `python -m ggjit.tools.arm_code`.

    python -m ggjit.tools.arm_code neon-v8.2 q4_K:1 repacked-q4_0:64

prints, as JSON, {"q4_K:1": [the kernel's name, its assembly], ...}: weights of that type times so many columns, for a
level of ops/native/isa.py on Linux.  LLVM makes code for all processors; a process of its own is told that it runs on
such a one, before anything is imported that asks, and only compiles.
"""
import argparse
import json
import os
import subprocess
import sys

from numba import cfunc, types

from ggjit.ops.core.spec import all_specs
from ggjit.ops.core.types import BY_NAME, F32
from ggjit.ops.matmul.mul_mat import mul_mat
from ggjit.ops.matmul.repack import layouts
from ggjit.ops.native import isa
from ggjit.ops.native.compiler import KernelCompiler
from ggjit.ops.native.jit import FASTMATH
from ggjit.tensors.context import Context

LEVELS = tuple(name for name in isa.LEVELS if name.startswith("neon"))
K, M = 4096, 512                        # of the weights
_CHILD = """
import importlib
from llvmlite import binding as llvm
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
llvm.get_process_triple = lambda: "aarch64-unknown-linux-gnu"
llvm.get_host_cpu_features = dict
importlib.import_module("ggjit.tools.arm_code").compile_products({names!r})
"""


def assemblies(level, names, processor=None):
    """{name: [kernel's name, assembly]} of the products `names` for a level; processor: what LLVM schedules for, the
    level's by default.  Errors: CalledProcessError."""
    env = os.environ | {"NUMBA_CPU_NAME": processor or isa.MODELS[level], "GGJIT_CPU": "",
                        "NUMBA_CPU_FEATURES": ",".join(f"+{f}" for f in sorted(isa.LEVELS[level]))}
    done = subprocess.run([sys.executable, "-c", _CHILD.format(names=list(names))], env=env, stdout=subprocess.PIPE,
                          check=True, text=True)
    return json.loads(done.stdout)


def compile_products(names):
    """In the process of `assemblies`: prints what it returns."""
    found, i8 = {}, types.int64
    for name in names:
        kernel = _product(name)
        made = cfunc(i8(i8, i8, i8, i8), nopython=True, error_model="numpy", fastmath=FASTMATH,
                     pipeline_class=KernelCompiler)(kernel.make())
        found[name] = kernel.name, made._library.get_asm_str()
    print(json.dumps(found))


def _product(name):
    """The Kernel of type:columns or repacked-type:columns."""
    kind, _, n = name.partition(":")
    type = BY_NAME[kind.removeprefix("repacked-")]
    ctx = Context()
    t = mul_mat(ctx.new_tensor(type, (K, M)), ctx.new_tensor(F32, (K, int(n))))
    return layouts.kernel(t, 1) if kind != type.name else all_specs()[t.op].kernel(t, 1)


def main():
    parser = argparse.ArgumentParser(prog="python -m ggjit.tools.arm_code", description=__doc__.partition("\n")[0])
    parser.add_argument("level", choices=LEVELS)
    parser.add_argument("products", nargs="+", metavar="TYPE:COLUMNS", help="q4_K:1, repacked-q4_0:64")
    args = parser.parse_args()
    print(json.dumps(assemblies(args.level, args.products)))


if __name__ == "__main__":
    main()
