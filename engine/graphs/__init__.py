"""Graphs: which tensors are computed, in which order, and where a GraphAllocator puts their results."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
