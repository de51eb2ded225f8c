"""Pooling: from the states of a text's tokens to one row, an embedding or a classifier's scores.

    mean    sum_t x_t / T                 cls   x_0                   last  x_(T - 1)
    rank    the row that the classifier was trained on: x_0, of a decoder x_(T - 1), of ModernBERT the mean
            h = act(cls x + b), its norm      where the file has that matrix; act: tanh, of ModernBERT GELU
            s = cls.output h + b              scores; of Qwen 3 softmax(s): the first is the probability of "yes"

Source: llama.cpp's build_pooling; transformers' heads of the same models.
"""
import numpy as np

import ggjit as gg
from ggjit.models.blocks.description import linear
from ggjit.models.core.checks import one_of
from ggjit.models.files.gguf import StringArray
from ggjit.ops.core.errors import ModelError, NotSupported

KINDS = "none", "mean", "cls", "last", "rank"           # by their numbers in a file
RANK = KINDS[4]
HEAD = "cls.weight", "cls.bias", "cls.norm.weight", "cls.output.weight", "cls.output.bias"
EXACT_GELU, SOFTMAX = ("modern-bert",), ("qwen3", "qwen3vl")
REMEDY = "(load_model(path, pooling=\"mean\"), or \"cls\", \"last\"; --pooling)"


class Pooling:
    """`.kind`: of KINDS; `.n_scores`: of a classifier; `row` and `scores` build their parts of a graph."""

    def __init__(self, hparams, loader, default, causal, asked=None):
        """default: the kind of a file that names none; asked: load_model's option `pooling`.  Errors: ModelError,
        ParamError."""
        self._file = hparams.file
        self.kind, self.n_scores = _kind(hparams, default), 0
        if asked is not None:
            self.kind = one_of("pooling", asked, KINDS)
        first = "mean" if hparams.file.arch == "modern-bert" else "last" if causal else "cls"
        self._first = _kind(hparams, first, "classifier.pooling_type")
        labels = hparams.get("classifier.output_labels", None, StringArray)
        if self.kind == RANK:
            self._load_head(loader, hparams.n_embd, labels)
        else:
            loader.ignore(*HEAD)

    def _load_head(self, loader, d, labels):
        path, n = self._file.path, 0 if labels is None else len(labels)
        out, inner = (self._file.tensors.get(name) for name in ("cls.output.weight", "cls.weight"))
        if out is None and inner is None:
            raise ModelError(f"{path}: no head that ranks: neither cls.weight nor cls.output.weight; give another "
                             f"pooling {REMEDY}, or convert the model again")
        self.n_scores = (out or inner).ne[-1] if len((out or inner).ne) > 1 else 1
        if n and n != self.n_scores:
            raise ModelError(f"{path}: {n} names of classes, but the classifier gives {self.n_scores} numbers; convert "
                             f"the model again")
        self._inner = inner and loader.linear("cls", d, d if out else self.n_scores)
        self._norm = loader.norm("cls.norm", "centred") if inner and loader.has("cls.norm.weight") else None
        self._out = out and loader.linear("cls.output", d, self.n_scores)

    # ------------------------------------------------------------ graphs
    def row(self, ctx, x, n_tokens):
        """[d, 1] of the states [d, n_tokens]."""
        kind = self._first if self.kind == RANK else self.kind
        if kind == "mean":
            weights = gg.from_numpy(ctx, np.full((1, n_tokens), 1 / n_tokens, np.float32), "mean weights")
            return gg.mul_mat(gg.cont(gg.transpose(x)), weights)
        return gg.view_2d(x, x.ne[0], 1, x.nb[1], (n_tokens - 1) * x.nb[1] if kind == "last" else 0)

    def scores(self, g, x):
        """[n_scores, n] of pooled rows [d, n], by the classifier."""
        if self._inner:
            x = linear(self._inner, x)
            x = gg.gelu_erf(x) if self._file.arch in EXACT_GELU else gg.tanh(x)
            x = x if self._norm is None else g.norm(x, "centred", self._norm)
        if self._out:
            x = linear(self._out, x)
        return gg.set_name(gg.soft_max(x) if self._file.arch in SOFTMAX else x, "scores")

    # ------------------------------------------------------------ methods
    def of_embedding(self):
        """The kind that makes embeddings.  Errors: NotSupported."""
        if self.kind in ("none", RANK):
            what = "ranks texts: m.rerank(query, texts)" if self.kind == RANK else "says no pooling of its tokens"
            raise NotSupported(f"{self._file.path} {what}; for embeddings say which rows make one {REMEDY}")
        return self.kind

    def check_ranks(self):
        """Errors: NotSupported for a network without a classifier."""
        if self.kind != RANK:
            raise NotSupported(f"{self._file.path} is not a reranker (pooling {self.kind!r}, not \"rank\"); compare "
                               f"embeddings instead: m.embed([query]) @ m.embed(texts).T")


def _kind(hparams, default, key="pooling_type"):
    number = hparams.get(key, KINDS.index(default), int)
    if not 0 <= number < len(KINDS):
        raise ModelError(f"{hparams.file.path}: {hparams.file.arch}.{key} {number} is not supported; supported: "
                         f"{', '.join(f'{name} ({i})' for i, name in enumerate(KINDS))}")
    return KINDS[number]
