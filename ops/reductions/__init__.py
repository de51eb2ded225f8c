"""Ops over whole rows: sums, norms, softmax, sorting.

Read `sums` (the loops that the others share), then `reduce`, `norm` and `soft_max`; `argsort`, `cumsum` and
`count_equal` stand alone.
"""
