"""Shape rules and checks that op builders share.  `ne` is in ggml order: ne0 is the fastest dimension."""
import math

from ggjit.ops.core.errors import ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.printable import printable
from ggjit.ops.core.types import F32


def describe(t):
    """name type [ne] for error messages."""
    if t is None:
        return "none"
    if isinstance(t, type):
        return f"the class {t.__name__}"
    return f"{printable(t.name) or 'tensor'} {t.type!r} {list(t.ne[:t.ndim])}"


def contiguous_nb(type, ne):
    """Strides in bytes of a contiguous tensor: nb0 = block bytes, nb1 = one row, nb[i+1] = nb[i] * ne[i]."""
    nb = [type.nbytes, type.row_nbytes(ne[0])]
    for i in (1, 2):
        nb.append(nb[i] * ne[i])
    return tuple(nb)


def is_contiguous(t, first=0):
    """No gaps from dimension `first` up (ggml_is_contiguous_<first>); strides of dims of length 1 do not matter."""
    want = t.type.nbytes
    if t.ne[0] != t.type.block and t.nb[0] != want:
        return False
    want *= t.ne[0] // t.type.block
    for i in (1, 2, 3):
        if t.ne[i] != 1:
            if i > first:
                if t.nb[i] != want:
                    return False
                want *= t.ne[i]
            else:
                want = t.ne[i] * t.nb[i]
    return True


def rows_contiguous(t):
    """Elements of a row lie side by side (ggml_is_contiguous_rows)."""
    return t.ne[0] == t.type.block or t.nb[0] == t.type.nbytes


def same_shape(a, b):
    return tuple(a.ne) == tuple(b.ne)


def can_repeat(a, b):
    """a tiles b: every b.ne[i] is a multiple of a.ne[i] (ggml_can_repeat)."""
    if 0 in a.ne:
        return 0 in b.ne
    return all(n % m == 0 for n, m in zip(b.ne, a.ne, strict=True))


def n_elements(t):
    return math.prod(t.ne)


def require(ok, message, *tensors, error=ShapeError, remedy=""):
    """Raise `error` with the tensors described, unless ok."""
    if not ok:
        listed = ", ".join(describe(t) for t in tensors)
        raise error(message + (f": {listed}" if listed else "") + (f"; {remedy}" if remedy else ""))


def require_type(op, t, types, role="source"):
    if t.type not in types:
        kinds = ", ".join(map(repr, types)) if len(types) <= 6 else "F32, F16, BF16 or quantised"
        to = types[0] if len(types) <= 6 else F32
        dtype = "int32" if to.name == "i32" else "float32"
        lists = f", or values.astype(np.{dtype}) before it is a tensor" if t.type.name in ("f64", "i64") else ""
        raise TypeMismatch(f"{op}: {role} {describe(t)} must be {'one of ' * (len(types) > 1)}{kinds}; cast it with "
                           f"gg.cast(t, '{to!r}'){lists}".replace("''", "'"))


def require_sum_so_far(op, onto, ne):
    """Errors: ShapeError, TypeMismatch unless `onto` may hold the sum so far of a result of shape `ne`."""
    require_type(op, onto, (F32,), "onto")
    require(tuple(onto.ne) == (*ne, 1, 1, 1, 1)[:4] and is_contiguous(onto),
            f"{op}: onto must be contiguous and of the shape of the sum, {list(ne)}", onto)


def require_param(ok, message):
    if not ok:
        raise ParamError(message)
