"""Hooks: named tensors of a network are captured or replaced while it runs.

A step of a network has tensors with names (`ffn_out-3`, shown as `blk.3.ffn_out`).  While names are wanted, steps are
planned for that: another graph beside the usual one, kept under another key, so that a network of which nothing is
wanted runs the plans it always ran.

    kept        outputs of the graph: they have memory of their own to the end of a run, and kernels store them
    replaced    the graph is cut behind the node; between the parts Python reads the value, and writes another

        one backend     part 0 | f | part 1 | g | part 2          a plan for each part, one memory plan for all
        scheduler       its eval callback stops behind the nodes

Tensors that are kept show what the rest of the network reads: the replaced values.
"""
import contextlib
import math
import os
import re
import shutil
import struct
import tempfile
from threading import get_ident
from typing import NamedTuple

import numpy as np

from ggjit.graphs.graph import Graph
from ggjit.graphs.placed import PlacedTensor
from ggjit.ops.core import machine
from ggjit.ops.core.errors import GgjitError, OutOfMemory, ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.host_memory import empty
from ggjit.ops.core.record import OP, VIEW_OPS

_NAME = re.compile(r"([A-Za-z]\w*)(?:-(\d+))?")
HEADER_NBYTES = 256             # of the .npy files written here: room for any number of rows


def public_name(name):
    """`ffn_out-3` -> `blk.3.ffn_out`; `embd` -> `embd`; None for names of another form."""
    m = _NAME.fullmatch(name)
    if m is None:
        return None
    return m[1] if m[2] is None else f"blk.{m[2]}.{m[1]}"


def layer_of(name):
    """The number in `blk.3.ffn_out`."""
    return int(name.split(".")[1])


def named_nodes(results):
    """{name: tensor} of the graph that computes `results`, in its order."""
    found = {}
    for t in Graph(*results).nodes:
        name = public_name(t.name) if t.name and t.op != OP.NONE else None
        if name is not None:
            found[name] = t
    return found


class Wanted(NamedTuple):
    """The named tensors that steps are planned to keep or replace.  flash: may one kernel compute attention?"""
    kept: frozenset = frozenset()
    replaced: frozenset = frozenset()
    flash: bool = True


class Hooks:
    """The sessions of a network: `CaptureSession` and `PatchSession`, in the order in which they began."""

    def __init__(self):
        self.sessions, self.wanted = [], None
        self.running = 0                        # ident of the thread that is running functions which replace values
        self.n_batch = None                     # of the network, while sessions lower it
        self.specs = None                       # {name: TensorSpec}, once it is known
        self.without_flash = frozenset()        # names that exist only without the fused attention kernel

    def refuse_nesting(self):
        """Errors: GgjitError where a function that replaces values calls the network."""
        if self.running == get_ident():
            raise GgjitError("a function given to patch must neither run nor free the model that calls it; use the "
                             "values it is given, and do the rest outside of the model's computation")

    @contextlib.contextmanager
    def none_wanted(self):
        """Context in which no values are kept or replaced."""
        before, self.wanted = self.wanted, None
        try:
            yield
        finally:
            self.wanted = before

    def add(self, session):
        self.sessions.append(session)
        self._gather()

    def remove(self, session):
        """End one use of it: the same patch may be in effect around this one, too."""
        last = max((k for k, s in enumerate(self.sessions) if s is session), default=-1)
        self.sessions = [s for k, s in enumerate(self.sessions) if k != last]
        self._gather()

    def _gather(self):
        both = [frozenset().union(*(s.names for s in self.sessions if isinstance(s, kind)))
                for kind in (CaptureSession, PatchSession)]
        self.wanted = Wanted(*both, all(s.flash for s in self.sessions)) if self.sessions else None


# ---------------------------------------------------------------- plans
class CutPlan:
    """A graph on one backend as a plan for each part; `then(t)` is called behind each node of `cuts`."""

    def __init__(self, backend, graph, cuts):
        """graph: with memory; cuts: ids of nodes."""
        self._parts, first = [], 0
        ends = [i for i, t in enumerate(graph.nodes, 1) if t.id in cuts]
        for end in dict.fromkeys([*ends, len(graph.nodes)]):
            self._parts.append((self._plan(backend, graph, first, end), graph.nodes[end - 1]))
            first = end
        self._last = next(plan for plan, _ in reversed(self._parts) if plan is not None)
        self._cuts = cuts

    @staticmethod
    def _plan(backend, graph, first, end):
        """The plan of nodes first..end-1, or None for views alone."""
        nodes = graph.nodes[first:end]
        if all(t.op in VIEW_OPS or min(t.ne) <= 0 for t in nodes):
            return None
        inside, read = {t.id for t in nodes}, set(graph.output_ids.tolist())
        for t in graph.nodes[end:]:
            read.update(x.id for s in t.src if s is not None for x in (s, s.base))
        leafs = {s.id: s for t in nodes for s in t.src if s is not None and s.id not in inside}
        outputs = [t for t in nodes if t.id in read] or nodes[-1:]
        part = Graph._in_order(outputs, nodes, list(leafs.values()))
        part.placement = graph.placement
        return backend.graph_plan_create(part)

    @property
    def resolved(self):
        return tuple(plan.resolved for plan, _ in self._parts if plan is not None)

    def compute(self, then):
        for plan, t in self._parts:
            if plan is not None:
                plan.run_nodes(0, len(plan.nodes))
            if t.id in self._cuts:
                then(t)

    def where(self, t):
        return self._last.where(t)

    def view(self, t):
        return self._last.view(t)


class WholePlan:
    """A plan in which nothing is replaced, behind the interface of `CutPlan`."""

    def __init__(self, plan):
        self._plan, self.view = plan, plan.view

    @property
    def resolved(self):
        return self._plan.resolved

    def compute(self, then):
        self._plan.compute()


class CalledPlan(WholePlan):
    """A plan of a scheduler, whose eval callback calls `then(t)`."""

    def __init__(self, plan, sched, cuts):
        super().__init__(plan)
        self._sched, self._cuts = sched, cuts

    def compute(self, then):
        sched, before, shown = self._sched, self._sched._callback, set()

        def called(t, ask):
            if ask:
                if before is not None and before(t, True):
                    shown.add(t.id)
                return t.id in self._cuts or t.id in shown
            if t.id in self._cuts:
                then(t)
            return before(t, False) if t.id in shown else True
        sched.set_eval_callback(called)
        try:
            self._plan.compute()
        finally:
            sched.set_eval_callback(before)

    def where(self, t):
        return self._sched._run.where(t)


class HookedPlan:
    """Runs a plan for the sessions of a network; otherwise like the plan."""

    def __init__(self, hooks, plan, inputs, named, wanted, specs, key_rows):
        """named: {name: tensor} of what is wanted; specs: {name: TensorSpec}; key_rows: a Decoder's, held weakly, or
        None.
        """
        self._hooks, self._plan, self._inputs, self._named, self._specs = hooks, plan, inputs, named, specs
        self._key_rows = key_rows
        self._kept = sorted(wanted.kept & named.keys())
        self._names = {named[name].id: name for name in wanted.replaced & named.keys()}
        self.view = plan.view

    @property
    def resolved(self):
        return self._plan.resolved

    def compute(self):
        sessions = list(self._hooks.sessions)
        self._hooks.running = get_ident()
        try:
            self._plan.compute(lambda t: self._replace(t, sessions))
        finally:
            self._hooks.running = 0
        self._keep([s for s in sessions if isinstance(s, CaptureSession)])

    def _columns(self, name):
        """(first position, columns of the key axis from it on) of a tensor that looks at keys.

        Columns are cache rows, more than are in use for the sake of a round number.  Of several texts in one batch they
        stay as they are; an encoder has a column for each token.
        """
        n_tokens, layer = len(self._inputs["tokens"]), layer_of(name)
        found = None if self._key_rows is None else self._key_rows()(layer, n_tokens)
        return found if found is not None else (0, slice(None))

    def _by_position(self, name, a):
        """a with a key axis in the order of the text; the array itself for other tensors."""
        axis = self._specs[name].key_axis
        if axis is None:
            return a
        first, columns = self._columns(name)
        a = a[(slice(None),) * axis + (columns,)]
        return np.pad(a, [(first * (i == axis), 0) for i in range(a.ndim)]) if first else a

    def _replace(self, t, sessions):
        name = self._names[t.id]
        placed = PlacedTensor(t, t.src, self._plan.where(t))
        whole = placed.numpy()
        x = before = self._by_position(name, whole)
        for s in sessions:
            if isinstance(s, PatchSession) and name in s.names:
                x = s.replaced(name, x)
        if x is not before:
            axis = self._specs[name].key_axis
            if axis is not None:
                first, columns = self._columns(name)
                at = (slice(None),) * axis
                whole[(*at, columns)] = x[(*at, slice(first, None))]
            placed.set(x if axis is None else whole)

    def _keep(self, keeping):
        n, n_texts, values = self._n_tokens(), len(self._inputs.get("next_state_row", ())), {}
        for name in self._kept if keeping else ():
            axis, a = self._specs[name].token_axis, self._by_position(name, self._plan.view(self._named[name]))
            if axis is None:
                values[name] = a[:n] if n_texts > 1 else a
            else:
                values[name] = a[(slice(None),) * axis + (slice(n),)]
        for s in keeping:
            s.keep(values, self._inputs["tokens"][:n] if "tokens" in self._inputs else None)

    def _n_tokens(self):
        """Tokens of the step without copies of the last one, which fill a batch of texts up."""
        for name, a in self._inputs.items():
            if name.startswith("rows") or name == "next_state_row" and len(a) > 1:
                others = np.flatnonzero(a != a[-1])
                return int(others[-1]) + 2 if len(others) else 1
        return len(self._inputs.get("tokens", ()))


# ---------------------------------------------------------------- what is known of a name
class TensorSpec(NamedTuple):
    """A named tensor: `shape` in NumPy order, with "n_tokens" and "n_kv" for sizes that a step decides.

    token_axis: the first that counts tokens; key_axis: another that counts tokens or cache rows; None: there is none.
    """
    name: str
    op: str
    shape: tuple
    where: str
    token_axis: int | None
    key_axis: int | None
    dtype: np.dtype

    def row_shape(self, n_keys):
        """The shape of the values of one token."""
        sizes = [n_keys if i == self.key_axis else n for i, n in enumerate(self.shape) if i != self.token_axis]
        return tuple(n if isinstance(n, int) else 1 for n in sizes)

    def row_nbytes(self, n_keys):
        return math.prod(self.row_shape(n_keys)) * self.dtype.itemsize


class TokenRows:
    """Values of one tensor, token by token; the first axis counts tokens here.

    n_expected: how many will come, where that is known; n_keys: the most columns that the axis of keys can have.
    path: a .npy file to write them to.  Without one they are in memory, or, where that does not hold them, in a file
    without a name that goes with the last array of it.  to_file: begin with such a file.
    """

    def __init__(self, spec, n_expected, n_keys, path=None, to_file=False):
        self._spec, self._n, self._path, self._widest = spec, 0, path, n_keys
        self._key = None if spec.key_axis is None else spec.key_axis + (spec.key_axis < (spec.token_axis or 0))
        self._row, self._expected = list(spec.row_shape(n_keys if path or to_file or n_expected else 1)), n_expected
        self._a, self._file = None, None
        if path is not None:
            self._file = open(path, "xb+")              # noqa: SIM115
            self._head()
        elif to_file and spec.token_axis is not None:
            self._file = _nameless()

    def add(self, a):
        """The values of one run."""
        spec = self._spec
        if spec.token_axis is None:         # the tensor has one row for each text of the step
            a, self._n, self._row, self._a = a[None], 0, list(a.shape), None
        else:
            a = np.moveaxis(a, spec.token_axis, 0)
        a = a.astype(spec.dtype, copy=False)
        if self._file is None:
            self._grow(self._n + len(a), 0 if self._key is None else a.shape[self._key])
        if self._file is not None:
            self._write(a)
        else:
            self._a[(slice(self._n, self._n + len(a)), *map(slice, a.shape[1:]))] = a
        self._n += len(a)

    def _grow(self, n, width):
        """Make room for n rows of at least `width` keys; in a file where memory does not suffice."""
        have = 0 if self._a is None else len(self._a)
        if self._key is not None and width > self._row[self._key - 1]:
            self._row[self._key - 1] = width
        elif n <= have:
            return
        n = n if n <= have else max(n, self._expected or 2 * have)
        shape = (max(n, have), *self._row)
        try:
            if math.prod(shape) * self._spec.dtype.itemsize > available_nbytes():
                raise OutOfMemory("more than is free")
            a = empty(shape, self._spec.dtype, self._spec.name)
        except OutOfMemory:
            return self._to_file()
        if self._key is not None:
            a[...] = 0
        if have:
            a[(slice(self._n), *map(slice, self._a.shape[1:]))] = self._a[:self._n]
        self._a = a

    def _to_file(self):
        """Write the values so far to a file and continue there."""
        rows = None if self._a is None else self._a[:self._n]
        if self._key is not None:
            self._row[self._key - 1] = max(self._widest, self._row[self._key - 1])
        nbytes = 2 * (self._n + 1) * math.prod(self._row) * self._spec.dtype.itemsize
        if nbytes > free_nbytes():
            raise too_large([self._spec.name], nbytes)
        self._file, self._a, self._n = _nameless(), None, 0
        if rows is not None and len(rows):
            self._write(rows)
            self._n = len(rows)

    def _write(self, a):
        short = 0 if self._key is None else self._row[self._key - 1] - a.shape[self._key]
        if short:
            a = np.pad(a, [(0, short * (i == self._key)) for i in range(a.ndim)])
        self._file.seek(HEADER_NBYTES + self._n * math.prod(self._row) * self._spec.dtype.itemsize)
        self._file.write(np.ascontiguousarray(a).data)

    def _head(self):
        """A header of the .npy format, version 1.0, padded with spaces."""
        about = {"descr": self._spec.dtype.str, "fortran_order": False, "shape": (self._n, *self._row)}
        self._file.seek(0)
        self._file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", HEADER_NBYTES - 10)
                         + repr(about).ljust(HEADER_NBYTES - 11).encode() + b"\n")
        self._file.flush()

    def array(self):
        """(..., n, ...) all values so far: an array, or the memory-mapped file.  Tensors without tokens: the last."""
        if self._path is not None:
            if not self._file.closed:
                self._head()
            a = np.load(self._path, mmap_mode="r")
        elif self._file is not None and self._n:
            self._file.flush()
            a = np.memmap(self._file, self._spec.dtype, "r", HEADER_NBYTES, (self._n, *self._row))
        else:
            a = np.zeros((0, *self._row), self._spec.dtype) if self._a is None else self._a[:self._n]
        axis = self._spec.token_axis
        return a[-1] if axis is None and len(a) else np.moveaxis(a, 0, axis or 0)

    def close(self):
        """No more values come: a named file is completed; a temporary one is deleted with this object and its
        arrays."""
        if self._path is not None and not self._file.closed:
            self._head()
            self._file.close()

    def discard(self):
        """Close, and take the file away."""
        if self._file is not None:
            self._file.close()
        if self._path is not None:
            os.remove(self._path)


def _nameless():
    return tempfile.TemporaryFile(prefix="ggjit-")      # noqa: SIM115


def available_nbytes():
    """Bytes of memory that can be had without swapping; where the system does not say, more than there is."""
    return machine.available_nbytes() or 1 << 62


def free_nbytes():
    """Bytes free on the disk of temporary files."""
    return shutil.disk_usage(tempfile.gettempdir()).free


def too_large(names, nbytes):
    several = f"{names[0]}, ..." if len(names) > 1 else names[0]
    return OutOfMemory(f"the values of {len(names)} tensors ({several}) are {nbytes:,} bytes, more than memory and "
                       f"{tempfile.gettempdir()} hold; name fewer tensors, give a shorter text, or write them to files "
                       f"on another disk with out=FOLDER")


# ---------------------------------------------------------------- sessions
class CaptureSession:
    """Keeps the values of tensors.  Errors of a run leave what was kept before it."""

    def __init__(self, specs, rows, flash):
        self.names, self.flash = frozenset(specs), flash
        self.rows, self.tokens = rows, []               # {name: TokenRows}

    n_batch = 1 << 31                   # tokens that a step may have

    def keep(self, values, tokens):
        for name, a in values.items():
            if name in self.rows:
                self.rows[name].add(a)
        self.tokens.extend(() if tokens is None else tokens.tolist())


class PatchSession:
    """Replaces the values of tensors.  given: {name: [function or value]}, in the order of the patterns."""

    def __init__(self, given, flash):
        self.names, self.flash, self._given = frozenset(given), flash, given

    def replaced(self, name, x):
        """The array that replaces the array x."""
        for f in self._given[name]:
            y = x.copy()
            if callable(f):
                new = f(y)
                new = y if new is None else new
            else:
                new = f
            x = _checked(name, x, new)
        return x


def _checked(name, x, y):
    """y as an array of x's shape and type."""
    try:
        a = np.asarray(y)
    except ValueError as e:                             # a ragged list
        raise TypeMismatch(f"patch of {name!r} gave {type(y).__name__}, expected {x.dtype} {x.shape}: {e}") from None
    if a.dtype.kind not in "fiu" or not np.can_cast(a.dtype, x.dtype, "same_kind"):
        raise TypeMismatch(f"patch of {name!r} gave {a.dtype if isinstance(y, np.ndarray | np.generic) else repr(y)}, "
                           f"expected {x.dtype} {x.shape}, a number, or None to go on with the array it was given")
    try:
        out = np.broadcast_to(a, x.shape)
    except ValueError:
        raise ShapeError(f"patch of {name!r} gave an array {a.shape}, expected {x.shape} (tokens of this step come and "
                         f"go: read the shape from the array that is given)") from None
    out = out.astype(x.dtype)
    if x.dtype.kind == "f" and np.isnan(out).any() and not np.isnan(x).any():
        raise ParamError(f"patch of {name!r} gave NaN, which would spread to all that follows; give numbers")
    return out
