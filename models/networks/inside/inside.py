"""Looking inside a network and changing what it computes.  Functions of `self` are methods of Network.

    m.names("blk.3.*")                                          what there is
    m.capture(["embd", "blk.*.l_out"], "a text")                {name: values of every token}
    with m.capturing("blk.3.ffn_out") as c: ...                 the same of whatever runs inside
    with m.patch({"blk.3.ffn_out": lambda x: 0 * x}): ...       other values in their place

How it is done: models/networks/inside/hooks.py.  Pictures: models/networks/inside/pictures.py.
"""
import collections.abc
import contextlib
import difflib
import fnmatch
import inspect
import os
import pathlib
import re
import weakref

import numpy as np

from ggjit.core.html_repr import escape
from ggjit.graphs.graph import Graph
from ggjit.models.core.checks import BrokenValues, integer
from ggjit.models.networks.inside import pictures
from ggjit.models.networks.inside.attribution import attribution as attributed
from ggjit.models.networks.inside.hooks import (
    CalledPlan,
    CaptureSession,
    CutPlan,
    HookedPlan,
    PatchSession,
    TensorSpec,
    TokenRows,
    Wanted,
    WholePlan,
    available_nbytes,
    free_nbytes,
    named_nodes,
    too_large,
)
from ggjit.ops.core.errors import ParamError, TypeMismatch
from ggjit.tensors.summary import op_name

KEPT_NBYTES = 256 << 20         # of kept values of one step; larger steps are split into smaller batches
_LLAMA_NAME = re.compile(r"([A-Za-z*?]\w*)-(\d+|\*)")


class Names(tuple):
    """The named tensors of a step, `.name .op .shape .where` each; shown as a table."""

    _FIELDS = "name", "op", "shape", "where"

    def _rows(self):
        return [[str(s.name), s.op, f"({', '.join(map(str, s.shape))})", s.where] for s in self]

    def __repr__(self):
        rows = [list(self._FIELDS), *self._rows()]
        widths = [max(len(row[k]) for row in rows) for k in range(len(self._FIELDS))]
        return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def _repr_html_(self):
        def line(cells, tag):
            return "<tr>" + "".join(f"<{tag} style='text-align:left'>{escape(c)}</{tag}>" for c in cells) + "</tr>"
        return f"<table>{line(self._FIELDS, 'th')}{''.join(line(row, 'td') for row in self._rows())}</table>"


def matched(specs, patterns, arch):
    """{name: TensorSpec} of what the patterns name, in the order of `specs`.  Errors: ParamError, TypeMismatch."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, list | tuple | set | frozenset) or not all(isinstance(p, str) for p in patterns):
        raise TypeMismatch(f"names of tensors are a string or a list of strings, such as \"blk.*.ffn_out\", got "
                           f"{patterns!r}")
    if not patterns:
        raise ParamError("no tensor is named; m.names() lists all")
    found = set()
    for pattern in patterns:
        m = _LLAMA_NAME.fullmatch(pattern)
        here = fnmatch.filter(specs, pattern if m is None else f"blk.{m[2]}.{m[1]}")
        if not here:
            nearest = difflib.get_close_matches(pattern, specs, 1, 0.0)
            raise ParamError(f"no tensor of {arch} is called {pattern!r}; the nearest is {nearest[0]!r}; m.names() "
                             f"lists all")
        found.update(here)
    return {name: spec for name, spec in specs.items() if name in found}


# ---------------------------------------------------------------- names
def names(self, pattern="*"):
    """The named tensors of a step that match `pattern`: name, op, shape, and the backend its layer lies on.

        m.names("blk.0.*")

    Shapes are in NumPy order, with "n_tokens" for the tokens of a step and "n_kv" for the cache rows it looks at.
    `blk.N.WHAT` are llama.cpp's names, which it writes `WHAT-N`:

        embd  result_norm  logits           before the layers, after their last norm, and at the end
        attn_norm  attn_out                 what the mixer (attention, or what stands in its place) reads and adds
        Qcur  Kcur  Vcur  attn              queries, keys, values as projected; what the heads read
        kq  kq_soft_max                     scores and weights of attention, where they are asked for
        ffn_inp  ffn_norm  ffn_out  l_out   between mixer and feed-forward; its part; what the layer gives on

    Errors: ParamError where nothing matches, with the nearest name.
    """
    return Names(matched_in(self, pattern).values())


def matched_in(m, patterns):
    """{name: TensorSpec} of what the patterns name, in the order of the graph.  Errors: ParamError,
    TypeMismatch.
    """
    return matched(_specs(m), patterns, m.file.arch)


def _specs(m):
    """{name: TensorSpec} of everything that has a name."""
    hooks = m._hooks
    if hooks.specs is None:
        with m._lock:
            before, hooks.wanted = hooks.wanted, Wanted(flash=False)
            try:
                each = m._named(m._compared_shapes())
                hooks.wanted = None
                flash, = m._named(m._compared_shapes()[:1])
            finally:
                hooks.wanted = before
            hooks.without_flash = frozenset(each[0].keys() - flash.keys())
            hooks.specs = {name: m._spec(name, [named[name] for named in each]) for name in each[0]}
    return hooks.specs


def named_in(self, shapes):
    """[{name: tensor}, ...] of the graphs of these shapes."""
    return [named_nodes(self._built(shape)[2]) for shape in shapes]


def spec_of(self, name, tensors):
    """The TensorSpec of a name.  tensors: of the graphs of `_compared_shapes`."""
    t, sizes = tensors[0], np.array([x.shape for x in tensors])
    steps = np.zeros((2, len(t.shape)), int)
    steps[:len(tensors) - 1] = sizes[1:] - sizes[0]
    shape = list(t.shape)
    for grows, symbol in zip(steps, ("n_tokens", "n_kv"), strict=True):
        for i in np.flatnonzero(grows):
            times, more = int(grows[i]), int(sizes[0, i] - grows[i])
            shape[i] = f"{times} {symbol}" * (times > 1) or symbol
            shape[i] += f" + {more}" * (more > 0)
    tokens, keys = np.flatnonzero(steps[0]).tolist(), np.flatnonzero(steps[1]).tolist()
    token_axis, *others = tokens or [None]
    dtype = np.dtype(np.int32 if t.type.dtype.kind == "i" else np.float32)
    return TensorSpec(name, op_name(t), tuple(shape), _where_of(self, name), token_axis,
                      ([*keys, *others] or [None])[0], dtype)


def _where_of(m, name):
    weight = {"logits": "output.weight", "result_norm": "output_norm.weight"}.get(name, name)
    return (m.offload.backend_of(weight) or m.backend).name


# ---------------------------------------------------------------- values
def capture(self, patterns, prompt, out=None):
    """{name: float32 array} of the tensors that match, for every token of `prompt`; the text so far is forgotten.

        hidden = m.capture("blk.*.l_out", "a text")["blk.3.l_out"]         # (n_tokens, dim)

    patterns: a name, or a list of names, with `*`, `?` and `[...]` as in file names.  prompt: a text or token ids.
    Values that memory does not hold go to a temporary file, and the arrays are memory-mapped; out: a folder, where
    each tensor gets a .npy file of its own.  Token ids of experts are int32; weights of attention
    (n_head, n_tokens, n_tokens), computed without the kernel that never stores them; tensors without tokens, such
    as states, are as the last step left them.  What `patch` replaces shows.
    Errors: ParamError (nothing matches; a file that exists), OutOfMemory (more than memory and the disk of
    temporary files hold), IndexRangeError.
    """
    specs = matched_in(self, patterns)
    ids = ids_of(self, prompt)
    with self._lock:
        keeping = _keeping(self, specs, len(ids), len(ids), out)
        try:
            with _During(self, keeping), contextlib.suppress(BrokenValues):
                _read_whole(self, ids, specs)
            for rows in keeping.rows.values():
                rows.close()
        except BaseException:
            for rows in keeping.rows.values():
                rows.discard()
            raise
    return {name: rows.array() for name, rows in keeping.rows.items()}


def _read_whole(m, ids, names):
    """All tokens through the network, from an empty text."""
    if not m.CAUSAL:
        m._pooled(ids)
    elif "logits" in names:
        m.logits(ids)
    else:
        m.hidden(ids)


def capturing(self, patterns, out=None):
    """A `with` block that keeps the values of tensors of whatever runs inside, one row per token in the order in
    which they are read.

        with m.capturing("blk.*.ffn_out") as c:
            text = "".join(m.generate("Once upon a time", 20))
        c["blk.0.ffn_out"], c.tokens                # (n_tokens, dim), and the ids they belong to

    A step gives logits and result_norm for its last token only.  `c` can be read inside the block, too.  Arguments
    and errors as `capture`; once memory does not hold the values, they are in a temporary file, too.
    """
    return Capturing(self, matched_in(self, patterns), out)


def _keeping(m, specs, n_expected, n_keys, out):
    """A CaptureSession for those tensors.  n_expected: tokens, n_keys: cache rows, where they are known."""
    n_most = n_keys or m.n_ctx
    nbytes = sum((n_expected or 1) * spec.row_nbytes(n_most if n_expected else 1) for spec in specs.values())
    to_file = out is None and nbytes > available_nbytes()
    if to_file and nbytes > free_nbytes():
        raise too_large(list(specs), nbytes)
    rows = {}
    try:
        for name, spec in specs.items():
            rows[name] = TokenRows(spec, n_expected, n_most, out if out is None else _path(out, name), to_file)
    except BaseException:
        for made in rows.values():
            made.discard()
        raise
    keeping = CaptureSession(specs, rows, not m._hooks.without_flash & specs.keys())
    keeping.n_batch = max(1, KEPT_NBYTES // max(1, sum(spec.row_nbytes(n_most) for spec in specs.values())))
    return keeping


# ---------------------------------------------------------------- other values
def patch(self, changes):
    """A `with` block in which tensors get other values, in prompts and in generated text.

        with m.patch({"blk.3.ffn_out": 0, "blk.5.l_out": lambda x: x + direction}):
            text = "".join(m.generate("Once upon a time", 20))

    changes: {name or pattern: function or value}.  A function gets a copy of a tensor's values as an array, which
    has the shape that `names` shows, and gives an array of that shape, or one that NumPy broadcasts to it, or a
    number, or None: the array it was given, with what it changed in it.  It is called once per tensor and step, in
    the order of the network; it must not run or free the model.  Blocks may be nested: the outer one comes first.
    Values that a cache keeps stay as they were computed: text that was read before a block is not read again.
    Errors: ParamError (nothing matches; NaN), TypeMismatch, ShapeError, whatever the function raises: the text is
    then as it was before the call.
    """
    if not isinstance(changes, dict):
        raise TypeMismatch(f"patch takes a dict {{name: function or value}}, got {type(changes).__name__}")
    given = {}
    for pattern, change in changes.items():
        if not callable(change) and not _is_numbers(change):
            raise TypeMismatch(f"patch of {pattern!r}: expected a function, a number or an array of numbers, got "
                               f"{change!r}")
        if not _takes_one(change):
            raise TypeMismatch(f"patch of {pattern!r}: the function takes one argument, the array of values: "
                               f"lambda x: 0.5 * x")
        for name in matched_in(self, pattern):
            given.setdefault(name, []).append(change)
    if not given:
        raise ParamError("patch was given nothing to change; m.names() lists what there is")
    return _During(self, PatchSession(given, not self._hooks.without_flash & given.keys()))


class _During(contextlib.ContextDecorator):
    """A block with a session of the network's hooks.  What `m.patch` gives: outside of it nothing is replaced."""

    def __init__(self, network, session):
        self._network, self._session = network, session

    def __enter__(self):
        _begin(self._network, self._session)

    def __exit__(self, *exc):
        _end(self._network, self._session)

    def __repr__(self):
        return f"<patch of {', '.join(sorted(self._session.names))}: in effect inside `with m.patch(...):` alone>"


def _begin(m, session):
    with m._lock:
        m._hooks.add(session)
        _limit_batches(m)


def _end(m, session):
    with m._lock:
        m._hooks.remove(session)
        _limit_batches(m)


def _limit_batches(m):
    """Set the tokens of a step: as many as the network was loaded for, fewer where kept values need room."""
    if not hasattr(m, "n_batch"):
        return
    hooks = m._hooks
    hooks.n_batch = hooks.n_batch or m.n_batch
    m.n_batch = min([hooks.n_batch, *(s.n_batch for s in hooks.sessions if isinstance(s, CaptureSession))])
    if not hooks.sessions:
        hooks.n_batch = None


# ---------------------------------------------------------------- pictures
def attention(self, prompt):
    """AttentionMaps of a text or token ids: which tokens each token looks at, by layer and head.

        maps = m.attention("a text")
        maps.weights[3][0], maps.plot(layer=3, head=0)

    The text so far is forgotten.  Errors: ParamError, for a model without attention.
    """
    return pictures.attention_maps(self, ids_of(self, prompt))


def hidden_states(self, prompt):
    """HiddenStates of a text or token ids: the embeddings, and what every layer gives on.

        states = m.hidden_states("a text")
        states.values.shape, states.plot()          # (n_layer + 1, n_tokens, dim)

    The text so far is forgotten.
    """
    return pictures.hidden_states(self, ids_of(self, prompt))


def attribution(self, prompt, target=None):
    """Attribution of a text or token ids: how much each token made the next one likely (gradient x input), and the
    gradient of its log-probability by every embedding.

        a = m.attribution("The capital of France is")
        a.scores, a.saliency, a.plot()

    target: another token than the likeliest, an id or a text of one token.  The text so far is forgotten.
    Errors: NotSupported (a model without logits or gradients), ParamError.
    """
    return attributed(self, ids_of(self, prompt), target)


def logit_lens(self, prompt, top=3):
    """LogitLens of a text or token ids: the `top` likeliest next tokens if the model ended after each layer, which
    is the last norm and the output matrix on what the layer gives on.

        m.logit_lens("The capital of France is")

    The text so far is forgotten.  Errors: NotSupported, for a model without logits.
    """
    return pictures.logit_lens(self, ids_of(self, prompt), integer("top", top, 1, self.n_vocab))


def ids_of(m, prompt):
    """A text, or token ids, as checked ids."""
    return m._checked_ids(prompt, m.n_ctx)


# ---------------------------------------------------------------- plans
def hooked_plan(m, inputs, results):
    """A plan of the graph for what the sessions want of it."""
    hooks, specs = m._hooks, _specs(m)
    wanted, named = hooks.wanted, named_nodes(results)
    named = {name: named[name] for name in wanted.kept | wanted.replaced if name in named}
    graph = Graph(*results, *(named[name] for name in sorted(wanted.kept & named.keys())))
    cuts = {named[name].id for name in wanted.replaced & named.keys()}
    if not cuts:
        plan = WholePlan(m._plan(graph))
    elif m.scheduler is not None:
        plan = CalledPlan(m._plan(graph), m.scheduler, cuts)
    else:
        m._place(graph)
        plan = CutPlan(m.backend, graph, cuts)
    key_rows = weakref.WeakMethod(m._key_rows) if hasattr(m, "_key_rows") else None
    return HookedPlan(hooks, plan, inputs, named, wanted, specs, key_rows)


class Capturing(collections.abc.Mapping):
    """What `m.capturing` gives: {name: values so far}; `.tokens`: the ids they belong to, int32."""

    def __init__(self, network, specs, out):
        self._network, self._specs, self._out, self._keeping = network, specs, out, None

    def __enter__(self):
        if self._keeping is not None:
            raise ParamError("capturing: this block was used before; make another with m.capturing(...)")
        self._keeping = _keeping(self._network, self._specs, None, None, self._out)
        _begin(self._network, self._keeping)
        return self

    def __exit__(self, *exc):
        _end(self._network, self._keeping)
        self._network = None                    # captured values must not keep the weights alive
        for rows in self._keeping.rows.values():
            rows.close()

    @property
    def tokens(self):
        return np.array(self._keeping.tokens if self._keeping else [], np.int32)

    def __getitem__(self, name):
        if self._keeping is None:
            raise ParamError("capturing: nothing was kept yet; use it as `with m.capturing(...) as c:`")
        return self._keeping.rows[name].array()

    def __iter__(self):
        return iter(self._specs)

    def __len__(self):
        return len(self._specs)

    def __repr__(self):
        return f"<{len(self)} tensors of {len(self.tokens)} tokens: {', '.join(self)}>"


def _takes_one(change):
    """Can it be called with one argument?  True for what is no function, or does not say."""
    try:
        inspect.signature(change).bind(None)
    except TypeError:
        return not callable(change)
    except ValueError:                          # a function of C without a signature
        pass
    return True


def _is_numbers(x):
    try:
        return np.asarray(x).dtype.kind in "fiu"
    except ValueError:                          # a ragged list
        return False


def _path(out, name):
    """The .npy file of a tensor in the folder; it does not exist."""
    if not isinstance(out, str | os.PathLike):
        raise TypeMismatch(f"out must be the path of a folder, got {type(out).__name__}")
    folder = pathlib.Path(out)
    path = folder / f"{name}.npy"
    if folder.exists() and not folder.is_dir():
        raise ParamError(f"out: {folder} is a file; give a folder")
    if path.exists():
        raise ParamError(f"out: {path} exists; delete it, or give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return path
