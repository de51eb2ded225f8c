"""Functions of blocks over shared memory: `in_shared(words)` reads there what `words` reads in global memory.

The function is made anew of the same code, its loads replaced, and so are the functions that it calls.
"""
import types

from ggjit.ops.cuda import block_bits, block_points
from ggjit.ops.cuda.compiler import core

LOADS = [(core.ld_f16, core.lds_f16), (core.ld_u8, core.lds_u8), (core.ld_i8, core.lds_i8), (core.ld_u16, core.lds_u16),
         (core.ld_i32, core.lds_i32), (core.ld_i32_2, core.lds_i32_2)]
OF_BLOCKS = block_bits.__name__, block_points.__name__


def in_shared(f):
    """`f`, a function of kernels, over shared memory; itself where it loads nothing."""
    for load, shared_load in LOADS:
        if f is load:
            return shared_load
    code = getattr(f, "py_func", f)
    if not isinstance(code, types.FunctionType) or code.__module__ not in OF_BLOCKS:
        return f
    cells = [c.cell_contents for c in code.__closure__ or ()]
    used = {name: code.__globals__[name] for name in code.__code__.co_names if name in code.__globals__}
    new_cells, new_used = [in_shared(x) for x in cells], {name: in_shared(x) for name, x in used.items()}
    if all(x is y for x, y in zip([*cells, *used.values()], [*new_cells, *new_used.values()], strict=True)):
        return f
    return core.device(types.FunctionType(code.__code__, code.__globals__ | new_used, code.__name__, code.__defaults__,
                                          tuple(map(types.CellType, new_cells))))
