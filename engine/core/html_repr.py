"""How objects look in a notebook: generic functions, implemented in engine/display/ so that nothing here imports it.

    x = gg.from_numpy(ctx, a)
    x                       <x F32 [64, 8], CPU buffer 3>                   in a terminal: one line
                            facts and values as HTML (display/html.py)      in a notebook
"""
import functools
import html
import io
from typing import TYPE_CHECKING

import numpy as np

from ggjit.alloc.report import mib
from ggjit.ops.core.errors import IndexRangeError, MissingExtra, NotSupported, extra, no_attribute
from ggjit.ops.core.printable import TEXT, printable


def escape(x):
    """Text for HTML and SVG, which allow no control characters but line feeds and tabs."""
    return html.escape(printable(x, keep=TEXT), quote=True)


@functools.singledispatch
def html_of(x):
    """HTML of an object; by default its repr.  display/html.py registers one function per class."""
    return f"<pre>{escape(repr(x))}</pre>"


@functools.singledispatch
def drawing_of(x, **options):
    """A picture of an object.  display/drawing.py registers that of a Graph."""
    raise NotSupported(f"there is no picture of {x!r}")


class HtmlRepr:
    """Mixin: the object is shown as HTML in notebooks."""
    __slots__ = ()

    def _repr_html_(self):
        return html_of(self)


class PlotRepr:
    """Mixin: the object is shown as its plot() in notebooks, where matplotlib is installed.  The error for a name that
    it lacks lists those it has."""
    __slots__ = ()

    def _repr_png_(self):
        try:
            plt = extra("matplotlib.pyplot", "plots")
        except MissingExtra:
            return None
        figure = self.plot().figure
        png = io.BytesIO()
        figure.savefig(png, bbox_inches="tight")
        plt.close(figure)
        return png.getvalue()

    if not TYPE_CHECKING:               # checkers would take every attribute for granted
        def __getattr__(self, name):
            """An AttributeError that lists the names there are."""
            raise no_attribute(self, name)


class Arrayed:
    """Mixin: the object stands for one array, its attribute of the name ARRAY: shape, length, indices, iteration and
    `np.asarray` are the array's."""
    __slots__ = ()
    ARRAY = "values"

    def __array__(self, dtype=None, copy=None):
        return np.array(getattr(self, self.ARRAY), dtype, copy=bool(copy) or None)

    @property
    def shape(self):
        """The shape of the array that the object stands for."""
        return getattr(self, self.ARRAY).shape

    def __len__(self):
        return len(getattr(self, self.ARRAY))

    def __getitem__(self, index):
        try:
            return getattr(self, self.ARRAY)[index]
        except IndexError:
            raise IndexRangeError(f"{type(self).__name__}[{index!r}]: indices are those of an array of shape "
                                  f"{self.shape}") from None

    def __iter__(self):
        return iter(getattr(self, self.ARRAY))


def size_text(nbytes):
    """"1,024 bytes (1.00 KiB)"."""
    return f"{nbytes:,} bytes" if nbytes < 1024 else f"{nbytes:,} bytes ({mib(nbytes)})"
