"""Checks the requirements of ggjit when it is imported, before Numba is imported or anything is compiled.

With a release of Numba that was not tried LLVM may end the process: types of intrinsics change between its releases.
"""
import re
import sys
from importlib import metadata

from ggjit.ops.core.errors import NotSupported

NUMBA = (0, 60), (0, 69)        # from, up to: pyproject.toml has the same bounds


def check():
    """NotSupported for a Numba that was not tried and for Python without its global lock."""
    try:
        numba, llvmlite = metadata.version("numba"), metadata.version("llvmlite")
    except metadata.PackageNotFoundError:
        return                  # not installed as a package: the import itself raises the error
    first, end = NUMBA
    if not first <= tuple(map(int, re.findall(r"\d+", numba)[:2])) < end:
        bounds = f"numba>={first[0]}.{first[1]},<{end[0]}.{end[1]}"
        raise NotSupported(f"Numba {numba} with llvmlite {llvmlite}: ggjit was tried with {bounds}; "
                           f"pip install '{bounds}'")
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise NotSupported("this Python runs without its global interpreter lock, which ggjit's tables rely on; start "
                           "it with -X gil=1 or PYTHON_GIL=1")
