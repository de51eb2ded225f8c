"""Python operators and slices of tensors, with NumPy's meaning.

    y = x @ w.T + b         mul_mat(w, x), then add; nothing is copied for the transpose
    z = (1 - x) / 2         scalars on either side
    v = x[:, ::2]           a view: no bytes move

    NumPy axis     0      1      2            ggml dimension    2      1      0
    shape        ( 2   ,  3   ,  4 )          ne              [ 4   ,  3   ,  2 ]

Shapes broadcast as in NumPy (equal or 1, aligned at the last axis); `gg.add` and its kin tile as ggml does.  The type
is that of the left operand.
"""
import math
import operator

import numpy as np

from ggjit.ops.copying.copy import cont
from ggjit.ops.copying.repeat import repeat_to
from ggjit.ops.copying.view import offset_params, permute, reshape_to, transpose
from ggjit.ops.core.builders import all_or_nothing
from ggjit.ops.core.errors import IndexRangeError, NotAllocated, ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.record import OP
from ggjit.ops.core.shape import contiguous_nb, describe, is_contiguous
from ggjit.ops.core.types import F16, F32
from ggjit.ops.core.whole_numbers import whole
from ggjit.ops.elementwise.binary import add, div, mul, sub
from ggjit.ops.elementwise.constants import fill, scale, scale_bias
from ggjit.ops.elementwise.unary import SIMPLE
from ggjit.ops.matmul.mul_mat import mul_mat
from ggjit.tensors.arrays import copied_leaf, from_numpy, leaf_of_dlpack, numbers


def _floor(x):
    return SIMPLE["floor"][0](x) if isinstance(x, Operators) else x


class Operators:
    """Mixin of Tensor.  Every operator adds a node to the graph; nothing is computed."""
    __slots__ = ()
    __array_priority__ = 1000.0         # makes NumPy hand `ndarray + tensor` to Tensor.__radd__

    def __add__(self, other):
        return _plus(self, 1.0, other, 1.0, add)

    def __radd__(self, other):
        return self + other if _is_scalar(other) else _binary(add, other, self)

    def __sub__(self, other):
        return _plus(self, 1.0, other, -1.0, sub)

    def __rsub__(self, other):
        if _is_scalar(other) and self.type is F32:
            return scale_bias(self, -1.0, number(other))
        return _binary(sub, other, self)

    def __mul__(self, other):
        if _is_scalar(other) and self.type is F32:
            return scale(self, number(other))
        return _binary(mul, self, other)

    def __rmul__(self, other):
        return self * other if _is_scalar(other) else _binary(mul, other, self)

    def __truediv__(self, other):
        return _binary(div, self, other)        # by a scalar as well: a product with 1 / other rounds differently

    def __rtruediv__(self, other):
        return _binary(div, other, self)

    def __matmul__(self, other):
        """NumPy's a @ b: (..., m, k) @ (..., k, n) -> (..., m, n), vectors as there.

        As ggml computes it: mul_mat(b transposed, a), rows of both along k.  `x @ w.T` uses w as it lies and copies
        nothing; any other right operand is transposed into a copy (gg.cont).  Quantised rows cannot be transposed:
        write gg.mul_mat(w, x), which is x @ w.T.
        """
        b = _operand(other, self)
        return NotImplemented if b is None else matmul(self, b)

    def __rmatmul__(self, other):
        a = _operand(other, self)
        return NotImplemented if a is None else matmul(a, self)

    def __floordiv__(self, other):
        """floor(self / other)."""
        return _floor(self / other)

    def __rfloordiv__(self, other):
        return _floor(other / self)

    def __mod__(self, other):
        """Errors: TypeMismatch, always: ggml has no op for it."""
        raise TypeMismatch(f"{describe(self)} % ...: ggml has no op for remainders; write t - t // n * n")

    __rmod__ = __mod__

    def __setitem__(self, index, value):
        """Write values into a leaf that has memory: `with t.write() as a: a[index] = value`.

        Errors: TypeMismatch for a result (its graph would not know of it) and for quantised types.
        """
        if self.op:
            raise TypeMismatch(f"{describe(self)} is a result: what is written there would be computed over.  Write "
                               f"into a leaf, or make another result: gg.set_rows, gg.set_1d, gg.compute(t) and NumPy")
        if self.type.block > 1 or self.type.name == "bf16":
            raise TypeMismatch(f"{describe(self)} holds blocks, which have no elements to write to; t.set(values) "
                               f"converts a whole array")
        if isinstance(value, Operators) and value._where() is None:     # also `t[i] += 1`, which adds a node first
            raise NotAllocated(f"{describe(value)} has no values yet, so none to write into {describe(self)}; write "
                               f"gg.compute(value), or with t.write() as a: a[i] += 1")
        with self.write() as a:
            a[index] = value.numpy() if isinstance(value, Operators) else value

    def __copy__(self):
        """`copy.copy` and `copy.deepcopy`: a leaf with a copy of the values.  Errors: NotAllocated, Overwritten."""
        return copied_leaf(self)

    def __deepcopy__(self, memo):
        return copied_leaf(self)

    def __format__(self, spec):
        """`f"{t:.3f}"` of a tensor of one element is its value's.  Errors: TypeMismatch for several elements."""
        if not spec:
            return str(self)
        if math.prod(self.ne) != 1:
            raise TypeMismatch(f"{describe(self)} holds {math.prod(self.ne):,} values, {spec!r} formats one; write "
                               f"np.array2string(t.numpy(), precision=3)")
        return format(self._one_value("format"), spec)

    def __float__(self):
        return float(self._one_value("float"))

    def __int__(self):
        return int(self._one_value("int"))

    def _one_value(self, name):
        """The value of a tensor of one element.  Errors: ShapeError, NotAllocated."""
        if math.prod(self.ne) != 1:
            raise ShapeError(f"{name}() takes one value, {describe(self)} holds {math.prod(self.ne):,}; gg.compute(t) "
                             f"gives them as an array")
        if self._where() is None:
            raise NotAllocated(f"{name}({describe(self)}): a node has no value before it is computed; "
                               f"{name}(gg.compute(t).item()) computes it")
        return self.item()

    def __pow__(self, power):
        """Squares and square roots (power 2, 0.5): what ggml has ops for.  Errors: ParamError for other powers."""
        if not _is_scalar(power):
            return NotImplemented
        if power not in (2, 0.5):
            raise ParamError(f"{describe(self)} ** {power}: 2 and 0.5 are served; of positive values, write "
                             f"gg.exp(gg.log(x) * {power})")
        return SIMPLE["sqr" if power == 2 else "sqrt"][0](self)

    def __rpow__(self, base):
        """Errors: ParamError: there is no op for powers of a number."""
        if not _is_scalar(base):
            return NotImplemented
        raise ParamError(f"{base} ** {describe(self)}: ggml has no op for it; of a positive number, write "
                         f"gg.exp(t * math.log({base}))")

    def __neg__(self):
        return SIMPLE["neg"][0](self)

    def __pos__(self):
        return self

    def __abs__(self):
        return SIMPLE["abs"][0](self)

    def __len__(self):
        """Length of the first NumPy axis.  Errors: TypeMismatch for a tensor without axes."""
        if not self.ndim:
            raise TypeMismatch(f"{describe(self)} has no axes, so no length and nothing to iterate over; item() is "
                               f"its value")
        return self.shape[0]

    def __bool__(self):
        """Errors: TypeMismatch, always: a tensor is a node of a graph, its values may not be there yet."""
        raise TypeMismatch(f"{describe(self)} is neither true nor false; write `t is not None` for the object, "
                           f"t.item() for its one value, (t.numpy() > 0).any() for several")

    def __eq__(self, other):
        """The same tensor?  Errors: TypeMismatch for values: there is no op that compares them."""
        if _is_values(other):
            raise _not_comparable(self, "==", other)
        return self is other

    __hash__ = object.__hash__

    def __lt__(self, other):
        """Errors: TypeMismatch, as `>`, `<=` and `>=`."""
        raise _not_comparable(self, "<", other)

    def __gt__(self, other):
        raise _not_comparable(self, ">", other)

    def __le__(self, other):
        raise _not_comparable(self, "<=", other)

    def __ge__(self, other):
        raise _not_comparable(self, ">=", other)

    def item(self):
        """The value of a tensor of one element that has data, as a Python number.  Errors: ShapeError."""
        if math.prod(self.ne) != 1:
            raise ShapeError(f"{describe(self)} holds {math.prod(self.ne):,} values, not one")
        return self.numpy().item()

    @property
    def size(self):
        """Number of elements."""
        return math.prod(self.ne)

    @property
    def T(self):
        """All axes reversed, as in NumPy: a view.  Of a quantised matrix: what `x @ w.T` takes (TransposedBlocks)."""
        if self.type.block > 1 and self.ndim == 2:
            return TransposedBlocks(self)
        return self.transpose()

    def transpose(self, *axes):
        """NumPy's transpose: axis i of the result is axis axes[i] of this tensor (default: reversed); a view.

        Errors: ParamError unless the axes are a permutation; ShapeError for the last axis of a quantised type.
        """
        n = self.ndim
        axes = axes[0] if len(axes) == 1 and not isinstance(axes[0], int | np.integer) else axes
        axes = _whole_numbers("transpose: an axis", axes) if axes else ()
        order = tuple(reversed(range(n))) if not axes else tuple(a + n if a < 0 else a for a in axes)
        if sorted(order) != list(range(n)):
            raise ParamError(f"transpose: axes {tuple(axes)} are not a permutation of the {n} axes of {describe(self)}")
        if order == tuple(range(n)):
            return self
        if n > 1 and order == (*range(n - 2), n - 1, n - 2):
            return transpose(self)
        to = list(range(4))             # permute scatters: dimension d goes to to[d]
        for i, a in enumerate(order):
            to[n - 1 - a] = n - 1 - i
        return permute(self, *to)

    def reshape(self, *shape):
        """NumPy's reshape of a contiguous tensor (one -1 is computed): a view.  Errors: ShapeError."""
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int | np.integer) else shape
        shape = _whole_numbers("reshape: a size", shape)
        if len(shape) > 4:
            raise ShapeError(f"reshape: at most 4 dimensions, got {tuple(shape)}")
        known = math.prod(n for n in shape if n != -1)
        if list(shape).count(-1) > 1 or -1 in shape and (not known or math.prod(self.ne) % known):
            raise ShapeError(f"reshape: {describe(self)} does not fit {tuple(shape)}")
        ne = [math.prod(self.ne) // known if n == -1 else n for n in reversed(shape)]
        return reshape_to(self, ne or (1,), len(ne))

    def __getitem__(self, index):
        """A view: integers, slices with positive steps, `...` and None, NumPy's meaning.

        Quantised rows are cut at whole blocks only.  Errors: IndexRangeError, TypeMismatch (arrays: use gg.get_rows),
        ParamError (negative steps), ShapeError.
        """
        ne, nb, offs = _sliced(self, index)
        ndim = len(ne)
        if not ne:
            ne, nb = [1], [self.type.nbytes]
        if ndim > 4:
            raise ShapeError(f"indexing {describe(self)} gives {ndim} dimensions, at most 4 are possible")
        strides = (nb + [b * n for b, n in zip(nb, ne, strict=True)][-1:] * 4)[:4]
        if self.type.block > 1 and len(nb) == 1:
            strides[1:] = contiguous_nb(self.type, tuple(ne) + (1,) * 3)[1:]
        ne = tuple(ne) + (1,) * (4 - len(ne))
        offs = offs if min(ne) else 0
        return self.ctx.node(OP.VIEW, self.type, ne, (self,), offset_params(offs), view_of=self, view_offs=offs,
                             nb=strides, ndim=ndim)

    def __iter__(self):
        """Views along the first NumPy axis."""
        return (self[i] for i in range(len(self)))


class TransposedBlocks:
    """`w.T` of a quantised matrix w, whose blocks lie along its rows: the right side of `x @ w.T`, and nothing else."""
    __slots__ = ("T",)
    __array_priority__ = 1001.0         # larger than a Tensor's, so that this class's operators are called

    def __init__(self, w):
        self.T = w

    @property
    def shape(self):
        return self.T.shape[::-1]

    def __rmatmul__(self, x):
        x = _operand(x, self.T)
        return NotImplemented if x is None else _times_rows(x, self.T)

    def __getattr__(self, name):
        raise AttributeError(f"{describe(self.T)} transposed has no {name!r}: its rows are blocks, which cannot be "
                             f"strided; x @ w.T takes it, gg.cast(w, 'F32').T is a tensor", name=name, obj=self)

    def __repr__(self):
        return f"<{describe(self.T)} transposed, for x @ w.T>"


# ---------------------------------------------------------------- operands
def _whole_numbers(what, values):
    """A sequence of whole numbers as ints.  Errors: ParamError."""
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise ParamError(f"{what} is a whole number, got {values!r}")
    return tuple(whole(v, what) for v in values)


def _is_scalar(x):
    return isinstance(x, int | float | np.integer | np.floating) and not isinstance(x, bool)


def _is_values(x):
    """Is x a number, an array or a sequence of numbers, of any library?"""
    return not isinstance(x, Operators) and (
        isinstance(x, bool | int | float | complex | list | tuple | np.generic) or hasattr(x, "__array__")
        or hasattr(x, "__dlpack__"))


def _not_comparable(t, sign, other):
    shown = describe(other) if isinstance(other, Operators) else type(other).__name__
    return TypeMismatch(f"{describe(t)} {sign} {shown}: ggml has no op that compares; compare the values, "
                        f"gg.compute(t) {sign} ... or t.numpy() {sign} ...; `t is u` asks for the same tensor")


def number(x):
    """A scalar as a float."""
    try:
        return float(x)
    except OverflowError:
        raise ParamError(f"{str(x)[:20]}... is too large for a float") from None


def _plus(t, factor, other, sign, op):
    """t + sign * other: with a scalar in one node of its own, else by `op`."""
    if _is_scalar(other) and t.type is F32:
        return scale_bias(t, factor, sign * number(other))
    if _is_scalar(other) and t.type.block > 1:
        raise TypeMismatch(f"{describe(t)} + {other}: no op computes a number into blocks; "
                           f"gg.cast(t, 'F32') + {other} computes in float32")
    return _binary(op, t, other)


def _operand(x, like):
    """x as a tensor for an op with `like`: scalars and arrays of any library become leaves; None for other objects."""
    if isinstance(x, Operators):
        return x
    if isinstance(x, list | tuple):
        x = numbers(x, "a list beside a tensor")
    if not _is_scalar(x) and not isinstance(x, np.ndarray):
        if not hasattr(x, "__dlpack__"):
            return None
        return leaf_of_dlpack(like.ctx._target(), x)
    a = np.asarray(number(x) if _is_scalar(x) else x)
    if _is_scalar(x) or a.dtype in (np.float64, np.int64) and like.type.dtype not in (np.int64, np.int32):
        # Python's numbers, as in `a * np.linspace(0, 1, 5)` and `a + np.arange(5)`
        a = a.astype(np.float16 if like.type is F16 and _is_scalar(x) else np.float32)
    return from_numpy(like.ctx._target(), a)


@all_or_nothing
def _binary(op, a, b):
    """op with NumPy's broadcasting; NotImplemented where an operand is no tensor, scalar or array."""
    like = a if isinstance(a, Operators) else b
    if _is_scalar(a) and b.type in (F32, F16):  # 1 / x: the scalar takes the shape of x, no leaf is needed
        return op(fill(b, number(a)), b)
    a, b = _operand(a, like), _operand(b, like)
    if a is None or b is None:
        return NotImplemented
    ne = broadcast(op.__name__, a, b)
    if a.ne == ne:
        return op(a, b)
    if op in (add, mul) and b.ne == ne and a.type is b.type:
        return op(b, a)
    return op(repeat_to(a, ne, max(a.ndim, b.ndim)), b)


def broadcast(name, a, b, first=0):
    """The common ne of a and b from dimension `first` up; ShapeError unless NumPy broadcasts them."""
    pairs = list(zip(a.ne, b.ne, strict=True))[first:]
    if any(m != n and 1 not in (m, n) for m, n in pairs):
        raise ShapeError(f"{name}: shapes {a.shape} of {describe(a)} and {b.shape} of {describe(b)} do not broadcast; "
                         f"gg.{name} tiles as ggml does")
    return tuple(n if m == 1 else m for m, n in pairs)


@all_or_nothing
def matmul(a, b):
    """a @ b, see Operators.__matmul__."""
    if not a.ndim or not b.ndim:
        raise ShapeError(f"matmul: {describe(a if b.ndim else b)} has no axes; multiply by a single value with *")
    k = b.ne[0] if b.ndim == 1 else b.ne[1]
    if a.ne[0] != k:
        raise ShapeError(f"matmul: {describe(a)} has rows of {a.ne[0]}, {describe(b)} has {k} rows to multiply them "
                         f"with (shapes {a.shape} @ {b.shape})")
    if b.ndim == 1:
        if a.ndim <= 2:
            y = mul_mat(a, b)
            return _shaped(y, y.ne, a.ndim - 1)
        y = mul_mat(b, a)                       # [1, m, ...]: one value per row
        return _shaped(y, (*y.ne[1:], 1), a.ndim - 1)
    batch, vector = broadcast("mul_mat", a, b, first=2), a.ndim == 1
    if a.ne[2:] != batch:
        a = repeat_to(a, (*a.ne[:2], *batch), max(a.ndim, b.ndim))
    return _product(_rows_along_k(b), a, max(a.ndim, b.ndim), vector)


def _times_rows(a, w):
    """a @ w.T of a matrix w as it lies."""
    if not a.ndim or a.ne[0] != w.ne[0]:
        raise ShapeError(f"matmul: {describe(a)} has rows of {a.ne[0] if a.ndim else 'no axis'}, {describe(w)} rows of "
                         f"{w.ne[0]} (shapes {a.shape} @ {w.shape[::-1]})")
    return _product(w, a, max(a.ndim, 2), a.ndim == 1)


def _product(rows, a, ndim, vector):
    """mul_mat(rows, a) with the axes of a @ rows.T; vector: a was one, whose axis of length 1 is dropped again."""
    y = mul_mat(rows, a)
    return _shaped(y, (y.ne[0], *y.ne[2:], 1), ndim - 1) if vector else _shaped(y, y.ne, ndim)


def _shaped(y, ne, ndim):
    """y with these sizes and axes: itself or a view."""
    return y if y.ne == ne and y.ndim == ndim else reshape_to(y, ne, ndim)


def _rows_along_k(b):
    """b (..., k, n) as a tensor whose rows are its columns: ne [k, n, ...]."""
    if b.op == OP.TRANSPOSE and is_contiguous(b.src[0]):
        return b.src[0]
    if b.type.block > 1:
        raise ShapeError(f"matmul: rows of {describe(b)} are blocks and cannot be transposed; gg.mul_mat(w, x) is "
                         f"x @ w.T and takes quantised w")
    return cont(transpose(b))


# ---------------------------------------------------------------- slices
def _expanded(t, index):
    """One entry per axis of t.shape, and None where an axis is added."""
    index = index if isinstance(index, tuple) else (index,)
    for i in index:
        if not (i is None or i is Ellipsis or isinstance(i, slice | int | np.integer)) or isinstance(i, bool):
            raise TypeMismatch(f"{describe(t)} takes integers, slices, ... and None as indices, not "
                               f"{type(i).__name__}; gg.get_rows picks rows by a tensor of ids")
    used, n = sum(i is not None and i is not Ellipsis for i in index), t.ndim
    if used > n or sum(i is Ellipsis for i in index) > 1:
        raise IndexRangeError(f"{describe(t)} has {n} axes, the index {index} has more, or more than one ...")
    at = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    return [*index[:at], *[slice(None)] * (n - used), *index[at + 1:]]


def _sliced(t, index):
    """(ne, nb, byte offset) of t[index], ggml order."""
    ne, nb, offs, axis = [], [], 0, t.ndim
    block = t.type.block
    for i in _expanded(t, index):
        if i is None:
            ne.append(1)
            nb.append(t.nb[max(axis - 1, 0)])
            continue
        axis -= 1
        n, unit = t.ne[axis], t.nb[axis]
        packed = block > 1 and axis == 0
        if isinstance(i, slice):
            try:
                start, stop, step = i.indices(n)
            except (TypeError, ValueError) as e:
                raise ParamError(f"{describe(t)} cannot be cut by {i}: {e}") from None
            if step < 1:
                how = "gg.get_rows(t, ids)" if axis else "gg.get_rows(gg.cont(t.T), ids).T"
                raise ParamError(f"{describe(t)}: a view cannot step backwards ({i.step}); use {how}")
            length = max(0, -(-(stop - start) // step))
            if packed and (step != 1 or start % block or length % block):
                raise ShapeError(f"{describe(t)}: rows are blocks of {block}; cut them at multiples of it, step 1")
            ne.append(length)
            nb.append(unit * step)
        else:
            start = operator.index(i)
            if not -n <= start < n:
                raise IndexRangeError(f"index {start} is out of range for axis {t.ndim - 1 - axis} of "
                                      f"{describe(t)}, {n} long")
            start %= n
            if packed:
                raise ShapeError(f"{describe(t)}: one element of a block cannot be viewed; gg.cast to F32 first")
        offs += start // block * unit if packed else start * unit
    return ne[::-1], nb[::-1], offs
