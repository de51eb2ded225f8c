"""Files appear whole or not at all; what is printed obeys no file."""
import csv
import errno
import os
import stat
import subprocess
import sys
import time

import numpy as np
import pytest

import ggjit as gg
from ggjit.alloc.csvio import defused, run_plan_csv
from ggjit.models import save_gguf, save_safetensors
from ggjit.ops.core import whole_file as module
from ggjit.ops.core.printable import TEXT, printable
from ggjit.ops.core.whole_file import whole_file, write_whole
from ggjit.ops.native import cache_files


def graph():
    ctx = gg.Context()
    return gg.Graph(gg.add(a := ctx.new_tensor(gg.F32, (4,), "=a\x1b[2J"), gg.set_name(gg.silu(a), "s")))


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """{name: function that writes the file of that name}"""
    report, w = gg.measure(graph()), np.ones(4, np.float32)
    problem = tmp_path_factory.mktemp("in") / "in.csv"
    problem.write_text("id,lower,upper,size\n-b,0,2,4\n")
    return {"trace.json": gg.profile().trace, "draw.svg": graph().draw().save, "rows.csv": report.to_csv,
            "report.json": report.to_json, "problem.csv": report.to_minimalloc,
            "w.gguf": lambda p: save_gguf(p, {"w": w}), "w.safetensors": lambda p: save_safetensors(p, {"w": w}),
            "out.csv": lambda p: run_plan_csv(problem, p),
            "kernel.o": lambda p: cache_files.write(p, b"code")}


class Full:
    """A file on a disk that is full after a few bytes."""

    def __init__(self, file):
        self.file = file

    def write(self, data):
        self.file.write(data[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.file.close()


NAMES = ("trace.json", "draw.svg", "rows.csv", "report.json", "problem.csv", "w.gguf", "w.safetensors", "out.csv",
         "kernel.o")


@pytest.mark.parametrize("name", NAMES)
def test_a_full_disk_leaves_what_was_there(writers, name, tmp_path, monkeypatch):
    path = tmp_path / name
    writers[name](path)                         # kernels it needs are compiled now
    path.write_text("before")
    real = module._open
    monkeypatch.setattr(module, "_open", lambda *args, **options: Full(real(*args, **options)))
    with pytest.raises(OSError, match="No space left") as e:
        writers[name](path)
    assert e.value.filename == str(path)
    assert [p.name for p in tmp_path.iterdir()] == [name] and path.read_text() == "before"


@pytest.mark.parametrize("name", NAMES)
def test_links_are_replaced_not_followed(writers, name, tmp_path):
    victim, path = tmp_path / "victim", tmp_path / name
    victim.write_text("mine")
    path.symlink_to(victim)
    writers[name](path)
    assert victim.read_text() == "mine" and not path.is_symlink() and path.stat().st_size
    assert {p.name for p in tmp_path.iterdir()} == {"victim", name}


def test_partial_names_cannot_be_guessed_and_must_be_new(tmp_path, monkeypatch):
    names = set()
    for _ in range(2):
        with whole_file(tmp_path / "f") as f:
            names.add(f.name)
            assert os.path.dirname(f.name) == str(tmp_path)
    assert len(names) == 2
    monkeypatch.setattr(module.os, "urandom", bytes)                # as if it were guessed
    (tmp_path / f".f.{bytes(8).hex()}.part").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError, match="exists"):
        write_whole(tmp_path / "f", b"x")
    assert not (tmp_path / "elsewhere").exists()


def test_an_error_in_the_block_leaves_nothing(tmp_path):
    for error in (KeyboardInterrupt, ZeroDivisionError):
        with pytest.raises(error, match="ours"), whole_file(tmp_path / "f") as f:
            f.write(b"x")
            raise error("ours")
    with pytest.raises(FileNotFoundError, match="other"), whole_file(tmp_path / "f"):
        open(tmp_path / "deeper" / "other")             # its own error, not the file's
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError, match="no such folder"):
        write_whole(tmp_path / "none" / "f", b"")
    with pytest.raises(IsADirectoryError, match="a folder"):
        write_whole(tmp_path, b"")


def test_permissions(tmp_path):
    path = tmp_path / "f"
    old = os.umask(0o027)
    try:
        write_whole(path, "new")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(old)
    path.chmod(0o600)
    write_whole(path, "replaced")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text() == "replaced"


def test_devices_and_pipes_are_written_as_they_are(tmp_path):
    write_whole("/dev/null", b"x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    read, write = os.pipe()
    write_whole(f"/dev/fd/{write}", "through a pipe")
    os.close(write)
    with open(read, "rb") as f:
        assert f.read() == b"through a pipe"


# ---------------------------------------------------------------- text
def test_tables_compute_nothing(tmp_path):
    gg.measure(graph()).to_csv(tmp_path / "t.csv")
    text = (tmp_path / "t.csv").read_text()
    rows = list(csv.reader(text.splitlines()))
    assert rows[1][rows[0].index("name")] == r"'=a\x1b[2J" and "\x1b" not in text
    assert [defused(x) for x in ("=1+1", "+a", "-a", "@a", "a=1", "-5", "+1e3", -5, "")] == \
        ["'=1+1", "'+a", "'-a", "'@a", "a=1", "-5", "+1e3", -5, ""]


BAD = "\x1b]0;title\x07 \x9b2J \x7f \r \x00 \u202e \u2028 \ud800"


def test_control_characters_are_shown(tmp_path):
    assert printable("a\x1bb\x9b\r\n\t\u202e\ud800") == r"a\x1bb\x9b\r\n\t\u202e\ud800"
    assert printable("é 漢 \n\t\u200f", keep=TEXT) == "é 漢 \n\t\u200f"
    ctx = gg.Context()
    t = ctx.new_tensor(gg.F32, (4,), BAD + "\n")
    y = gg.silu(gg.set_name(gg.silu(t), BAD))
    g = gg.Graph(y)
    cpu = gg.init_backend("CPU")
    shown = [repr(t), repr(y), repr(ctx), repr(g), str(gg.measure(g)), g.draw().svg, g.dot(), g._repr_html_(),
             y._repr_html_(), gg.measure(g)._repr_html_(), ctx._repr_html_()]
    for fail in (lambda: gg.mul_mat(t, ctx.new_tensor(gg.F32, (3,))), t.numpy, lambda: setattr(t, "ne", 1),
                 lambda: gg.reshape_1d(t, 3)):
        with pytest.raises(gg.GgjitError, match=r"\\x1b") as e:
            fail()
        shown.append(str(e.value))
    gg.alloc_ctx_tensors(ctx, cpu)
    t.set(np.ones(4))
    with gg.profile() as p:
        gg.compute(y)
    sched = gg.Scheduler([cpu])
    sched.reserve(g)
    sched.graph_compute(g)
    shown += [str(p), p._repr_html_(), str(sched.explain()), sched.explain().to_html(), sched.explain().dot,
              cpu.graph_plan_create(sched_free(g, cpu)).dump()]
    for text in shown:
        assert printable(text, keep=TEXT) == text


def sched_free(g, cpu):
    """The graph with memory of its own."""
    gg.GraphAllocator(cpu).alloc_graph(g)
    return g


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL and locks of POSIX")
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    """Files that are being written, and those of other names, stay."""
    path = tmp_path / "m.gguf"
    code = ("import os, sys, time\nfrom ggjit.ops.core.whole_file import whole_file\n"
            "with whole_file(sys.argv[1]) as f:\n    f.write(b'x' * 1000); f.flush(); print(f.name, flush=True)\n"
            "    time.sleep(600)")
    killed, alive = (subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
                     for _ in range(2))
    try:
        left, written = killed.stdout.readline().strip(), alive.stdout.readline().strip()
        killed.kill()
        killed.wait()
        os.utime(left, (time.time() - 5,) * 2)
        os.utime(written, (time.time() - 5,) * 2)
        mine = tmp_path / ".m.gguf.notours.part"
        mine.write_bytes(b"")
        with whole_file(path) as f:
            f.write(b"new")
        assert not os.path.exists(left) and os.path.exists(written) and mine.exists()
        assert path.read_bytes() == b"new"
    finally:
        for p in (killed, alive):
            p.kill()
            p.wait()
            p.stdout.close()
