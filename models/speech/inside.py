"""Pictures of a speech model: its input, and the decoder's attention to the sound.

    m.spectrogram("talk.wav").plot()
    m.listening("talk.wav").plot()              the attention behind every token, and the way through it
    m.listening("talk.wav").plot_word(3)        one word, head by head

The numbers are in attributes; matplotlib is needed for `plot` alone.  Pictures have a white ground of their own:
they can be read on light and dark pages.
"""
import dataclasses

import numpy as np

from ggjit.core.html_repr import PlotRepr
from ggjit.models.speech.words import FRAME, Alignment
from ggjit.ops.core.errors import ParamError, extra

INK, LINE = "#222222", "#e8452c"


def _figure(width, height, axes):
    """Matplotlib axes with a white background and dark letters, whatever style the user has set."""
    plt = extra("matplotlib.pyplot", "plots")
    axes = axes if axes is not None else plt.subplots(figsize=(width, height))[1]
    axes.figure.set_facecolor("white")
    axes.set_facecolor("white")
    axes.tick_params(colors=INK)
    for part in (axes.xaxis.label, axes.yaxis.label, axes.title):
        part.set_color(INK)
    for spine in axes.spines.values():
        spine.set_color(INK)
    return axes


@dataclasses.dataclass(repr=False)
class Spectrogram(PlotRepr):
    """What a model hears: values float32 (n_mels, frames of 10 ms); words: [Word] that are written below, or none."""
    values: np.ndarray
    words: list

    def plot(self, axes=None):
        """Bands over time; returns matplotlib's axes.  Errors: MissingExtra."""
        n_mels, n = self.values.shape
        axes = _figure(9, 3, axes)
        axes.imshow(self.values, origin="lower", aspect="auto", cmap="magma", extent=(0, n / 100, 0, n_mels),
                    interpolation="nearest")
        axes.set(xlabel="seconds", ylabel="mel band", title="what the model hears")
        for w in self.words:
            axes.axvline(w.start, color="white", linewidth=0.5)
            axes.text(w.start, n_mels, w.text.replace("$", r"\$"), rotation=60, fontsize=7, color=INK, ha="left",
                      va="bottom")
        if self.words:
            axes.set_title("")
        return axes


@dataclasses.dataclass(repr=False)
class Listening(PlotRepr):
    """Where the model listens while it writes a text.

    alignment   an Alignment: weights (tokens, frames of 20 ms) of which the way is made, the way, the texts of tokens
    heads       {(layer, head): float32 (tokens, frames)}, the attention of each alignment head: rows sum up to 1
    words       [Word], as `transcribe` gives them
    """
    alignment: Alignment
    heads: dict
    words: list

    def plot(self, axes=None):
        """Tokens over time, and the cheapest way through them.  Errors: MissingExtra."""
        a = self.alignment
        rows, frames = a.weights.shape
        axes = _figure(9, max(3, 0.2 * rows), axes)
        axes.imshow(a.weights, aspect="auto", cmap="Greys", extent=(0, frames * FRAME, rows - 0.5, -0.5), vmin=0,
                    interpolation="nearest")
        axes.plot((a.path[:, 1] + 0.5) * FRAME, a.path[:, 0], color=LINE, linewidth=1.5)
        labels = [*(p.replace("$", r"\$") for p in a.pieces[1:]), "(end)"]
        axes.set_yticks(range(rows), labels[:rows], fontsize=7)
        axes.set(xlabel="seconds", title="which sound each token was written from")
        return axes

    def plot_word(self, i, axes=None):
        """The attention of each alignment head, over time, while word i was written.  Errors: ParamError, MissingExtra.
        """
        rows = self._rows(i)
        axes = _figure(9, 0.3 * len(self.heads) + 1, axes)
        image = np.stack([w[rows].mean(0) for w in self.heads.values()])
        axes.imshow(image / np.maximum(image.max(1, keepdims=True), 1e-9), aspect="auto", cmap="Greys", vmin=0, vmax=1,
                    extent=(0, image.shape[1] * FRAME, len(image) - 0.5, -0.5), interpolation="nearest")
        w = self.words[i]
        for t in (w.start, w.end):
            axes.axvline(t, color=LINE, linewidth=1)
        axes.set_yticks(range(len(image)), [f"layer {layer} head {head}" for layer, head in self.heads], fontsize=7)
        axes.set(xlabel="seconds", title=f"where {w.text!r} was heard".replace("$", r"\$"))
        return axes

    def _rows(self, i):
        """Rows of the weights that wrote word i."""
        if not 0 <= i < len(self.words):
            raise ParamError(f"word {i} of {len(self.words)}")
        ends = np.cumsum([len(w.word) for w in self.words])
        at, pieces = np.cumsum([0, *(len(p) for p in self.alignment.pieces[1:])]), len(self.alignment.pieces) - 1
        first = ends[i] - len(self.words[i].word)
        return [k for k in range(pieces) if at[k + 1] > first and at[k] < ends[i]] or [0]
