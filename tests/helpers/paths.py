"""Folders: the checkout, its tests, the reference data (real models with golden outputs), which lies outside."""
import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = pathlib.Path(os.environ.get("GGJIT_SHARED", ROOT.parent / "shared"))
TESTS = ROOT / "tests"
# PYTHONPATH of a process that imports helpers, or test modules by their names, which are unique
TESTS_PATH = os.pathsep.join(map(str, [TESTS, *sorted({p.parent for p in TESTS.rglob("test_*.py")})]))
