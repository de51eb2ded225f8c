"""The definition of tensor computations: records, types, ops, kernels.  Nothing here knows tables, buffers or
threads."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
