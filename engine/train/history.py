"""What a training was like: numbers by step and by epoch, and their picture."""
import dataclasses

from ggjit.core.html_repr import PlotRepr
from ggjit.ops.core.errors import extra


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
