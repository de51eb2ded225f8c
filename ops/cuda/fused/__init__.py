"""Runs of nodes as one CUDA kernel; what they declare is read by CUDA plans (engine/cuda/cuda_plan.py).

    rows        sums and norms row by row
    added       a product and a sum
    column      a column that every block prepares for itself: its norm, its 8-bit codes
    products    products of one column's norm
    gated       both products of a gated unit
"""
