"""The CUDA device.  Kernels are in ops/cuda.

Read `device` (devices and their streams), `cuda_plan` (launches, captured as a CUDA graph), `memory` (buffers),
`libraries` (what cuBLAS in `cublas` and CCCL in `cccl` do, and what our own kernels), `driver` (the driver's functions
with Python errors) and `simulated_driver` (the same over host memory, for tests).
"""
