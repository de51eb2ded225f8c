"""Records: what a jitted pass works on, fields by name, handed over as one address.

    WALK = JitRecord("WalkRecord", n="i64", price="f64", size="i64[n]", step=(STEP, "n"), count=COUNT)
    walk_at = WALK.at                   # jitted code knows no JitRecord, but its functions

    @native("i64(i64)")
    def walk(address):
        r = walk_at(address)            # r.n, r.price, r.size[i], r.step[i].place, r.count.moves += 1
        ...
    given = WALK.of(n=3, price=0.5, size=size)      # step and count: memory of its own
    walk(given.words)
    given.step["place"]                             # as the pass left it

A field is a scalar (i64, f64), an array (i64, f64, u8) with its length, (structured dtype, length), or a structured
dtype: one row of it.  Lengths are expressions of fields to the left.  An array that is not given is made;
"i64[n] = 0" says what it is filled with.

In memory a record is a word a field, a value or an address, and in jitted code a pointer to them: one word wherever it
is passed.  No pass changes the words, and loads of them say so to LLVM (`invariant.load`), so that none is repeated in
a loop.  Places are not checked, and count from 0 alone: -1 is no place.
"""
import operator
import re

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.core.imputils import lower_builtin, lower_getattr_generic
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global, signature
from numba.extending import intrinsic, models, register_model

from ggjit.ops.native.jit import address_of

_SCALARS = {"i64": types.int64, "f64": types.float64, "u8": types.uint8}
_DTYPES = {"i64": np.dtype(np.int64), "f64": np.dtype(np.float64), "u8": np.dtype(np.uint8)}
_names = set()                  # Numba tells the records by them
_FIELD = re.compile(r"(\w+)(?:\[(.*)\](?: = (-?\d+))?)?")


# ---------------------------------------------------------------- in jitted code
class RecordPointer(types.Type):
    """Where a record's words begin; fields: {name: (word, Numba type)}."""

    def __init__(self, name, fields):
        self.fields = fields
        super().__init__(name=f"RecordPointer({name})")


class RowsPointer(types.Type):
    """Rows of a structured dtype."""

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(name=f"RowsPointer({dtype})")


@register_model(RecordPointer)
class RecordPointerModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.IntType(64).as_pointer())


@register_model(RowsPointer)
class RowsPointerModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, dmm.lookup(fe_type.dtype).get_value_type())


@infer_getattr
class RecordPointerFields(AttributeTemplate):
    key = RecordPointer

    def generic_resolve(self, record, field):
        return record.fields[field][1] if field in record.fields else None


@lower_getattr_generic(RecordPointer)
def _load_field(context, b, record, words, field):
    word, found = record.fields[field]
    at = b.gep(words, [ir.Constant(ir.IntType(64), word)])
    value = b.load(b.bitcast(at, context.get_value_type(found).as_pointer()))
    value.set_metadata("invariant.load", b.module.add_metadata([]))
    return value


@infer_global(operator.getitem)
class RowsPointerItem(AbstractTemplate):
    def generic(self, args, kws):
        rows, place = args
        if isinstance(rows, RowsPointer) and isinstance(place, types.Integer):
            return signature(rows.dtype, rows, types.int64)


@lower_builtin(operator.getitem, RowsPointer, types.int64)
def _row_at(context, b, sig, args):
    return b.gep(args[0], [args[1]])


def _pointer_maker(type):
    @intrinsic
    def at(typingctx, address):
        def codegen(context, b, sig, args):
            return b.inttoptr(args[0], ir.IntType(64).as_pointer())
        return type(types.int64), codegen
    return at


# ---------------------------------------------------------------- in Python
def row(*fields):
    """The dtype of a row of whole numbers."""
    return np.dtype([(field, "i8") for field in fields])


class JitRecord:
    """A layout of fields; `at(address)`, for jitted code, gives them by name."""

    def __init__(self, name, **fields):
        self.name, self.scalars, self.arrays, found = name, {}, {}, {}
        for k, (field, spec) in enumerate(fields.items()):
            if isinstance(spec, str):
                kind, length, fill = _FIELD.fullmatch(spec).groups()
                dtype, seen = _DTYPES[kind], _SCALARS[kind] if length is None else types.CPointer(_SCALARS[kind])
            else:
                (dtype, length), fill = spec if isinstance(spec, tuple) else (spec, "1"), 0
                seen = RowsPointer(from_dtype(dtype)) if isinstance(spec, tuple) else from_dtype(dtype)
                fill = None if isinstance(spec, tuple) else 0
            found[field] = k, seen
            if length is None:
                self.scalars[field] = k, kind
            else:
                self.arrays[field] = k, dtype, compile(length, field, "eval"), fill
        assert name not in _names, f"there is a {name} already"
        _names.add(name)
        self.at = _pointer_maker(RecordPointer(name, found))

    def of(self, **values):
        """A FilledRecord.  Every scalar is needed."""
        return FilledRecord(self, values)


class FilledRecord:
    """One record in memory: `.words` is what a pass gets.  Fields are attributes; scalars may be set."""

    def __init__(self, record, values):
        words = np.empty(len(record.scalars) + len(record.arrays), np.int64)
        vars(self).update(_record=record, words=words, _floats=words.view(np.float64), _values=values)
        for field, (k, kind) in record.scalars.items():
            (words if kind == "i64" else self._floats)[k] = values[field]
        for field, (k, dtype, length, fill) in record.arrays.items():
            array = values.get(field)
            if array is None:
                n = eval(length, {}, values)
                array = values[field] = np.zeros(n, dtype) if fill in (0, "0") else np.empty(n, dtype)
                if fill not in (None, 0, "0"):
                    array.fill(int(fill))
            assert array.dtype == dtype, f"{record.name}.{field}: {array.dtype}"
            words[k] = address_of(array if dtype.names is None else array.view(np.int64))
        assert len(values) == len(words), f"{record.name} lacks some of {', '.join(values)}"

    def __setattr__(self, field, value):
        k, kind = self._record.scalars[field]
        (self.words if kind == "i64" else self._floats)[k] = self._values[field] = value

    def __getattr__(self, field):
        try:
            return self._values[field]
        except KeyError:
            raise AttributeError(field) from None
