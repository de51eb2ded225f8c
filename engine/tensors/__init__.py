"""Tensors as users hold them: handles on rows of the table, contexts that own them, data in and out.

Read in this order:

    tensor          a handle on a row of the table: shape, place, values
    context         where tensors are made; alloc_ctx_tensors gives them memory
    repeats         builders that remember: a call like an earlier one makes its node without the checks
    rebuild         nodes made by hand, or read from a file, are checked by the builders of their ops
    arrays          leaves from NumPy arrays and numbers
    operators       Python operators and slices, with NumPy's meaning
    interop         NumPy's array protocols and DLPack
    transfer        bytes in and out, and from tensor to tensor
    summary         a tensor as text, for reprs and notebooks
"""
