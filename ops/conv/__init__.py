"""Convolutions, pooling and resampling.

    im2col (im2col_kernels), col2im     patches as rows of a matrix and back; convolutions by mul_mat
    conv, conv_transpose                without patches in memory, by the kernels of conv_tile; few outputs: conv_few
    conv_dw                             a filter per channel
    pooling, upscale                    windows and resampling

Read `im2col`, `conv_tile`, `conv`.
"""
