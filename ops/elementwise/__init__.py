"""Ops that compute every element on its own.

Read `elementwise` (the one body of d = f(x)), then the tables of functions over it, `unary` and `constants`; `binary`
(two sources, one repeated) and `glu` (gated units); `add_id`, `arange`, `timestep`.  `custom` runs functions of the
caller.
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
