"""Tensors as users hold them: handles on rows of the table, contexts that own them, data in and out.

Read `tensor`, then `context`; `operators` gives NumPy's syntax, `interop` NumPy's and DLPack's protocols, `arrays`
makes tensors from arrays, `transfer` moves bytes between tensors.
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
