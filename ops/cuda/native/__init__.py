"""What CUDA kernels are written in, on the device and in the simulator, and how they are compiled."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
