"""The families of cases: the same parameter grids as ggml's list, one file per group of ops; each ends with
FAMILIES."""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
