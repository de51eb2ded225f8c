"""Changing a loaded decoder: its adapters, and control vectors.  Functions of `self` are methods of Decoder.

    m.set_lora([("style.gguf", 0.5)])                   other adapters, or other scales of the same
    v = make_control_vector(m, ["I am happy."], ["I am sad."]);  m.set_control_vectors([(v, 2.0)])
"""
import copy
import os

import numpy as np

from ggjit.models.core.checks import integer, one_of
from ggjit.models.files.adapter import adapters_of
from ggjit.models.files.control_vector import ControlVector, combined
from ggjit.ops.core.errors import ParamError, StaleHandle, TypeMismatch
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
        before = self.weights.adapters
        found = adapters_of(_with_open(lora, before), self.file, self.backend.device)
        try:
            _use(self, found)
        except BaseException:
            _use(self, before)
            _free(found, before)
            raise
        _free(before, found)
        for gpu in self.offload.gpus:
            for adapter in found:
                if not any(adapter._weights is a._weights for a in before):
                    adapter.move(lambda name, gpu=gpu: self.offload.backend_of(name) is gpu, gpu.default_buffer_type)


def _check(m):
    m._hooks.refuse_nesting()
    if m._freed:
        raise StaleHandle(f"{m!r} was freed; load the model again")


def _with_open(lora, adapters):
    """`lora` with the adapters that are open already, under their new scales, in place of their paths."""
    if not isinstance(lora, list | tuple):
        return lora                         # adapters_of says what is wrong
    there, out = {os.fspath(a.path): a for a in adapters if a.is_file}, []
    for item in lora:
        path, scale = item if isinstance(item, list | tuple) and len(item) == 2 else (item, 1.0)
        same = there.get(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
        if same is None or isinstance(scale, bool) or not isinstance(scale, int | float | np.number):
            out.append(item)
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
    _begin_again(m)


def _begin_again(m):
    """Nothing that was planned or read is what the network computes now."""
    m._steps.clear()
    if m.predictor is not None:
        m.predictor.free()
        m.predictor = None
    m.reset()


def _free(adapters, kept):
    for adapter in adapters:
        if not any(adapter is a or (adapter.is_file and adapter._weights is a._weights) for a in kept):
            adapter.free()


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
        last = integer("last", self.n_layer - 1 if last is None else last, 0, self.n_layer - 1)
        first = integer("first", first, 0, self.n_layer - 1)
        total = combined(vectors, self.n_embd, self.n_layer, self.file.path)
        if self._control_ctx is not None:
            self._steps.clear()
            self._control_ctx.free()
        self._control_ctx = Context()
        self.control = {i: from_numpy(self._control_ctx, d, f"control.{i}") for i, d in total.items()
                        if first <= i <= last}
        _begin_again(self)


def make_control_vector(m, positive, negative, method="pca"):
    """The ControlVector that leads from the texts `negative` to `positive`, pair by pair.

    Of each layer the outputs at the last token of both texts are taken; their differences' first principal component
    (pca), or their mean, of length 1, towards `positive`.  The model's control vectors are left out.

        v = make_control_vector(m, ["You are happy."], ["You are sad."])
        v.save("happy.gguf")

    Errors: ParamError for lists that are empty or of two lengths, TypeMismatch.
    """
    texts = [positive, negative]
    if any(isinstance(t, str) or not isinstance(t, list | tuple) for t in texts):
        raise TypeMismatch("make_control_vector takes two lists of texts")
    if not positive or len(positive) != len(negative):
        raise ParamError(f"make_control_vector: {len(positive)} texts of one side and {len(negative)} of the other; "
                         f"pairs of them are expected")
    method = one_of("method", method, METHODS)
    with m._lock:
        kept, m.control = m.control, {}
        m._steps.clear()
        try:
            apart = [_last_outputs(m, a) - _last_outputs(m, b) for a, b in zip(*texts, strict=True)]
        finally:
            m.control = kept
            _begin_again(m)
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

