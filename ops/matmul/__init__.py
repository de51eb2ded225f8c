"""Matrix products: mul_mat, mul_mat_id, out_prod, and their tiles and weight layouts.

Read `mul_mat`, `mul_mat_dot` (few columns), `tile` and `mul_mat_tile` (many columns).
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
