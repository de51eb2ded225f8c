"""Tracebacks of typed errors in notebooks: the user's lines and the message, without frames of the library.

IPython asks an exception for `_render_traceback_`; engine/__init__.py gives every GgjitError this one.

    ShapeError                                Traceback (most recent call last)
    cell 3, line 2, in <module>
        y = gg.mul_mat(w, x)
    ShapeError: mul_mat: ...

A KeyboardInterrupt, which is no class of ours, is given the same when it comes out of the library.
"""
import functools
import linecache
import os
import sys
import sysconfig
import traceback

from ggjit.ops.core.printable import shown_file

_NOTEBOOK = ("IPython.", "ipykernel.")


@functools.cache
def _installed():
    """Folders of Python's and of packages' modules."""
    names = "stdlib", "platstdlib", "purelib", "platlib"
    return tuple({os.path.join(sysconfig.get_path(name), "") for name in names})


def _is_ours(frame):
    name = frame.f_globals.get("__name__", "")
    return name == "ggjit" or name.startswith("ggjit.")


def _is_library(frame):
    return _is_ours(frame) or frame.f_globals.get("__name__", "").startswith(_NOTEBOOK)


def shorten_interrupts():
    """In IPython, interrupts that come out of the library show the user's lines alone.  A shell that handles some
    exceptions its own way is left alone."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and shell.custom_exceptions == ():
        shell.set_custom_exc((KeyboardInterrupt,), _interrupted)


def _interrupted(shell, kind, error, tb, tb_offset=None):
    if any(_is_ours(frame) for frame, _ in traceback.walk_tb(tb)):
        error._render_traceback_ = lambda: short_traceback(error)
    shell.showtraceback((kind, error, tb), tb_offset=tb_offset)


def short_traceback(error):
    """The lines that IPython prints for `error`.  `traceback.print_exception(error)` has all frames."""
    name = type(error).__name__
    lines = [f"{name:<42}Traceback (most recent call last)"]
    inside = False                      # what the library calls is the user's only where it is not installed: no Numba
    for frame, number in traceback.walk_tb(error.__traceback__):
        file, inside = frame.f_code.co_filename, inside or _is_ours(frame)
        if not (_is_library(frame) or inside and file.startswith(_installed())):
            code = linecache.getline(file, number).strip()
            where = "" if frame.f_code.co_name.startswith("<") else f", in {frame.f_code.co_name}"
            lines.append(f"{shown_file(file)}, line {number}{where}\n    {code}")
    return [*lines, f"{name}: {error}".removesuffix(": "), *getattr(error, "__notes__", ())]
