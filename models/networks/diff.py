"""gg.diff: the error of every named tensor of two models on one text, and the first tensor that differs.

    d = gg.diff("model-F16.gguf", "model-Q4_0.gguf", "It was a truth universally acknowledged")
    d.first                     # DiffRow of the first tensor whose error is above d.tolerance
    print(d)                    # errors by layer
    d.plot()                    # by layer and token

    error of a tensor = sum (b - a)^2 / sum a^2         (NMSE), over all of it, and for each token
"""
import contextlib
import dataclasses
import os
import pathlib
import tempfile

import numpy as np

from ggjit.core.arguments import typed_call
from ggjit.core.html_repr import PlotRepr
from ggjit.models.convert.convert import convert_folder
from ggjit.models.core.checks import number
from ggjit.models.networks.base.network import Network
from ggjit.models.networks.inside import inside
from ggjit.models.networks.inside.hooks import layer_of
from ggjit.models.networks.inside.pictures import axes_of, label_axis, labels_of
from ggjit.models.networks.load import EMBEDDED, load_model
from ggjit.ops.core.errors import ModelError, NotSupported, ParamError, TypeMismatch, extra

TOLERANCE = 1e-2
LISTED = 12                     # rows that a text shows beside the first
FLOOR = 1e-12                   # smaller errors are drawn as this one


@dataclasses.dataclass(frozen=True)
class DiffRow:
    """One tensor.  error: NMSE; tokens: the error of each token, None for tensors without tokens; growth: the median of
    these by that of the tensor before; shapes: of a's and b's values where they differ, there is no error then."""
    name: str
    error: float
    tokens: np.ndarray | None
    growth: float
    shapes: tuple = ()

    @property
    def layer(self):
        """Number of its layer; None before and after the layers."""
        return layer_of(self.name) if self.name.startswith("blk.") else None


class ModelDiff(PlotRepr):
    """What `gg.diff` found.  rows: [DiffRow] in the order of the network; tokens: texts; only_a, only_b: names that the
    other has not."""

    def __init__(self, rows, tokens, only_a, only_b, titles, tolerance):
        self.rows, self.tokens, self.only_a, self.only_b = rows, tokens, only_a, only_b
        self.titles, self.tolerance = titles, tolerance

    def __getitem__(self, name):
        """The DiffRow of a tensor."""
        found = next((row for row in self.rows if row.name == name), None)
        if found is None:
            raise ParamError(f"no tensor {name!r} was compared; d.rows has all")
        return found

    @property
    def first(self):
        """The first DiffRow whose error is above the tolerance, whose values are not finite or whose shapes differ;
        None where there is none."""
        return next((row for row in self.rows if row.shapes or not row.error <= self.tolerance), None)

    @property
    def steepest(self):
        """The DiffRow whose error grew most over that of the tensor before it."""
        return max((row for row in self.rows if not row.shapes), key=lambda row: row.growth, default=None)

    def grid(self, what="l_out"):
        """(n_layer, n_tokens): errors of `blk.N.WHAT`, NaN where a layer has none."""
        found = {row.layer: row.tokens for row in self.rows if row.name.endswith(f".{what}") and row.tokens is not None}
        if not found:
            raise ParamError(f"no tensor is called blk.*.{what}; d.rows has all names")
        out = np.full((max(found) + 1, len(self.tokens)), np.nan)
        for layer, errors in found.items():
            out[layer] = errors
        return out

    def plot(self, what="l_out", axes=None):
        """Errors of `blk.*.WHAT` by layer and token, on a logarithmic scale.  Returns matplotlib's axes."""
        colors = extra("matplotlib.colors", "plots")
        grid = np.maximum(self.grid(what), FLOOR)
        axes = axes_of(axes, max(5, min(0.3 * len(self.tokens), 14)), max(2.5, 0.22 * len(grid)))
        low, high = np.nanmin(grid), np.nanmax(grid)
        image = axes.imshow(grid, aspect="auto", cmap="magma", origin="lower", interpolation="nearest",
                            norm=colors.LogNorm(low, max(high, low * 10)))
        if high > FLOOR:
            axes.figure.colorbar(image, ax=axes, label="NMSE")
        label_axis(axes.xaxis, self.tokens)
        axes.tick_params("x", labelrotation=90)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set(ylabel="layer", title=f"{what}: {self.titles[1]}\nbeside {self.titles[0]}\n{self._verdict()}")
        return axes

    def _verdict(self, show=lambda row: row.name):
        if all(row.error == 0 for row in self.rows):
            return f"no error above {self.tolerance:g}: all values are equal"
        return f"no error above {self.tolerance:g}" if self.first is None else \
            f"first above {self.tolerance:g}: {show(self.first)}"

    def __str__(self):
        lines = [f"{self.titles[1]} beside {self.titles[0]}, {len(self.tokens)} tokens, {len(self.rows)} tensors",
                 self._verdict(_line)]
        if self.steepest is not None and self.steepest.growth > 1:
            lines.append(f"grows most in: {_line(self.steepest)}")
        for names, title in ((self.only_a, self.titles[0]), (self.only_b, self.titles[1])):
            if names:
                lines.append(f"only in {title}: {', '.join(names[:LISTED])}{' ...' if len(names) > LISTED else ''}")
        shown = [row for row in self.rows if row.layer is None or row.name.endswith(".l_out")]
        return "\n".join([*lines, "", *map(_line, shown)])

    def __repr__(self):
        return f"<ModelDiff of {len(self.rows)} tensors, {self._verdict()}>"


def _line(row):
    if row.shapes:
        return f"{row.name}: shapes {row.shapes[0]} and {row.shapes[1]}"
    return f"{row.name:24s} NMSE {row.error:.2e}" + (f", {row.growth:.1f} x that before" if row.growth >= 1.05 else "")


@typed_call
def diff(a, b, text, names="*", tolerance=TOLERANCE):
    """A ModelDiff of two models on one text: the error of every named tensor, and the first that is off.

        gg.diff("model-F16.gguf", "model-Q4_0.gguf", "a text").first
        gg.diff("model.gguf", "hf-folder/", "a text")                   the folder is converted for it
        gg.diff("model.gguf", ("model.gguf", {"kv_type": "Q8_0"}), "a text")

    a, b: a GGUF path, a Hugging Face folder, (path, options of load_model), or a loaded model; None: the model of the
    package.  They are loaded one after the other.  text: a text, of a's tokenizer, or token ids.  names: patterns of
    names (m.names()); scores of attention only where they are named, since they need another way to compute it.
    tolerance: NMSE from which on a tensor is off.
    Errors: ParamError; ModelError where b's tokenizer gives other ids for the text or nothing can be compared.
    """
    tolerance = number("tolerance", tolerance)
    ids, tokens, of_a, title_a = _captured(a, text, names)
    _, _, of_b, title_b = _captured(b, text, names, (ids, title_a))
    common = [name for name in of_a if name in of_b]
    if not common:
        raise ModelError(f"{title_a} and {title_b} have no named tensor in common")
    rows, before = [], 0.0
    for name in common:
        rows.append(_compared(name, of_a[name], of_b[name], len(ids), before))
        before = _typical(rows[-1].error, rows[-1].tokens, before)
    return ModelDiff(rows, tokens, [n for n in of_a if n not in of_b], [n for n in of_b if n not in of_a],
                     (title_a, title_b), tolerance)


def _captured(what, text, names, first=None):
    """(ids of the text, texts of tokens, {name: (values, axis of tokens)}, title); first: (ids, title) of the first
    model, which a model without a vocabulary takes and every other must have, too."""
    with _loaded(what) as (m, title):
        ids = inside.ids_of(m, text) if not isinstance(text, str) or _has_words(m) else None
        if ids is None and first is None:
            raise ParamError(f"{title} has no vocabulary; give token ids in place of a text")
        used = ids if first is None else first[0]
        if ids is not None and ids.tolist() != used.tolist():
            raise ModelError(f"the tokenizers give different ids for the text: {used.tolist()[:8]} in {first[1]}, "
                             f"{ids.tolist()[:8]} in {title}; give token ids, or convert the model again")
        specs = {name: spec for name, spec in inside.matched_in(m, names).items() if spec.dtype.kind == "f"}
        if names == "*":
            specs = {name: spec for name, spec in specs.items() if name not in m._hooks.without_flash}
        values = m.capture(list(specs), used)
        return used, labels_of(m, used), {name: (values[name], specs[name].token_axis) for name in specs}, title


def _has_words(m):
    return m.file.get("tokenizer.ggml.model", "no_vocab") != "no_vocab"


@contextlib.contextmanager
def _loaded(what):
    """Context of (network, its title): loaded here and freed at the end, or one that the user gave."""
    if isinstance(what, Network):
        yield what, os.path.basename(str(what.file.path))
        return
    path, options = what if isinstance(what, tuple) and len(what) == 2 else (what, {})
    path = EMBEDDED if path is None else path
    if not isinstance(path, str | os.PathLike) or not isinstance(options, dict):
        raise TypeMismatch(f"diff takes a path, (path, options) or a loaded model, got {what!r}")
    title = os.path.basename(os.fspath(path).rstrip("/")) + "".join(f", {k}={v}" for k, v in options.items())
    with contextlib.ExitStack() as stack:
        if os.path.isdir(path):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            source, path = path, pathlib.Path(folder) / "converted.gguf"
            words = any((pathlib.Path(source) / name).exists() for name in ("tokenizer.json", "tokenizer.model"))
            convert_folder(source, path, "F32", vocabulary=words, progress=False)
        m = stack.enter_context(load_model(path, **options))
        if not hasattr(m, "capture"):
            raise NotSupported(f"{title}: this network has no named tensors")
        yield m, title


def _compared(name, of_a, of_b, n_tokens, before):
    (x, axis), (y, _) = of_a, of_b
    if x.shape != y.shape:
        return DiffRow(name, np.inf, None, 1.0, (x.shape, y.shape))
    x, y = x.astype(np.float64), y.astype(np.float64)
    masked = np.isneginf(x) & np.isneginf(y)
    x[masked] = y[masked] = 0
    off, size = (y - x) ** 2, x ** 2
    tokens = None
    if axis is not None and x.shape[axis] == n_tokens:
        others = tuple(k for k in range(x.ndim) if k != axis)
        tokens = _ratio(off.sum(others), size.sum(others))
    error = float(_ratio(off.sum(), size.sum()))
    return DiffRow(name, error, tokens, _typical(error, tokens, before) / before if before > 0 else 1.0)


def _typical(error, tokens, before):
    """The median of the tokens' errors, since the values of one token may be larger than those of all others
    together."""
    found = error if tokens is None else float(np.median(tokens))
    return found if np.isfinite(found) else before


def _ratio(off, size):
    """off / size, 0 where both are 0."""
    return np.where((off == 0) & (size == 0), 0.0, off / np.where(size == 0, np.finfo(float).tiny, size))
