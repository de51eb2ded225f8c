"""How objects look in a notebook: generic functions, implemented in engine/display/ so that nothing here imports it.

    x = gg.from_numpy(ctx, a)
    x                       <x F32 [64, 8], CPU buffer 3>                   in a terminal: one line
                            facts and values as HTML (display/html.py)      in a notebook
"""
import functools
import html
import io

from ggjit.alloc.report import mib
from ggjit.ops.core.errors import MissingExtra, NotSupported, extra
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
    """Mixin: the object is shown as its plot() in notebooks, where matplotlib is installed."""
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


def size_text(nbytes):
    """"1,024 bytes (1.00 KiB)"."""
    return f"{nbytes:,} bytes" if nbytes < 1024 else f"{nbytes:,} bytes ({mib(nbytes)})"
