"""Runs of nodes as one CUDA kernel; what they declare is read by CUDA plans (engine/cuda/cuda_plan.py).

Read `rows` (sums and norms row by row), then `gated` (both products of a gated unit).
"""
