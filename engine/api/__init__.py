"""The short ways of a notebook: compute a tensor, measure a graph."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
