"""What CUDA kernels are written in and how they are compiled.

    core        the functions kernels call: `intrinsics` on the device, `simulated` in Numba's CUDA simulator
    views       how a kernel reads its node;  sums: reductions over a block
    launch      what a maker returns: grid, block, scratch memory
    build       Numba -> LTO-IR -> cubin, with a cache
    simulator   threads and checked memory of the simulator

Read `launch`, `views`, `core`.
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
