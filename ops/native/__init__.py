"""Python functions as machine code: the compiler and its cache, vectors, memory, threads.

Read `jit`, then `simd` and `mem` (what kernels are written in), `node` and the row loops (what a kernel computes).
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
