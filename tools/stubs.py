"""Writes engine/all_ops.pyi: the signatures of all ops and tensor types, for type checkers and editors.

    python -m ggjit.tools.stubs           after an op was added or its arguments changed; a test compares

Builders reach `ggjit` by discovery (ops/core/spec.py), which no type checker can follow; their own annotations are
written down.
"""
import pathlib
import re

import ggjit
from ggjit.ops.core.builders import arguments_text
from ggjit.ops.core.spec import builders
from ggjit.ops.core.types import BY_NAME, Type
from ggjit.ops.core.whole_file import write_whole

_HEAD = '''"""Every op and tensor type of ggjit.  Written by `python -m ggjit.tools.stubs`; see there."""
from collections.abc import Callable, Sequence
from typing import Any

from ggjit import Context, Tensor, Type

'''


def _default(value):
    return "..." if isinstance(value, Type) else repr(value)


def text():
    """The text of the stub file."""
    lines = [_HEAD]
    for name, f in sorted(builders().items()):
        lines.append(f"def {name}({', '.join(arguments_text(f, _default))}) -> Tensor: ...\n")
    lines.append("\n")
    lines += [f"{t!r}: Type\n" for t in sorted(BY_NAME.values(), key=repr)]
    return re.sub(r"(?m)^(.{120}).*$", _wrapped, "".join(lines))


def _wrapped(match):
    """A long signature over several lines."""
    head, _, rest = match[0].partition("(")
    arguments, _, tail = rest.rpartition(")")
    out, line = [], "       "
    for a in re.split(r", (?=\w+: )", arguments):
        if len(line) + len(a) > 116:
            out.append(line)
            line = "       "
        line += f" {a},"
    return f"{head}(\n" + "\n".join([*out, line]) + f"\n){tail}"


if __name__ == "__main__":
    path = pathlib.Path(ggjit.__file__).with_name("all_ops.pyi")
    write_whole(path, text())
