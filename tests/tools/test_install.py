"""`pip install -e` in a checkout, and README's cell beside it: the checkout's folder may be called ggjit, too."""
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder

import pytest
from helpers.paths import ROOT
from helpers.requirements import need
from helpers.sample import sampled

WHERE = "\nimport ggjit.models, ggjit.ops.core.types\nprint(gg.__file__)\n"


def readme_cell():
    return re.search(r"## One cell\s+```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1]


def run(*command, **options):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    r = subprocess.run([*map(str, command)], text=True, capture_output=True, timeout=300, env=env, **options)
    assert r.returncode == 0, (r.stdout + r.stderr)[-3000:]
    return r.stdout


FOLDERS, WAYS = ("ggjit", "Größe mit Raum"), ("script", "prompt", "notebook")


@pytest.fixture(scope="module")
def install(tmp_path_factory):
    """install(folder): (a checkout of that name, the Python it is installed in, whose other packages are this one's)"""
    need("pip", "it installs the checkout")

    @functools.cache
    def of(folder):
        checkout = tmp_path_factory.mktemp("beside") / folder
        for name in ("engine", "ops", "alloc", "models", "tools"):
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "build_backend.py", "README.md", "LICENSE", "ggjit_command.py"):
            shutil.copy(ROOT / name, checkout / name)
        venv = checkout / ".venv"
        run(sys.executable, "-m", "venv", "--without-pip", venv)
        site, = (venv / "lib").glob("python*/site-packages")
        (site / "others.pth").write_text("".join(f"import sys; sys.path.append({p!a})\n" for p in sys.path
                                                  if p.endswith("-packages")))     # ASCII, which every locale reads
        run(sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--quiet", "--no-deps",
            "--no-build-isolation", "-e", checkout)
        return checkout, venv / "bin" / "python"
    return of


@pytest.fixture(params=FOLDERS)
def installed(request, install):
    return install(request.param)


# a folder called ggjit may hide the package from each, letters and spaces from all alike
@pytest.mark.parametrize("folder,way", [*itertools.product(FOLDERS[:1], WAYS), *sampled(
    itertools.product(FOLDERS[1:], WAYS), lambda case: case[:1])])
def test_readmes_cell_beside_the_checkout(install, folder, way):
    checkout, interpreter = install(folder)
    beside, cell = checkout.parent, readme_cell() + WHERE
    if way == "script":
        (beside / "cell.py").write_text(cell, encoding="utf-8")
        out = run(interpreter, beside / "cell.py")
    elif way == "prompt":
        out = run(interpreter, "-c", cell, cwd=beside)
    else:                                           # its kernel is `python -m ipykernel_launcher` in its folder
        (beside / "launcher.py").write_text(f"exec({cell!r})", encoding="utf-8")
        out = run(interpreter, "-m", "launcher", cwd=beside)
    other = PathFinder.find_spec("ggjit")           # a wheel among this Python's packages goes before any checkout
    expected = other.origin if other is not None and other.has_location else str(checkout / "engine" / "__init__.py")
    assert out.splitlines()[-1] == expected


def test_the_command_and_its_modules_beside_the_checkout(installed):
    checkout, interpreter = installed
    commands = (interpreter.parent / "ggjit",), (interpreter, "-m", "ggjit.tools.command.main")
    said = {run(*command, "--version", cwd=checkout.parent) for command in commands}
    assert len(said) == 1 and said.pop().startswith("ggjit ")


def test_a_package_on_the_path_goes_before_the_checkout(installed, tmp_path):
    """As with any installed package: PYTHONPATH names another copy."""
    checkout, interpreter = installed
    (tmp_path / "ggjit").mkdir()
    (tmp_path / "ggjit" / "__init__.py").write_text("answer = 42")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ggjit; print(ggjit.answer)"
    assert run(interpreter, "-c", code, cwd=checkout.parent) == "42\n"


def test_a_checkout_that_is_gone_is_no_module(installed):
    _, interpreter = installed
    code = ("import ggjit_checkout\nggjit_checkout.FILES['ggjit'] += 'x'\n"
            "try: import ggjit\nexcept ModuleNotFoundError as e: print(e)\nelse: print(ggjit.__file__)")
    said = run(interpreter, "-c", code, cwd=interpreter.parent).strip()
    assert said == "No module named 'ggjit'" or said.endswith("-packages/ggjit/__init__.py")
