"""Ops that move elements and compute nothing: views, copies, rows, padding, windows, masks."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
