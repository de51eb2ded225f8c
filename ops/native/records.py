"""Records: what a jitted pass works on, fields by name, handed over as one address.

    WALK = JitRecord("WalkRecord", n="i64", price="f64", size="i64[n]", step=(STEP, "n"), count=COUNT)
    walk_at = WALK.at                   # jitted code knows no JitRecord, but its functions

    @native("i64(i64)")
    def walk(address):
        r = walk_at(address)            # r.n, r.price, r.size[i], r.step[i].place, r.count.moves += 1
        ...
    given = WALK.of(n=3, price=0.5, size=size)      # step and count: memory of its own
    walk(given)
    given.step["place"]                             # as the pass left it

A field is a scalar (i64, f64), an array (i64, f64, u8) with its length, (structured dtype, length), or a structured
dtype: one row of it.  Lengths are expressions of fields to the left.  An array that is not given is made;
"i64[n] = 0" says what it is filled with.

In memory a record is a word a field, a value or an address, and in jitted code a pointer to them: one word wherever it
is passed.  No pass changes the words, and loads of them say so to LLVM (`invariant.load`), so that none is repeated in
a loop.  Indices are not checked, and count from 0: -1 is not the last element.
"""
import operator
import re
import struct
from array import array

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.core.imputils import lower_builtin, lower_getattr_generic
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global, signature
from numba.extending import intrinsic, models, register_model

from ggjit.ops.native.jit import address_of

_SCALARS = {"i64": types.int64, "f64": types.float64, "u8": types.uint8}
_DTYPES = {"i64": np.dtype(np.int64), "f64": np.dtype(np.float64), "u8": np.dtype(np.uint8)}
_names = set()                  # names of records must differ, since Numba identifies types by them
_spare = []                     # memory of a record that was given back
MOST_SPARE = 1 << 19            # bytes of it that are kept, at most
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
        assert name not in _names, f"there is a {name} already"
        _names.add(name)
        self.name, self.scalars, self.arrays, self._makers, found = name, {}, {}, {}, {}
        for k, (field, spec) in enumerate(fields.items()):
            if isinstance(spec, str):
                kind, length, fill = _FIELD.fullmatch(spec).groups()
                dtype, seen = _DTYPES[kind], _SCALARS[kind] if length is None else types.CPointer(_SCALARS[kind])
            elif isinstance(spec, tuple):
                (dtype, length), fill, seen = spec, None, RowsPointer(from_dtype(spec[0]))
            else:
                dtype, length, fill, seen = spec, "1", "0", from_dtype(spec)
            found[field] = k, seen
            if length is None:
                self.scalars[field] = k, kind
            else:
                self.arrays[field] = dtype, length, fill
        self.places, self.at = {field: k for field, (k, _) in found.items()}, _pointer_maker(RecordPointer(name, found))

    def of(self, **values):
        """A FilledRecord.  Every scalar is needed."""
        given = tuple(values)
        maker = self._makers.get(given)
        if maker is None:
            maker = self._makers[given] = self._maker(values)
        return FilledRecord(self, values, *maker(values))

    def _maker(self, values):
        """values -> (words, memory, {field: (first and last word of it, dtype)}) for calls that give these fields.

        Arrays to be made lie in one block, those of zeros first; a record of twenty fields takes 10 us."""
        assert self.scalars.keys() <= values.keys() <= self.places.keys(), f"{self.name} has other fields"
        made = sorted((f for f in self.arrays if f not in values), key=lambda f: self.arrays[f][2] != "0")
        names = [f for f in values if any(re.search(rf"\b{f}\b", self.arrays[m][1]) for m in made)]
        lines = [f"assert values[{f!r}].dtype == dtypes[{f!r}], '{self.name}.{f} has another dtype'"
                 for f in values if f in self.arrays]
        lines += [f"{f} = values[{f!r}]" for f in names] + ["end = 0"]
        for field in made:
            dtype, length, fill = self.arrays[field]
            lines += [f"{field}_ = end", f"end += (({length}) * {dtype.itemsize} + 7) // 8"]
            lines += ["n_zeros = end"] if fill == "0" else []
        lines += ["memory = room(end)", "at = memory.__array_interface__['data'][0]"]
        if any(self.arrays[field][2] == "0" for field in made):
            lines.append("memory[:n_zeros] = 0")
        ends = {f: f"{g}_" for f, g in zip(made, made[1:], strict=False)}
        lines += [f"memory[{f}_:{ends.get(f, 'end')}] = {self.arrays[f][2]}" for f in made
                  if self.arrays[f][2] not in (None, "0")]
        words = [f"at + 8 * {f}_" if f in made else
                 f"values[{f!r}].ctypes.data" if f in self.arrays and self.arrays[f][0].names else
                 f"address_of(values[{f!r}])" if f in self.arrays else
                 f"values[{f!r}]" if self.scalars[f][1] == "i64" else f"bits(values[{f!r}])" for f in self.places]
        places = ", ".join(f"{f!r}: ({f}_, {ends.get(f, 'end')})" for f in made)
        lines.append(f"return array('q', ({', '.join(words)},)), memory, {{{places}}}")
        scope = {"np": np, "array": array, "address_of": address_of, "bits": _bits, "room": _room,
                 "dtypes": {f: dtype for f, (dtype, *_) in self.arrays.items()}}
        exec("def make(values):\n    " + "\n    ".join(lines), scope)
        return scope["make"]


def _room(n):
    """n words with any contents: fresh pages are slow."""
    try:
        found = _spare.pop()
    except IndexError:
        return np.empty(n, np.int64)
    return found[:n] if len(found) >= n else np.empty(n, np.int64)


def _bits(x):
    return struct.unpack("q", struct.pack("d", x))[0]


class FilledRecord:
    """One record in memory, which a pass takes as an argument.  Fields are attributes; scalars may be set."""

    def __init__(self, record, values, words, memory, made):
        d = self.__dict__
        d["_record"], d["_values"], d["_words"], d["_memory"], d["_made"] = record, values, words, memory, made
        d["_as_parameter_"] = words.buffer_info()[0]            # for ctypes, which holds the record while a pass runs

    def give_back(self):
        """Keep this record's memory for the next one; no part of it may be used after this call."""
        memory = self._memory if self._memory.base is None else self._memory.base
        if memory.nbytes <= MOST_SPARE and not _spare:
            _spare.append(memory)

    def __setattr__(self, field, value):
        k, kind = self._record.scalars[field]
        self._words[k] = value if kind == "i64" else _bits(value)
        self._values[field] = value

    def __getattr__(self, field):
        if field in self._values:
            return self._values[field]
        if field not in self._made:
            raise AttributeError(field)
        (first, end), (dtype, length, _) = self._made[field], self._record.arrays[field]
        found = self._memory[first:end].view(dtype)
        if dtype.itemsize < 8:
            found = found[:eval(length, {}, self._values)]
        self._values[field] = found
        return found
