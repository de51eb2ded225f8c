"""CUDA twins of the ops: `ops/cuda/<family>.py` beside `ops/<family>.py`.

A module ends with `CUDA = {OP.X: maker, ...}`; `maker(t)` gives the launches of node `t`, or None where there is no
kernel for its types (ops/cuda/native/launch.py).  Nothing outside imports this package unless a CUDA device is
asked for.
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
