"""Pictures of what is inside a network: attention maps, hidden states, the logit lens.

    m.attention("a text").plot(layer=3, head=0)
    m.hidden_states("a text").plot()
    m.logit_lens("a text")                      a table in notebooks, text in a terminal; .plot()

The numbers are in attributes; matplotlib is needed for `plot` alone.
"""
import dataclasses
import math

import numpy as np

import ggjit as gg
from ggjit.core.html_repr import Arrayed, PlotRepr, escape
from ggjit.graphs.graph import Graph
from ggjit.models.blocks.description import Scope
from ggjit.models.core.checks import integer
from ggjit.models.networks.inside.hooks import layer_of
from ggjit.models.networks.parts import decoder_graph
from ggjit.models.text.logprobs import token_text
from ggjit.ops.core.errors import GgjitError, IndexRangeError, NotSupported, ParamError, extra
from ggjit.ops.core.printable import printable
from ggjit.ops.core.whole_numbers import is_whole
from ggjit.tensors.context import Context

LENS_TOKENS = 64                # hidden states that pass the output matrix at a time
MOST_LABELS = 48                # tokens that are written beside a picture
MOST_TILE_LABELS = 80           # ... beside several pictures side by side
INCHES = 6                      # width of such a picture


def labels_of(network, ids):
    """The text of every token, or its id where the file has no vocabulary."""
    try:
        return [token_text(network.tokenizer, i) or f"<{i}>" for i in ids.tolist()]
    except GgjitError:
        return [str(i) for i in ids.tolist()]


def _visible(token):
    """A token for a picture: spaces and line ends are seen."""
    return _shown_word(token).replace("$", r"\$")


def _shown_word(token):
    return printable(token.replace("\n", "\u21b5").replace(" ", "\u00b7"))


def axes_of(axes, width, height):
    return axes if axes is not None else extra("matplotlib.pyplot", "plots").subplots(figsize=(width, height))[1]


def label_tiles(axis, tokens, n):
    """The tokens along an axis of n tiles, one behind the other with a gap of one."""
    step = len(tokens) + 1
    room = INCHES * 72 / (step * n)
    axis.set_ticks([k * step + i for k in range(n) for i in range(len(tokens))],
                   [_visible(t) for t in tokens] * n, fontsize=min(8, max(5, 0.6 * room)))
    axis.set_tick_params(length=0, pad=1)


def label_axis(axis, tokens):
    """Tokens along an axis, where there is room."""
    if len(tokens) <= MOST_LABELS:
        axis.set_ticks(range(len(tokens)), [_visible(t) for t in tokens], fontsize=7)


@dataclasses.dataclass(repr=False)
class AttentionMaps(PlotRepr):
    """Attention weights of every layer and head.

    weights   {layer: (n_head, n, n) float32}: of query i for key j; rows sum up to 1, or less where layers have sinks
    tokens    their text
    """
    weights: dict
    tokens: list

    def plot(self, layer=None, head=None, axes=None):
        """The map of one head; of all heads of a layer where none is given; without a layer, of all layers, each the
        mean of its heads.  Several lie side by side, and the brightest of each is 1.  Returns matplotlib's axes.
        Errors: ParamError, MissingExtra.
        """
        maps, title = self._chosen(layer, head)
        n, across = len(self.tokens), math.ceil(math.sqrt(len(maps)))
        down = -(-len(maps) // across)
        tiles = np.full((down * (n + 1) - 1, across * (n + 1) - 1), np.nan, np.float32)
        for k, a in enumerate(maps.values()):
            y, x = k // across * (n + 1), k % across * (n + 1)
            tiles[y:y + n, x:x + n] = a / (a.max() or 1)
        axes = axes_of(axes, INCHES, INCHES * down / across)
        axes.imshow(tiles, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(title)
        if len(maps) == 1:
            label_axis(axes.xaxis, self.tokens)
            label_axis(axes.yaxis, self.tokens)
            axes.tick_params("x", labelrotation=90)
            axes.set(xlabel="looked at", ylabel="by")
            return axes
        axes.set(xticks=[], yticks=[])
        if across * n <= MOST_TILE_LABELS:
            label_tiles(axes.xaxis, self.tokens, across)
            label_tiles(axes.yaxis, self.tokens, down)
            axes.tick_params("x", labelrotation=90)
        for k, name in enumerate(maps):
            axes.text(k % across * (n + 1) + n - 1, k // across * (n + 1), name, color="white", ha="right", va="top")
        return axes

    def __len__(self):
        return len(self.weights)

    def __iter__(self):
        return iter(self.weights.values())

    def __getitem__(self, layer):
        """(n_head, n_tokens, n_tokens) of a layer; a negative one counts from the last layer that has attention.
        maps[3, 0] is maps[3][0]."""
        if isinstance(layer, tuple) and layer:
            maps = self[layer[0]]
            try:
                return maps[layer[1:]]
            except IndexError:
                raise IndexRangeError(f"maps[{', '.join(map(repr, layer))}]: indices behind the layer are those of an "
                                      f"array of shape {maps.shape}") from None
        if is_whole(layer, -len(self.weights), -1):
            return [*self.weights.values()][layer]
        if not is_whole(layer) or layer not in self.weights:
            raise IndexRangeError(self._lacks(layer))
        return self.weights[layer]

    def _lacks(self, layer):
        return f"layer {layer!r} has no attention weights; those that do: {', '.join(map(str, self.weights))}"

    def _chosen(self, layer, head):
        """({label: map}, title)"""
        if layer is None:
            if head is not None:
                raise ParamError(f"plot: head {head!r} of which layer?  plot(layer={next(iter(self.weights))}, "
                                 f"head={head!r})")
            return {str(i): a.mean(0) for i, a in self.weights.items()}, "attention of each layer, mean of its heads"
        if not is_whole(layer) or layer not in self.weights:
            raise ParamError(f"plot: {self._lacks(layer)}")
        heads = self.weights[layer]
        if head is None:
            return {str(k): a for k, a in enumerate(heads)}, f"heads of layer {layer}"
        return {"": heads[integer("head", head, 0, len(heads) - 1)]}, f"layer {layer}, head {head}"

    def __repr__(self):
        return f"<AttentionMaps of {len(self.weights)} layers, {len(self.tokens)} tokens; .weights[layer], .plot()>"


@dataclasses.dataclass(repr=False)
class HiddenStates(Arrayed, PlotRepr):
    """The results of the layers, one after the other: `states[-1]`, `states.shape` and `np.asarray` are of `values`.

    values    (n_layer + 1, n_tokens, dim) float32: [0] are the embeddings, [i + 1] is what layer i gives on
    tokens    their text
    """
    values: np.ndarray
    tokens: list

    @property
    def norms(self):
        """(n_layer + 1, n_tokens): length of every state."""
        return np.linalg.norm(self.values, axis=2)

    @property
    def similarity(self):
        """(n_layer, n_tokens): cosine between a layer's input and its result."""
        unit = self.values / np.maximum(self.norms, 1e-30)[..., None]
        return (unit[1:] * unit[:-1]).sum(2)

    def plot(self, axes=None):
        """How far each layer turns each token: 1 - cosine.  Returns matplotlib's axes.  Errors: MissingExtra."""
        turned = 1 - self.similarity
        axes = axes_of(axes, max(5, min(0.3 * len(self.tokens), 14)), max(2.5, 0.25 * len(turned)))
        image = axes.imshow(turned, aspect="auto", cmap="magma", origin="lower", interpolation="nearest")
        axes.figure.colorbar(image, ax=axes, label="1 - cosine")
        label_axis(axes.xaxis, self.tokens)
        axes.tick_params("x", labelrotation=90)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set(ylabel="layer", title="how far each layer turns its input")
        return axes

    def __repr__(self):
        return f"<HiddenStates {self.values.shape} of {len(self.tokens)} tokens; .values, .norms, .plot()>"


@dataclasses.dataclass(repr=False)
class LogitLens(PlotRepr):
    """The likeliest next tokens if the model ended after each layer.

    ids, probabilities   (n_layer + 1, n_tokens, top): the likeliest next tokens, the first the most; [0] of the
                         embeddings, [-1] of the whole model
    words                the text of `ids`, as nested lists
    tokens               the text that was read
    """
    ids: np.ndarray
    probabilities: np.ndarray
    words: list
    tokens: list

    def plot(self, axes=None):
        """The likeliest next token after every layer and token, coloured by its probability.  Returns matplotlib's
        axes.  Errors: MissingExtra."""
        first = self.probabilities[..., 0]
        n_rows, n = first.shape
        longest = max((len(_shown_word(row[j][0])) for row in self.words for j in range(n)), default=0)
        axes = axes_of(axes, max(5, min(max(0.75, 0.085 * longest) * n, 24)), max(2.5, 0.3 * n_rows))
        image = axes.imshow(first, aspect="auto", cmap="Blues", vmin=0, vmax=1, origin="lower")
        axes.figure.colorbar(image, ax=axes, label="probability")
        for i in range(n_rows if n <= MOST_LABELS else 0):
            for j in range(n):
                axes.text(j, i, _visible(self.words[i][j][0]), ha="center", va="center", fontsize=7,
                          color="white" if first[i, j] > 0.6 else "black", clip_on=True)
        label_axis(axes.xaxis, self.tokens)
        axes.set_yticks(range(n_rows), ["embd", *map(str, range(n_rows - 1))])
        axes.set(ylabel="after layer", title="the likeliest next token")
        return axes

    def _repr_html_(self):
        first = self.probabilities[..., 0]

        def cell(i, j):
            p = float(first[i, j])
            tip = ", ".join(f"{w} {q:.2f}" for w, q in zip(self.words[i][j], self.probabilities[i, j], strict=True))
            return (f"<td title='{escape(tip)}' style='background:rgba(70,130,180,{p:.2f})'>"
                    f"{escape(_shown_word(self.words[i][j][0]))}</td>")
        head = "".join(f"<th>{escape(_shown_word(t))}</th>" for t in self.tokens)
        rows = "".join(f"<tr><th>{'embd' if i == 0 else i - 1}</th>{''.join(cell(i, j) for j in range(len(first[0])))}"
                       f"</tr>" for i in reversed(range(len(first))))
        return f"<table>{rows}<tr><th></th>{head}</tr></table>"

    def __repr__(self):
        """The likeliest next token after the last one, by layer."""
        lines = [f"after {self.tokens[-1]!r}:"]
        for i, (words, p) in enumerate(zip(self.words, self.probabilities, strict=True)):
            says = ", ".join(f"{w!r} {q:.2f}" for w, q in zip(words[-1], p[-1], strict=True))
            lines.append(f"{'embd' if i == 0 else i - 1:>5}  {says}")
        return "\n".join(lines)


# ---------------------------------------------------------------- from a network
def attention_maps(network, ids):
    """AttentionMaps of a text.  Errors: ParamError, for a network without attention."""
    found = network.capture("blk.*.kq_soft_max", ids)
    return AttentionMaps({layer_of(name): a.reshape(-1, *a.shape[-2:]) for name, a in found.items()},
                         labels_of(network, ids))


def hidden_states(network, ids):
    """HiddenStates of a text."""
    found = network.capture(["embd", "blk.*.l_out"], ids)
    layers = [found[f"blk.{i}.l_out"] for i in range(network.n_layer)]
    return HiddenStates(np.stack([found["embd"], *layers]), labels_of(network, ids))


def logit_lens(network, ids, top):
    """The LogitLens of a text.  Errors: NotSupported for a network without logits."""
    if not network.CAUSAL:
        raise NotSupported(f"{network.file.arch} models have no logits: what a layer would say is not defined; "
                           f"hidden_states shows the layers")
    with network._lock:
        states = hidden_states(network, ids)
        n_layers, n = states.values.shape[:2]
        flat = states.values.reshape(n_layers * n, -1)
        head = Head(network)
        found = [_likeliest(head(flat[k:k + LENS_TOKENS]), top) for k in range(0, len(flat), LENS_TOKENS)]
    best, p = (np.concatenate(part).reshape(n_layers, n, top) for part in zip(*found, strict=True))
    text = dict(zip(each := np.unique(best), labels_of(network, each), strict=True))
    words = [[[text[i] for i in at] for at in row] for row in best.tolist()]
    return LogitLens(best, p, words, states.tokens)


def _likeliest(logits, top):
    """(ids, probabilities) of the `top` likeliest tokens of each row."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    best = np.argsort(-p, axis=1, kind="stable")[:, :top]
    return best.astype(np.int32), np.take_along_axis(p, best, 1).astype(np.float32)


class Head:
    """What the last norm and the output matrix of a decoder make of up to LENS_TOKENS hidden states: float64 logits."""

    def __init__(self, network):
        about, self._ctx = network.description, Context()
        self._states = np.zeros((LENS_TOKENS, network.n_embd), np.float32)
        with self._ctx:
            g = Scope({}, LENS_TOKENS, 0, about.eps, network.flash, None)
            x = g.norm(gg.from_numpy(self._ctx, self._states, "states"), about.norm, network.out_norm)
            self._logits = decoder_graph.logits(network, x)
        self._plan = network._plan(Graph(self._logits))

    def __call__(self, states):
        self._states[:len(states)] = states
        self._plan.compute()
        return self._plan.view(self._logits)[:len(states)].astype(np.float64)
