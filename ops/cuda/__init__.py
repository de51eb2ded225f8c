"""CUDA kernels of the ops; a file serves the ops of the file with its name in the other folders of ops.

A module ends with `CUDA = {OP.X: maker, ...}`; `maker(t)` gives the launches of node `t`, or None where there is no
kernel for its types (ops/cuda/native/launch.py).  Imported only when a CUDA device is used.

Read `native/launch`, `native/views`, `elementwise`, then `matmul`.
"""
