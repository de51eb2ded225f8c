"""Repacked weights: matrices in a layout of their own, which only matrix products read.

    layouts      which types have one, and the kernel over it
    codes        quantised types (ops/matmul/interleaved.py has the bits); lane_tile: the register tile
    floats       F32
    experts      mul_mat_id over repacked experts

Read in this order.
"""
