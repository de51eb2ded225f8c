"""Runs of ops as one kernel; what they declare is read by the planner (engine/cpu/fusion.py).

Read `rows` (norms, sums and activations row by row), then `gate` (two products and their gated unit) and `soft_max`.
"""
