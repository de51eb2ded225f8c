"""Runs of ops as one kernel; the planner (engine/cpu/fusion.py) reads their declarations.

Read `rows` (norms, sums and activations row by row), then `column` (products of one column, with the norm before them
and the sum or gated unit behind them) and `soft_max`.
"""
