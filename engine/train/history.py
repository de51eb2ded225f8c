"""The history of a training: numbers by step and by epoch, and their plot."""
import base64
import dataclasses
import math

import numpy as np

from ggjit.core.html_repr import PlotRepr, escape
from ggjit.ops.core.errors import TypeMismatch, extra


@dataclasses.dataclass
class History(PlotRepr):
    """The record of a training; in a notebook it shows its picture.

        h.loss[-1], h.val_accuracy[-1]; h.plot()

    steps   the loss of every step
    loss    mean loss of every epoch; accuracy: share of right classes (cross entropy only), measured while training
    val_loss, val_accuracy   of the held-out rows after every epoch
    seconds of every epoch;  stopped: why it ended before the last epoch, or ""
    """
    steps: list = dataclasses.field(default_factory=list)
    loss: list = dataclasses.field(default_factory=list)
    accuracy: list = dataclasses.field(default_factory=list)
    val_loss: list = dataclasses.field(default_factory=list)
    val_accuracy: list = dataclasses.field(default_factory=list)
    seconds: list = dataclasses.field(default_factory=list)
    stopped: str = ""
    sample: str = ""                        # a prompt, and what the model wrote after it before and after (finetune)
    before: str = ""
    after: str = ""

    def _repr_html_(self):
        """The texts before and after, where there are, and the picture of the loss."""
        if not self.sample:
            return None
        return "".join(f"<div style='white-space:pre-wrap;margin:4px 0'><span style='opacity:.6'>{what}: "
                       f"{escape(self.sample)}</span>{escape(text)}</div>"
                       for what, text in (("before", self.before), ("after", self.after))) + self._picture()

    def _picture(self):
        png = self._repr_png_()
        return "" if png is None else (f"<img alt='loss by step' style='max-width:100%' "
                                       f"src='data:image/png;base64,{base64.b64encode(png).decode()}'>")

    def plot(self, axes=None):
        """Loss by step, and by epoch of the held-out rows; returns matplotlib's axes.  Errors: MissingExtra."""
        if axes is None:
            axes = extra("matplotlib.pyplot", "plots").subplots(figsize=(6, 3.2))[1]
        per_epoch = len(self.steps) / max(1, len(self.loss))
        ends = [per_epoch * (i + 1) for i in range(len(self.loss))]
        axes.plot(range(1, len(self.steps) + 1), self.steps, color="0.7", linewidth=0.8, label="step")
        axes.plot(ends, self.loss, marker="o", label="epoch")
        if self.val_loss:
            axes.plot(ends[:len(self.val_loss)], self.val_loss, marker="s", label="held out")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.legend()
        return axes


class Evaluation(tuple):
    """What `evaluate` found: (loss, accuracy), and what ggml_opt_result says beside them.

        loss, accuracy = found = gg.train.evaluate(x, logits, (X, Y))
        found.loss_uncertainty; found.predictions; found + gg.train.evaluate(x, logits, more)

    n_rows            rows seen
    predictions       the class of each target in order, int64; None for losses without classes, as accuracy
    batch_losses      the loss of every batch
    loss_uncertainty  of the mean over n batches: sqrt((mean of squares - square of mean) / (n - 1)); of loss "sum" that
                      of the sum; NaN below two batches
    accuracy_uncertainty      sqrt(accuracy (1 - accuracy) / (n - 1)) of n targets; NaN below two
    A sum of two is that of the rows of both.  Source: ggml_opt_result_loss, _accuracy, _pred, _ndata.
    """

    def __new__(cls, total, n_rows, batch_losses, right=None, predictions=None, summed=False):
        loss = total if summed else total / n_rows
        found = super().__new__(cls, (loss, None if predictions is None else right / len(predictions)))
        found._parts, found._seen = (total, right, summed), (n_rows, tuple(batch_losses), predictions)
        return found

    loss = property(lambda self: self[0])
    accuracy = property(lambda self: self[1])
    n_rows = property(lambda self: self._seen[0])
    batch_losses = property(lambda self: self._seen[1])
    predictions = property(lambda self: self._seen[2])

    @property
    def loss_uncertainty(self):
        a, summed = np.array(self.batch_losses, np.float64), self._parts[2]
        if len(a) < 2:
            return math.nan
        variance = max(0.0, float((a * a).mean() - a.mean() ** 2))
        return math.sqrt(variance * len(a) / (len(a) - 1)) if summed else math.sqrt(variance / (len(a) - 1))

    @property
    def accuracy_uncertainty(self):
        n = 0 if self.predictions is None else len(self.predictions)
        return math.sqrt(self.accuracy * (1 - self.accuracy) / (n - 1)) if n > 1 else math.nan

    def __add__(self, other):
        if not isinstance(other, Evaluation) or other._parts[2] != self._parts[2] or \
                (other.predictions is None) != (self.predictions is None):
            raise TypeMismatch("an Evaluation is added to one of the same kind of loss")
        (a, right, summed), (b, more, _) = self._parts, other._parts
        classes = self.predictions is not None
        return Evaluation(a + b, self.n_rows + other.n_rows, self.batch_losses + other.batch_losses,
                          right + more if classes else None,
                          np.concatenate([self.predictions, other.predictions]) if classes else None, summed)
