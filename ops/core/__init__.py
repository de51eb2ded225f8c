"""What an op is, before any code runs: records, types, shape rules, errors, and how files of ops are found.

Read `record` (what kernels see), `types` and `traits`, then `spec` (all that is known of one op).
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
