"""Attribution: which tokens of a text caused the model's prediction, by gradients with respect to its inputs.

    score of token i  =  sum over dim of  embedding[i] * d log p(target) / d embedding[i]         (gradient x input)

Weights stay as they are, quantised too: gradients pass through them (parts/training.py).
"""
import dataclasses

import numpy as np

import ggjit as gg
from ggjit.core.html_repr import Arrayed, PlotRepr, escape
from ggjit.models.core.checks import integer
from ggjit.models.networks.inside.pictures import axes_of, label_axis, labels_of
from ggjit.models.networks.parts import decoder_graph
from ggjit.models.networks.parts.training import TokenLoss
from ggjit.ops.core.errors import NotSupported, ParamError


@dataclasses.dataclass(repr=False)
class Attribution(Arrayed, PlotRepr):
    """What `m.attribution(text)` gives; `a[0]`, `a.shape` and `np.asarray(a)` are of `scores`.

    tokens          the text that was read, token by token
    scores          (n_tokens,) gradient x input: above 0, the token made the target likelier
    gradients       (n_tokens, dim) of log p(target) by the embeddings; saliency: their norms
    target, id      the token whose log-probability it is; logprob: that, in nats
    """
    tokens: list
    scores: np.ndarray
    gradients: np.ndarray
    target: str
    id: int
    logprob: float
    ARRAY = "scores"

    @property
    def saliency(self):
        return np.linalg.norm(self.gradients, axis=1)

    def plot(self, axes=None):
        """Bars of the scores.  Returns matplotlib's axes.  Errors: MissingExtra."""
        axes = axes_of(axes, max(5, min(0.5 * len(self.tokens), 24)), 2.6)
        axes.bar(range(len(self.tokens)), self.scores, color=np.where(self.scores >= 0, "tab:blue", "tab:orange"))
        label_axis(axes.xaxis, self.tokens)
        axes.set(ylabel="nats", title=f"what made {self.target!r} likely (log p {self.logprob:.2f})")
        return axes

    def _repr_html_(self):
        most = float(np.abs(self.scores).max()) or 1.0

        def span(token, score):
            rgb = "70,130,220" if score >= 0 else "240,130,20"
            return (f"<span title='{score:+.3f}' style='background:rgba({rgb},{0.6 * abs(score) / most:.2f});"
                    f"border-radius:3px'>{escape(token)}</span>")
        text = "".join(map(span, self.tokens, self.scores.tolist()))
        return (f"<div style='white-space:pre-wrap;line-height:1.7'>{text} <b>{escape(self.target)}</b></div>"
                f"<div style='opacity:.7;font-size:85%'>blue made <b>{escape(self.target)}</b> likelier, orange less; "
                f"log p {self.logprob:.3f}</div>")

    def __repr__(self):
        best = np.argsort(-np.abs(self.scores))[:5]
        return (f"<Attribution of {self.target!r} (log p {self.logprob:.3f}): "
                f"{', '.join(f'{self.tokens[i]!r} {self.scores[i]:+.3f}' for i in best)}>")


class EmbeddingLoss(TokenLoss):
    """-log p(target) after the last token, as a function of `.embeddings`, the leaf (n_tokens, dim) that stands for the
    embedded tokens."""

    def _embedded(self, network, g):
        self.embeddings = gg.set_param(gg.from_numpy(self.ctx, np.zeros((self.n_tokens, network.n_embd), np.float32),
                                                     "embd"))
        return self.embeddings

    def _loss(self, network, x):
        self.target = gg.from_numpy(self.ctx, np.zeros((1, network.n_vocab), np.float32), "target")
        last = gg.cont(gg.view_2d(x, x.ne[0], 1, x.nb[1], (self.n_tokens - 1) * x.nb[1]))
        return gg.cross_entropy_loss(decoder_graph.logits(network, last), self.target)


def attribution(network, ids, target):
    """The Attribution of a network's next token, or of `target`, a token id or a text of one token.

    Gradients read weights as they lie in the file, so a second network over the same mapped file computes them.
    """
    if not network.CAUSAL or not hasattr(network, "decode"):
        raise NotSupported(f"{network.file.arch} models predict no next token; load a llama model")
    if len(ids) < 2:
        raise ParamError("attribution: the text has one token; give two at least")
    target = _target_id(network, target)
    embeddings = network.capture("embd", ids)["embd"].astype(np.float32)
    target = int(network.logits(ids)[-1].argmax()) if target is None else target
    options = dataclasses.replace(network.options, repack=False, reserve=False, n_ctx=len(ids), devices=None,
                                  n_gpu_layers=None, backend="CPU")
    with type(network)(network.file, options) as plain:
        part = EmbeddingLoss(plain, len(ids))
        with part.ctx:
            gradient, = gg.grad(part.loss, [part.embeddings])
        part.embeddings.set(embeddings)
        wanted = np.zeros((1, network.n_vocab), np.float32)
        wanted[0, target] = 1
        part.target.set(wanted)
        loss, found = gg.compute(part.loss, gradient)
    gradients = -found.reshape(len(ids), -1)
    return Attribution(labels_of(network, ids), (gradients * embeddings).sum(1), gradients,
                       labels_of(network, np.array([target]))[0], target, -float(loss.item()))


def _target_id(network, target):
    if isinstance(target, str):
        given = network.tokenize(target, add_special=False)
        if len(given) != 1:
            raise ParamError(f"attribution: target {target!r} has {len(given)} tokens, one is expected, such as "
                             f"{network.detokenize(given[:1])!r}")
        return given[0]
    return None if target is None else integer("target", target, 0, network.n_vocab - 1)
