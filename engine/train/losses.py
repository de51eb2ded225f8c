"""Losses: as nodes of a graph, and the same number on the host for rows that are only evaluated.

    cross_entropy   mean over rows of -log softmax(outputs)[label]; labels: class numbers, or shares of the classes
    mse             mean of (outputs - labels)^2                    labels: numbers of the shape of outputs
    mean, sum       of outputs themselves                           no labels
"""
import math

import numpy as np

from ggjit.core.arguments import expect
from ggjit.ops.copying.view import view_1d, view_2d, view_3d, view_4d
from ggjit.ops.core.errors import IndexRangeError, ParamError, ShapeError, TypeMismatch
from ggjit.ops.core.shape import describe
from ggjit.ops.core.types import F32
from ggjit.ops.core.whole_numbers import whole
from ggjit.ops.elementwise.binary import add, sub
from ggjit.ops.elementwise.constants import scale
from ggjit.ops.elementwise.unary import SIMPLE
from ggjit.ops.reductions.reduce import sum as sum_of
from ggjit.ops.training.cross_entropy import cross_entropy_loss
from ggjit.tensors.tensor import Tensor

VIEWS = (view_1d, view_2d, view_3d, view_4d)            # VIEWS[n - 1]: the view builder for n axes
NAMES = ("cross_entropy", "mse", "mean", "sum")


def build(loss, outputs, labels):
    """The scalar of loss `loss`: one of NAMES, or a function (outputs, labels) -> scalar tensor."""
    if callable(loss):
        found = loss(outputs, labels)
        if not isinstance(found, Tensor):
            raise TypeMismatch(f"a loss function returns a tensor of one element, got {type(found).__name__}")
        return found
    if loss == "cross_entropy":
        return cross_entropy_loss(outputs, labels)
    if loss == "sum":
        return sum_of(outputs)
    x = SIMPLE["sqr"][0](sub(outputs, labels)) if loss == "mse" else outputs
    return scale(sum_of(x), 1 / math.prod(outputs.ne))


def mean_in_chunks(loss_of, *rows, chunk):
    """The mean over rows of a loss, computed for `chunk` rows at a time: F32 [1].

        loss = gg.train.mean_in_chunks(lambda x, y: gg.cross_entropy_loss(gg.mul_mat(w, x), y), x, labels, chunk=64)

    loss_of: a function of views of each of `rows` that returns the mean over their rows.  rows: tensors whose last axis
    (NumPy's first) is the rows, as many in each.  One chunk's results are the largest nodes, not those of all rows, so
    gg.rematerialize reaches fewer bytes.  Sums over rows are formed chunk by chunk: up to rounding they are the same.
    Errors: ParamError, ShapeError, TypeMismatch; those of `loss_of`.
    """
    chunk, total = whole(chunk, "mean_in_chunks: chunk"), None
    if chunk < 1 or not rows:
        raise ParamError(f"mean_in_chunks: chunk is a number of rows, 1 or more, got {chunk}" if rows else
                         "mean_in_chunks: no rows are given")
    n = {expect(t, Tensor, "mean_in_chunks: rows").shape[:1] for t in rows}
    if len(n) > 1 or n == {()}:
        raise ShapeError(f"mean_in_chunks: tensors differ in the number of rows: {', '.join(map(describe, rows))}")
    n = n.pop()[0]
    for first in range(0, n, chunk):
        size = min(chunk, n - first)
        part = scale(loss_of(*(_rows_of(t, first, size) for t in rows)), size / n)
        total = part if total is None else add(total, part)
    return total


def _rows_of(t, first, size):
    """A view of `size` rows of t."""
    ne, last = t.ne[:t.ndim - 1], t.ndim - 1
    return VIEWS[last](t, *ne, size, *t.nb[1:t.ndim], first * t.nb[last])


def check(loss):
    if not callable(loss) and loss not in NAMES:
        raise ParamError(f"loss {loss!r}: expected one of {', '.join(NAMES)}, or a function of outputs and labels")


def needs_labels(loss):
    return loss not in ("mean", "sum")


def needs_result_type(outputs):
    if outputs.type is not F32:
        raise ParamError(f"fit: the outputs must be F32, got {describe(outputs)}; gg.cast them")


def targets(loss, labels, shape):
    """The float32 array of `shape`, rows of outputs, that the label tensor holds for a batch of labels.

    Class numbers become ones in rows of zeros.  Errors: IndexRangeError for a class that is none; ShapeError.
    """
    if loss == "cross_entropy" and labels.dtype.kind in "iub" and labels.shape != shape:
        n_classes = shape[-1]
        ids = labels.reshape(-1)
        if ids.size != math.prod(shape[:-1]):
            raise ShapeError(f"labels of shape {labels.shape} do not name a class for each row of outputs {shape}")
        if ids.size and not 0 <= ids.min() <= ids.max() < n_classes:
            wrong = ids[(ids < 0) | (ids >= n_classes)][0]
            raise IndexRangeError(f"label {wrong} is not a class: outputs {shape} have classes 0 to {n_classes - 1}; "
                                  f"leave such rows out of the dataset")
        shares = np.zeros((ids.size, n_classes), np.float32)
        shares[np.arange(ids.size), ids.astype(int)] = 1
        return shares.reshape(shape)
    if labels.size != math.prod(shape) or _last(labels.shape) != _last(shape):
        remedy = "; class numbers are integers" if loss == "cross_entropy" and labels.dtype.kind == "f" else ""
        raise ShapeError(f"labels of shape {labels.shape} do not fit outputs {shape}{remedy}")
    shares = np.ascontiguousarray(labels, np.float32).reshape(shape)
    if loss == "cross_entropy" and not (np.abs(shares.sum(-1) - 1) < 1e-3).all():
        # ggml's gradient, softmax - label, is that of the loss for such rows only
        raise ParamError("labels of cross_entropy are shares of the classes: each row sums to 1; leave other rows "
                         "out of the dataset")
    return shares


def _last(shape):
    """The last axis that is longer than 1."""
    return next((n for n in reversed(shape) if n != 1), 1)


def on_host(loss, outputs, target):
    """The same loss of arrays, float64."""
    x = outputs.astype(np.float64)
    if loss == "cross_entropy":
        x = x - x.max(-1, keepdims=True)
        return float(-(target * (x - np.log(np.exp(x).sum(-1, keepdims=True)))).sum() / (x.size // x.shape[-1]))
    if loss == "mse":
        return float(np.square(x - target).mean())
    return float(x.mean() if loss == "mean" else x.sum())


def classes_of(outputs):
    """The number of the largest of each row, the last one among equals, as gg.argmax has it."""
    return (outputs.shape[-1] - 1 - outputs[..., ::-1].argmax(-1)).reshape(-1)


def n_correct(classes, target):
    """(rows whose class is that of the largest target, rows)."""
    hits = classes == classes_of(target)
    return int(hits.sum()), hits.size
