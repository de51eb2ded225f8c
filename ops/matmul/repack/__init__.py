"""Repacked weights: matrices in a layout of their own, which matrix products and get_rows read.

    layouts      which types have one, and the kernel over it
    codes        quantised types (ops/matmul/interleaved.py has the bits); lane_tile: the register tile
    floats       F32
    experts      mul_mat_id over repacked experts
    tables       get_rows of a repacked matrix

Read in this order.
"""
