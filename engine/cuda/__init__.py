"""The CUDA device.  Kernels are in ops/cuda.

Read `device` (devices and their streams), `cuda_plan` (launches, captured as a CUDA graph), `walk` (a plan as one
persistent kernel, by the table of `walk_table`, which `walk_check` checks), `functions` (kernels compiled and loaded),
`memory` (buffers), `libraries` (what cuBLAS in `cublas` and CCCL in `cccl` do, and what our own kernels), `driver` (the
driver's functions with Python errors) and `simulated_driver` (the same over host memory, for tests).
"""
