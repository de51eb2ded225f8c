"""Typed errors.  Each names the wrong value and a remedy; none is raised after state has changed."""
import difflib

from ggjit.ops.core.printable import TEXT, printable


class GgjitError(Exception):
    """Base of every error ggjit raises on purpose.  Control characters of names and files are shown as escapes."""

    def __str__(self):
        return printable(super().__str__(), keep=TEXT)


def no_attribute(x, name):
    """The NoSuchAttribute for a name that `x` lacks: it lists the public names, and the nearest."""
    names = [] if name.startswith("_") else [n for n in dir(x) if not n.startswith("_")]
    close = difflib.get_close_matches(name, names, 1, 0.5)
    hint = f"; it has {', '.join(names)}" if names else ""
    hint += f" (did you mean {close[0]}?)" if close else ""
    return NoSuchAttribute(f"{type(x).__name__} has no attribute {name!r}{hint}", name=name, obj=x)


def shown_shortly(error):
    """The exception itself: in a notebook its traceback will be the user's lines alone, as for a GgjitError."""
    render = getattr(GgjitError, "_render_traceback_", None)        # set by the display of notebooks
    if render is not None:
        error._render_traceback_ = lambda: render(error)
    return error


class ShapeError(GgjitError, ValueError):
    """Shapes, strides or sizes that do not fit together."""


class TypeMismatch(GgjitError, TypeError):
    """A tensor type an op or a setting does not take."""


class ParamError(GgjitError, ValueError):
    """A parameter out of its range."""


class ReadOnly(GgjitError, AttributeError):
    """An attribute that cannot be set: what it stands for is fixed when the object is made."""


class NoSuchAttribute(GgjitError, AttributeError):
    """An attribute that there is not; the message says what other libraries' name stands for here."""


class IndexRangeError(GgjitError, IndexError):
    """An id, row number, position or byte range outside its tensor."""


class NoSuchName(GgjitError, KeyError):
    """A name that a table of names does not hold."""


class StaleHandle(GgjitError, ReferenceError):
    """A tensor, context or buffer that was freed."""


class NotAllocated(GgjitError, RuntimeError):
    """A tensor without memory where memory is needed."""


class Overwritten(GgjitError, RuntimeError):
    """An intermediate result whose memory a later node reused."""


class OutOfMemory(GgjitError, MemoryError):
    """A buffer type, a table or a fixed arena is full."""


class NotSupported(GgjitError, NotImplementedError):
    """An op, type or device combination no kernel serves."""


class BadFile(GgjitError, ValueError):
    """A file that is truncated, corrupted or hostile."""


class CannotWrite(GgjitError, OSError):
    """A file could not be written: no space, no permission, or it is there already.  Nothing of it is left behind."""

    def __str__(self):          # OSError's own leaves the message out where a file is named
        return printable(self.args[0], keep=TEXT)


class ModelError(GgjitError, ValueError):
    """A well-formed file that does not describe a model that can be run."""


class MissingExtra(GgjitError, ImportError):
    """An optional package is not installed; the message names the pip extra."""


class QueueFull(GgjitError, RuntimeError):
    """As many sequences wait for a running batch as may; try again later."""


class Cancelled(GgjitError, RuntimeError):
    """A computation stopped by an abort callback; its outputs are invalid."""


def extra(module, name):
    """Import `module`, or say which extra brings it: `extra("tokenizers", "models")`."""
    import importlib
    try:
        return importlib.import_module(module)
    except ImportError as e:
        if e.name and e.name.split(".")[0] != module.split(".")[0]:
            raise
        if not isinstance(e, ModuleNotFoundError):
            raise MissingExtra(f"{module} does not load: {e}; install it again (pip install 'ggjit[{name}]'), or allow "
                               f"this process more memory (ulimit -v)") from e
        raise MissingExtra(f"{module} is not installed; pip install 'ggjit[{name}]'") from None
