"""What ggjit does not run on is refused when it is imported, in one line, before Numba is imported."""
import re
import tomllib

import pytest
from helpers.paths import ROOT

from ggjit.ops.core import requirements
from ggjit.ops.core.errors import NotSupported

SEEN = "\nexcept Exception as e:\n    print(type(e).__name__, '|', e, '|', 'numba' in sys.modules)"
VERSIONS = ("import sys\nfrom importlib import metadata\n"
            "metadata.version = {{'numba': '{}', 'llvmlite': '0.42.0'}}.__getitem__\ntry:\n    import ggjit" + SEEN)


@pytest.mark.parametrize("version", ["0.59.1", "0.69.0rc1", "1.0"])
def test_a_numba_that_was_not_tried_is_refused(python, version):
    r = python(VERSIONS.format(version))
    assert r.stdout == (f"NotSupported | Numba {version} with llvmlite 0.42.0: ggjit was tried with numba>=0.60,<0.69; "
                        f"pip install 'numba>=0.60,<0.69' | False\n"), r.stderr


@pytest.mark.parametrize("version", ["0.60.0", "0.68.1", "0.68.1+local"])
def test_the_others_are_taken(python, version):
    r = python(VERSIONS.format(version))
    assert (r.returncode, r.stdout) == (0, ""), r.stderr


def test_python_without_its_lock_is_refused(python, monkeypatch):
    """As a free-threaded Python answers; no such build is needed."""
    r = python("import sys\nsys._is_gil_enabled = lambda: False\ntry:\n    import ggjit" + SEEN)
    assert re.fullmatch(r"NotSupported \| .*global interpreter lock.*PYTHON_GIL=1 \| False\n", r.stdout), r.stderr
    monkeypatch.setattr("sys._is_gil_enabled", lambda: True, raising=False)
    requirements.check()
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False)
    with pytest.raises(NotSupported):
        requirements.check()


def test_the_bounds_are_those_of_the_package():
    (first, end), project = requirements.NUMBA, tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"numba>={first[0]}.{first[1]},<{end[0]}.{end[1]}" in project["dependencies"]
