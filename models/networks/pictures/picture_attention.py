"""The attention between the patches of a picture in a vision network, drawn over the picture.

    looks = m.vision.attention("cat.jpg")
    looks.plot(layer=3, patch=(5, 7))           # where the patch in row 5, column 7 looks, bright
"""
import dataclasses
import itertools
import math

import numpy as np

from ggjit.core.html_repr import PlotRepr
from ggjit.graphs.graph import Graph
from ggjit.models.core.checks import integer
from ggjit.models.networks.inside.hooks import layer_of, public_name
from ggjit.ops.core.errors import ParamError, ShapeError, extra


@dataclasses.dataclass(repr=False)
class PictureAttention(PlotRepr):
    """field: uint8 (height, width, 3), what the network gets.  weights: {layer: (n_head, n, n) float32}, of patch i for
    patch j, row by row; rows sum up to 1, or less where a class embedding takes part.  patch_size: pixels a side."""
    field: np.ndarray
    weights: dict
    patch_size: int

    @property
    def grid(self):
        """(rows, columns) of patches."""
        return tuple(n // self.patch_size for n in self.field.shape[:2])

    def grid_of(self, layer):
        """(rows, columns) of a layer's patches: in some networks several become one on the way."""
        rows, columns = self.grid
        side = math.isqrt(rows * columns // self.weights[layer].shape[-1])
        return rows // side, columns // side

    def seen(self, layer, head=None, patch=None):
        """float32 (rows, columns): how much of its attention a patch, (row, column), gives to each.  Without a head,
        the mean of all; without a patch, the mean of all.

            m.vision.attention("cat.jpg").seen(0, patch=(2, 3)).sum()

        Errors: ParamError.
        """
        if layer not in self.weights:
            raise ParamError(f"layer must be one of {', '.join(map(str, self.weights))}, got {layer!r}")
        w, (rows, columns) = self.weights[layer], self.grid_of(layer)
        w = w.mean(0) if head is None else w[integer("head", head, 0, len(w) - 1)]
        if patch is None:
            return w.mean(0).reshape(rows, columns)
        row, column = self._checked(patch, (rows, columns))
        return w[row * columns + column].reshape(rows, columns)

    def plot(self, layer=None, head=None, patch=None, axes=None):
        """The field, and beside it the map of a layer, or of every layer; red: the patch that looks, (row, column) of
        the field's.  Where several patches became one, the map is that of the one it lies in.  Bright is the most of
        each map.  Returns matplotlib's axes.  Errors: ParamError, MissingExtra."""
        layers = list(self.weights) if layer is None else [layer]
        maps = [self.seen(i, head, self._within(i, patch)) for i in layers]
        h, w = self.field.shape[:2]
        plt = extra("matplotlib.pyplot", "plots")
        axes = axes if axes is not None else plt.subplots(figsize=(min(2.2 * (len(maps) + 1), 14), 2.6))[1]
        gap = w // 16 + 1
        axes.imshow(self.field, extent=(0, w, h, 0))
        for k, a in enumerate(maps):
            x = (k + 1) * (w + gap)
            axes.imshow(a / (a.max() or 1), extent=(x, x + w, h, 0), cmap="viridis", vmin=0, vmax=1,
                        interpolation="nearest")
            axes.text(x + w / 2, -gap, f"layer {layers[k]}", ha="center", va="bottom", fontsize=8)
            if patch is not None:
                axes.add_patch(self._frame(plt, self._within(layers[k], patch), x, w // a.shape[1]))
        if patch is not None:
            axes.add_patch(self._frame(plt, patch, 0, self.patch_size))
        axes.set(xlim=(0, (len(maps) + 1) * (w + gap) - gap), ylim=(h, -h / 6), xticks=[], yticks=[])
        axes.set_axis_off()
        return axes

    def _within(self, layer, patch):
        """(row, column) of the layer's patch that a patch of the field lies in; None: none."""
        if patch is None:
            return None
        row, column = self._checked(patch, self.grid)
        side = self.grid[0] // self.grid_of(layer)[0]
        return row // side, column // side

    @staticmethod
    def _checked(patch, grid):
        if not isinstance(patch, tuple | list) or len(patch) != 2:
            raise ParamError(f"patch is (row, column), got {patch!r}")
        return [integer(what, at, 0, n - 1) for what, at, n in zip(("the patch's row", "the patch's column"), patch,
                                                                  grid, strict=True)]

    @staticmethod
    def _frame(plt, patch, x, side):
        return plt.Rectangle((x + patch[1] * side, patch[0] * side), side, side, fill=False, color="red",
                             linewidth=1.5)

    def __repr__(self):
        rows, columns = self.grid
        return f"<PictureAttention of {len(self.weights)} layers, {rows} x {columns} patches; .seen(layer), .plot()>"


def attention_of(vision, seen, k):
    """The PictureAttention of field k of a VisionInput."""
    if not 0 <= k < len(seen.fields):
        raise ShapeError(f"field {k} of a picture that has {len(seen.fields)}")
    field, p = seen.fields[k], vision.patch_size
    rows, columns = (n // p for n in field.shape[:2])
    with vision._lock:
        ctx, inputs, results = vision._built_plainly((columns, rows))
        nodes = _weights_by_layer(results)
        plan = vision._plan(Graph(*itertools.chain(*nodes.values())))
        inputs["patches"][:] = vision.patches(field)
        plan.compute()
        found = {i: _whole([plan.view(t).reshape(-1, vision.n_head, *t.shape[-2:]) for t in parts])
                 for i, parts in nodes.items()}
    return PictureAttention(field, {i: _by_rows(vision, w, columns, rows) for i, w in found.items()}, p)


def _weights_by_layer(results):
    """{layer: [tensors]} of the weights of attention, in order; windows of each size have one."""
    found = {}
    for t in Graph(*results).nodes:
        name = public_name(t.name or "")
        if name is not None and name.endswith(".kq_soft_max"):
            found.setdefault(layer_of(name), []).append(t)
    return found


def _whole(parts):
    """(n_head, n, n) of windows [(windows, n_head, patches, patches), ...]: none looks at another."""
    windows = [w for part in parts for w in part]
    n, at = sum(w.shape[-1] for w in windows), 0
    out = np.zeros((len(windows[0]), n, n), np.float32)
    for w in windows:
        end = at + w.shape[-1]
        out[:, at:end, at:end] = w
        at = end
    return out


def _by_rows(vision, w, columns, rows):
    """(n_head, n, n) of the patches alone, row by row."""
    if not vision.has_class and w.shape[-1] != columns * rows:      # squares of patches, row by row
        return w
    if vision.has_class:
        w = w[:, :-1, :-1] if vision.family.class_last else w[:, 1:, 1:]
    back = np.argsort(vision.family.order(vision, columns, rows))
    return w[:, back][:, :, back]
