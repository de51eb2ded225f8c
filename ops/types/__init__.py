"""Tensor types: one file per type or tight family; it ends with `TRAITS = (Traits(...), ...)`.

`shared` holds what several of them are made of; `quantize` converts whole arrays.
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
