"""A trial of a type's functions before anything is registered: as Python, then compiled with bounds checks.

    guard | block, all bytes 0 or all 255 | guard           each function runs twice, on what was filled both ways:
                                                            what differs afterwards was not written, or added to
"""
import dataclasses
import dis
import traceback
from collections.abc import Callable

import numpy as np
from numba import njit
from numba.core.errors import NumbaError

from ggjit.ops.core.errors import GgjitError, ParamError, TypeMismatch
from ggjit.ops.native.numba_report import useful

GUARD, PATTERN = 64, 0x5A               # bytes around each array, and their value
LEAST_LIKE = 0.3                        # correlation of values with what went in: a sign alone has 0.8
SAME = 1e-3                             # error, relative to the largest value, of what should be equal


def _samples():
    """Rows of 256 values: of many sizes, zeros, one large, all alike, all below 0, ties."""
    x = np.random.default_rng(0).standard_normal((10, 256)).astype(np.float32)
    x[1], x[2, 5:] = 0, 0
    x[3, 7] = -100
    x[4] = 3
    x[5] = -np.abs(x[5]) - 1
    x[6] *= 1e-3
    x[7] *= 1e3
    x[8] = np.tile(np.arange(-8, 8), 16)
    return x


SAMPLES = _samples()


@dataclasses.dataclass(frozen=True)
class Functions:
    """What a user gives for a type."""
    name: str
    block: int
    nbytes: int
    to_float: Callable
    from_float: Callable
    dot: Callable | None


def try_functions(made):
    """float32 like SAMPLES: what becomes of them.  Errors: as define_type says."""
    given = {"to_float": made.to_float, "from_float": made.from_float} | ({"dot": made.dot} if made.dot else {})
    python = {role: _python(f, role, made) for role, f in given.items()}
    values = _run(made, python)
    like = np.corrcoef(values[0], SAMPLES[0])[0, 1] if values[0].any() else 0.0
    if not like > LEAST_LIKE:
        raise ParamError(f"{made.name}: of normal numbers, from_float and to_float give back others (correlation "
                         f"{like:.2f}): does to_float read what from_float writes?")
    compiled = {role: njit(boundscheck=True, error_model="numpy")(f) for role, f in python.items()}
    check_same(made, values, _run(made, compiled), "compiled")
    return values


def check_same(made, values, got, how):
    """ParamError unless the values are those of the functions as Python."""
    worst = float((np.abs(values - got).max(1) / (np.abs(values).max(1) + 1e-30)).max())
    if not worst < SAME:
        raise ParamError(f"{made.name}: {how}, it gives other values than as Python (by {worst:.2g} of the largest); "
                         f"bytes are uint8, whose shifts and sums overflow in Python: write int(block[i])")


def _python(function, role, made):
    """The function as Python.  Errors: TypeMismatch, ParamError."""
    function = getattr(function, "py_func", function)
    if not callable(function) or not hasattr(function, "__code__"):
        raise TypeMismatch(f"{made.name}: {role} is a Python function, got {function.__class__.__name__}")
    if function.__code__.co_argcount != 2:
        arguments = {"to_float": "block, x", "from_float": "x, block", "dot": "block, y"}[role]
        raise TypeMismatch(f"{made.name}: {role} takes two arguments: def {role}({arguments}): ...")
    if any(i.opname == "RAISE_VARARGS" for i in dis.get_instructions(function)):
        raise ParamError(f"{made.name}: {role} raises or asserts ({_place(function)}), and the error is lost in "
                         f"a kernel: leave that out, check values before gg.quantize")
    return function


def _place(function):
    code = getattr(function, "py_func", function).__code__
    return f"{code.co_filename}, line {code.co_firstlineno}"


# ---------------------------------------------------------------- runs
def _run(made, functions):
    """Values of all samples by these functions, with every check on the way."""
    out = np.empty_like(SAMPLES)
    for row, x in zip(out, SAMPLES, strict=True):
        for at in range(0, x.size, made.block):
            part = slice(at, at + made.block)
            block = _filled(made, functions, "from_float", x[part], made.nbytes, np.uint8)
            row[part] = _filled(made, functions, "to_float", block, made.block, np.float32)
            if not np.isfinite(row[part]).all():
                bad = row[part][~np.isfinite(row[part])][0]
                raise ParamError(f"{made.name}: to_float gives {bad} for values up to {np.abs(x[part]).max():g}; is a "
                                 f"scale divided by zero, or beyond float16?")
            if made.dot:
                _check_dot(made, functions["dot"], block, row[part])
    return out


def _filled(made, functions, role, source, n, dtype):
    """What a function writes into n values, called twice on memory that was filled in two ways."""
    function, found = functions[role], []
    for fill in (0, 255):
        given, to = _guarded(source.nbytes, 0), _guarded(n * np.dtype(dtype).itemsize, fill)
        inner = given[GUARD:-GUARD].view(source.dtype)
        inner[:] = source
        _call(made, function, role, inner, to[GUARD:-GUARD].view(dtype))
        if (_guards(to) != PATTERN).any() or (_guards(given) != PATTERN).any():
            raise GgjitError(f"{made.name}: {role} writes outside its arrays ({_place(function)})")
        if inner.tobytes() != source.tobytes():
            raise GgjitError(f"{made.name}: {role} writes into its first argument; write the second alone "
                             f"({_place(function)})")
        found.append(to[GUARD:-GUARD].view(dtype))
    per = np.dtype(dtype).itemsize
    differs = (found[0].view(np.uint8) != found[1].view(np.uint8)).reshape(n, per).any(1)
    if differs.any():
        what = "byte" if dtype is np.uint8 else "value"
        raise GgjitError(f"{made.name}: {role} leaves {int(differs.sum())} of {n} {what}s unwritten, or adds to them, "
                         f"the first at {int(differs.argmax())}: set every {what} ({_place(function)})")
    return found[0]


def _guarded(nbytes, fill):
    whole = np.full(nbytes + 2 * GUARD, PATTERN, np.uint8)
    whole[GUARD:-GUARD] = fill
    return whole


def _guards(whole):
    return np.concatenate([whole[:GUARD], whole[-GUARD:]])


def _check_dot(made, dot, block, values):
    y = np.random.default_rng(1).standard_normal(values.size).astype(np.float32)
    got = _call(made, dot, "dot", block.copy(), y.copy())
    if not isinstance(got, int | float | np.number):
        raise TypeMismatch(f"{made.name}: dot returns a number, got {got.__class__.__name__} ({_place(dot)})")
    want, size = float(values @ y), float(np.abs(values * y).sum())
    if not abs(got - want) <= SAME * size + 1e-30:
        raise ParamError(f"{made.name}: dot of a block gives {float(got):g}, its values times y sum to {want:g} "
                         f"({_place(dot)})")


def _call(made, function, role, first, second):
    """Errors: GgjitError with the user's line; TypeMismatch where Numba cannot compile."""
    try:
        with np.errstate(all="ignore"):
            return function(first, second)
    except NumbaError as e:
        raise TypeMismatch(f"{made.name}: {role} does not compile, what it calls has to be an @njit function: "
                           f"{useful(str(e))}") from None
    except Exception as e:
        code = getattr(function, "py_func", function).__code__
        lines = [f for f in traceback.extract_tb(e.__traceback__) if f.filename == code.co_filename]
        where = f"{lines[-1].filename}, line {lines[-1].lineno}: {lines[-1].line}" if lines else _place(function)
        error = GgjitError(f"{made.name}: {role} raised {e.__class__.__name__}: {e} ({where}); its arrays have "
                           f"{first.size} and {second.size} values")
        raise error from e
