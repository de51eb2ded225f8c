"""Changing a loaded decoder: its adapters, and control vectors.  Functions of `self` are methods of Decoder.

    m.set_lora([("style.gguf", 0.5)])                   other adapters, or other scales of the same
    v = make_control_vector(m, ["I am happy."], ["I am sad."]);  m.set_control_vectors([(v, 2.0)])
"""
import copy
import math
import os

import numpy as np

from ggjit.models.core.checks import integer, one_of
from ggjit.models.files.adapter import Adapter, adapters_of
from ggjit.models.files.control_vector import ControlVector, combined
from ggjit.ops.core.errors import NotSupported, ParamError, StaleHandle, TypeMismatch
from ggjit.ops.core.host_memory import oom_guard
from ggjit.tensors.arrays import from_numpy
from ggjit.tensors.context import Context

METHODS = "pca", "mean"


def set_lora(self, lora=()):
    """Compute with these adapters from now on, in place of the others: [(path, scale)], as load_model's `lora`; none:
    the model as it was trained.  The text so far is forgotten; files that stay are not read again.

        m.set_lora([("style.gguf", 0.5)])

    Errors, with the adapters as they were: those of load_model for its `lora`, StaleHandle for a model that was freed.
    """
    with self._lock:
        _check(self)
        before, given = self.weights.adapters, _with_open(lora, self.weights.adapters)
        found = adapters_of(given, self.file, self.backend.device)
        try:
            for adapter in found:
                if not _has(before, adapter):
                    self._move_adapter(adapter)
            _use(self, found)
        except BaseException:
            if self.weights.adapters is not before:
                _use(self, before)
            _free([a for a in found if not _has(given, a)], before)
            raise
        _free(before, found)


def _check(m):
    m._hooks.refuse_nesting()
    if m._freed:
        raise StaleHandle(f"{m!r} was freed; load the model again")


def _with_open(lora, adapters):
    """`lora` with the adapters that are open already, under their new scales, in place of their paths."""
    if isinstance(lora, str | os.PathLike):
        lora = [lora]
    if not isinstance(lora, list | tuple):
        return lora                         # adapters_of says what is wrong
    there, out = {os.fspath(a.path): a for a in adapters if a.is_file}, []
    for item in lora:
        path, scale = item if isinstance(item, list | tuple) and len(item) == 2 else (item, 1.0)
        same = there.get(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
        if same is None or isinstance(scale, bool) or not isinstance(scale, int | float | np.number) \
                or not math.isfinite(scale):
            out.append(item)                # read_adapter says what is wrong
            continue
        item = copy.copy(same)
        item.scale, item.used = float(scale), set()
        out.append(item)
    return out


def _use(m, adapters):
    """Weights and plans of these adapters."""
    m.weights.adapters = adapters
    m._load_weights()
    for adapter in adapters:
        adapter.refuse_unused()
    m._begin_again()


def begin_again(self):
    """Nothing that was planned or read is what the network computes now."""
    self._steps.clear()
    if self.predictor is not None:
        self.predictor.begin_again()
    self.reset()


def _free(adapters, kept):
    for adapter in adapters:
        if not _has(kept, adapter):
            adapter.free()


def _has(adapters, adapter):
    """Is it one of them, or one over the same open file?"""
    return any(adapter is a or adapter.is_file and isinstance(a, Adapter) and adapter._weights is a._weights
               for a in adapters)


# ---------------------------------------------------------------- control vectors
def set_control_vectors(self, vectors=(), first=1, last=None):
    """Add these to the outputs of the layers `first` to `last` from now on, in place of the others: ControlVectors or
    paths, each alone or as (vector, strength); none: the model as it was trained.  The text so far is forgotten.

        m.set_control_vectors([("happy.gguf", 1.5)])

    Errors, with the vectors as they were: BadFile, ModelError (of another size), ParamError, TypeMismatch.
    """
    with self._lock:
        _check(self)
        if isinstance(vectors, str | os.PathLike | ControlVector) or not hasattr(vectors, "__iter__"):
            raise TypeMismatch(f"control vectors are a list of (vector, strength), got {type(vectors).__name__}")
        most = max(self.n_layer - 1, 1)
        first = integer("first", first, 0, most)
        last = integer("last", most if last is None else last, first, most, f" (first is {first})" * (first > 0))
        total = combined(vectors, self.n_embd, self.n_layer, self.file.path)
        _control(self, {i: d for i, d in total.items() if first <= i <= last})


def _control(m, directions):
    """Add these, {layer: float32 (n_embd,)}, from now on.  Errors, with the vectors as they were: OutOfMemory."""
    ctx, before = Context(), m._control_ctx
    with oom_guard("control vectors"):
        m.control = {i: from_numpy(ctx, d, f"control.{i}") for i, d in directions.items()}
    m._control_ctx = ctx
    m._begin_again()
    if before is not None:
        before.free()


def _take_control(self, other):
    """The control vectors of a model of the same layers."""
    if other.control:
        _control(self, {i: leaf.numpy() for i, leaf in other.control.items()})


def make_control_vector(m, positive, negative, method="pca"):
    """The ControlVector that leads from the texts `negative` to `positive`, pair by pair.

    Of each layer the outputs at the last token of both texts are taken; their differences' first principal component
    (pca), or their mean, of length 1, towards `positive`.  The model's control vectors are left out.

        v = make_control_vector(m, ["You are happy."], ["You are sad."])
        v.save("happy.gguf")

    Errors: ParamError for lists that are empty or of two lengths, TypeMismatch, NotSupported for a model that is no
    decoder.
    """
    if not hasattr(m, "capture"):
        raise TypeMismatch(f"make_control_vector takes a loaded model, got {type(m).__name__}; load_model(path) gives "
                           f"one")
    if not hasattr(m, "control"):
        raise NotSupported(f"{m.file.arch} models take no control vectors; load a llama model")
    texts = [positive, negative]
    if any(isinstance(t, str) or not isinstance(t, list | tuple) for t in texts):
        raise TypeMismatch("make_control_vector takes two lists of texts")
    if not positive or len(positive) != len(negative):
        raise ParamError(f"make_control_vector: {len(positive)} texts of one side and {len(negative)} of the other; "
                         f"pairs of them are expected")
    method = one_of("method", method, METHODS)
    with m._lock:
        _check(m)
        kept, m.control = m.control, {}
        m._steps.clear()
        try:
            apart = [_last_outputs(m, a) - _last_outputs(m, b) for a, b in zip(*texts, strict=True)]
        finally:
            m.control = kept
            m._begin_again()
    apart = np.stack(apart, axis=1)                                     # (layers, pairs, n_embd)
    return ControlVector({i: _direction(apart[i], method) for i in range(1, m.n_layer)}, m.file.arch)


def _last_outputs(m, text):
    """float64 (n_layer, n_embd): what each layer gives on at the last token."""
    found = m.capture([f"blk.{i}.l_out" for i in range(m.n_layer)], text)
    return np.stack([found[f"blk.{i}.l_out"].reshape(-1, m.n_embd)[-1] for i in range(m.n_layer)]).astype(np.float64)


def _direction(apart, method):
    """float32 (n_embd,) of the differences (n_pairs, n_embd) of one layer."""
    mean = apart.mean(0)
    d = mean
    if method == "pca" and len(apart) > 1:
        _, _, rows = np.linalg.svd(apart, full_matrices=False)
        d = rows[0] if rows[0] @ mean >= 0 else -rows[0]
    size = np.linalg.norm(d)
    return (d / size if size else d).astype(np.float32)

