"""Shortens Numba's report about a user's function that does not compile to one line."""
import re

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r"Failed in nopython|(\[\d+\] )?During: |$")       # Numba's words about its own passes


def useful(report):
    """The useful part of Numba's report: what is wrong, and the line of the user's function."""
    lines = [x.strip() for x in _ANSI.sub("", report).splitlines()]
    first = next(i for i, x in enumerate([*lines, report]) if not _FRAME.match(x))
    call = next((x for x in lines[first:] if x.startswith(">>>")), "") if lines[first].endswith("signature:") else ""
    files = [x.rstrip(":") for x in lines if x.startswith('File "') and '"<string>"' not in x]
    return " ".join(filter(None, (lines[first], call.removeprefix(">>> "), f"({files[-1]})" if files else "")))
