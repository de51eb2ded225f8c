"""How pip builds ggjit: by setuptools; but `pip install -e` installs a finder that no folder called ggjit can hide.

A clone is a folder called ggjit, too.  For a script, notebook or prompt beside it, Python's own search takes that
folder for a package without code, and never asks the finder that setuptools would install, which comes last.  The one
below comes first.  It lets a package that Python's search finds pass, so PYTHONPATH and an installed wheel mean what
they do everywhere, and otherwise names the file in the checkout.
"""
import base64
import hashlib
import pathlib
import tempfile
import tomllib
import zipfile

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks for sdist and wheel

ROOT = pathlib.Path(__file__).resolve().parent
FINDER = '''"""Finds ggjit in the checkout that `pip install -e` was run in.  Written by its build_backend.py."""
import importlib.util
import os
import sys
from importlib.machinery import PathFinder

FILES = {files}


class CheckoutFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in FILES:
            return None
        found = PathFinder.find_spec(name, path)
        if found is not None and found.has_location:
            return found
        return importlib.util.spec_from_file_location(name, FILES[name]) if os.path.exists(FILES[name]) else found


sys.meta_path.insert(0, CheckoutFinder)
'''
WHEEL = "Wheel-Version: 1.0\nGenerator: ggjit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def files():
    """{package or module: its file in the checkout}; what lies inside a package Python finds by itself."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {name: ROOT / folder / "__init__.py" for name, folder in setuptools["package-dir"].items()}
    modules = {name: ROOT / f"{name}.py" for name in setuptools["py-modules"]}
    return {name: str(path) for name, path in (packages | modules).items()}


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """PEP 660: a wheel that holds the finder and the metadata; its name."""
    with tempfile.TemporaryDirectory() as folder:
        info = build_meta.prepare_metadata_for_build_wheel(folder, config_settings)
        content = {path.relative_to(folder).as_posix(): path.read_bytes()
                   for path in sorted(pathlib.Path(folder, info).rglob("*")) if path.is_file()}
    content["ggjit_checkout.py"] = FINDER.format(files=files()).encode()
    content["ggjit_checkout.pth"] = b"import ggjit_checkout\n"
    content[f"{info}/WHEEL"] = WHEEL.encode()
    rows = [f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
            for name, data in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    name = f"{info.removesuffix('.dist-info')}-0.editable-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory, name), "w") as wheel:
        for path, data in content.items():
            wheel.writestr(path, data)
    return name
