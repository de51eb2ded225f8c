"""The scheduler: one graph on several backends.

In the order of a run: `support` (what devices can do), `gather` (graph -> columns of numbers), `rules` and `repair` (a
backend for every node), `split`, `motion`, `assignment` (all of it for one graph), `layout` (memory), `run` (copies and
computes).  `columns` names the numbers all of them share.
"""
if not __name__.startswith("ggjit"):
    raise ImportError("import ggjit, not a folder of the checkout: the repository root is on sys.path")
