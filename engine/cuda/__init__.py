"""The CUDA device: its memory, streams and plans.  Kernels are in ops/cuda."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
