"""CUDA kernels of matrix products.

    mul_mat             the op and the choice of its kernel
    mul_mat_vec         one column: a row of weights is read as it lies
    mul_mat_tile        many columns: tiles of tensor cores (mul_mat_columns: what a tile reads and writes)
    mul_mat_dense       by a library, weights unpacked first
    mul_mat_group       mul_mat_id: columns by expert
    with_codes          columns as 8-bit codes (ops/cuda/quantize_columns.py), by the kernel before the product

Off by default (GGJIT_PIPED), they copy while they compute:

    mul_mat_stream      one column, quantised rows streamed through shared memory
    mul_mat_piped       many columns, float16 tensor cores; mul_mat_few: 2 to 32; columns_16: their columns
    mul_mat_warpgroups  many columns on compute capability 9.0

Read in this order.
"""
