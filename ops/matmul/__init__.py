"""Matrix products: mul_mat, mul_mat_id, out_prod, solve_tri, and the tiles and weight layouts they use.

    mul_mat         the op and the choice of its kernel
    mul_mat_dot     few columns: rows of weights are multiplied as they lie (choices: how many at once)
    mul_mat_stretch few columns of F32, by stretches of k that stay in the first-level cache
    one_column      a product of one column in parts, for kernels that do more (ops/fused/column.py)
    mul_mat_tile    many columns: packed panels (tile: geometry; tile_float, tile_codes, tile_bf16: register tiles;
                    tile_kinds: which one)
    mul_mat_short   few rows;  hadamard: a Hadamard matrix
    mul_mat_id      the product of a mixture of experts (mul_mat_id_group: columns by expert;
                    mul_mat_id_dot, mul_mat_id_tile: kernels)
    interleaved     how quantised blocks unpack when rows are interleaved; the folder repack/ multiplies with them
    choices         what differs per processor: by a rule, or measured

Read in this order.
"""
