"""Parts of tensor types.

    dot                               products of rows: what a type supplies, register tiles over it
    quant32, blocks                   activations of 8 bits; what all block formats have in common
    blocks_plain, blocks_super        from one decoder: conversion to float32, products, integer tiles
    quant_search, k_quants            searches of scales when files are quantised
    quant_grid, quant_grid_search,    the same for types whose codes name points of a grid
    quant_ternary, iq_grids, iq_write, iq1_write
    rows, moves                       one element or row of any type; copies of bytes

Read `dot`, `quant32`, `blocks`, `blocks_plain`; then a type file.
"""
