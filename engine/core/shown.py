"""What objects show in a notebook: generic functions that the folder `show` fills in, so that nothing here needs it.

    x = gg.from_numpy(ctx, a)
    x                       <x F32 [64, 8], CPU buffer 3>                in a terminal: one line
                            facts and values as HTML (show/html.py)      in a notebook
"""
import functools
import html

from ggjit.alloc.report import mib
from ggjit.ops.core.errors import NotSupported


def escape(x):
    return html.escape(str(x), quote=True)


@functools.singledispatch
def html_of(x):
    """HTML of an object; by default its repr.  show/html.py registers one function a class."""
    return f"<pre>{escape(repr(x))}</pre>"


@functools.singledispatch
def drawing_of(x, **options):
    """A picture of an object.  show/draw.py registers the one of a Graph."""
    raise NotSupported(f"there is no picture of {x!r}")


class Shown:
    """Mixin: the object is shown as HTML in notebooks."""
    __slots__ = ()

    def _repr_html_(self):
        return html_of(self)


def size_text(nbytes):
    """"1,024 bytes (1.00 KiB)"."""
    return f"{nbytes:,} bytes" if nbytes < 1024 else f"{nbytes:,} bytes ({mib(nbytes)})"
