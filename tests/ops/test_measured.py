"""Files of measured choices: what is absent, damaged, unwritable, or written by several at once."""
import json
import os
import subprocess
import sys
import threading
import warnings

import pytest

from ggjit.ops.native import measured
from ggjit.ops.native.measured import MeasuredFile


def positive(found):
    found = {name: float(x) for name, x in found.items()}
    if min(found.values()) <= 0:
        raise ValueError("seconds must be positive")
    return found


@pytest.fixture
def file(monkeypatch, tmp_path):
    monkeypatch.setattr(measured, "cache_dir", lambda: tmp_path / "cache")
    return MeasuredFile("kernels", "reads", "0123", positive)


def test_what_is_written_is_read(file, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert file.read() is None                          # absent: nothing to warn of
        assert file.write({"a": 1.5}) and file.read() == {"a": 1.5}
        assert file.add({"b": 2}) and file.add({"a": 3}) and file.read() == {"a": 3, "b": 2}
        assert file.write({"c": 1}) and file.read() == {"c": 1}
    assert file.path == tmp_path / "cache" / "kernels" / "reads-0123.json"
    assert [p.name for p in file.path.parent.iterdir()] == [file.path.name]
    if os.name == "posix":
        assert file.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content,reason", [
    (b"", "JSONDecodeError"), (b"{", "JSONDecodeError"), (b"null", "AttributeError"),
    (b"[" * 100_000, "ValueError: values are nested too deeply"),
    (b"\xff\xfe", "UnicodeDecodeError"), (b'{"a": "x"}', "ValueError"), (b'{"a": 0}', "seconds must be positive")])
def test_a_damaged_file_is_named_with_the_reason_and_written_anew(file, content, reason):
    file.write({"a": 1})
    file.path.write_bytes(content)
    with pytest.warns(UserWarning, match=f"{file.path.name} is not used .*{reason}"):
        assert file.read() is None
    with pytest.warns(UserWarning):
        assert file.add({"b": 2})
    assert file.read() == {"b": 2}


def test_what_cannot_be_read_or_written_changes_nothing(file):
    file.path.mkdir(parents=True)                           # a folder of the file's name
    with pytest.warns(UserWarning, match="not used"):
        assert file.read() is None
    assert not file.write({"a": 1}) and file.path.is_dir()
    file.path.rmdir()
    file.path.parent.rmdir()
    file.path.parent.write_text("a file, where the folder should be")
    assert file.read() is None and not file.write({"a": 1}) and not file.add({"a": 1})


def test_threads_that_write_at_once_lose_nothing(file):
    threads = [threading.Thread(target=lambda i=i: [file.add({f"{i} {j}": 1}) for j in range(5)]) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(file.read()) == 30


@pytest.mark.skipif(os.name != "posix", reason="without fcntl the later of two writers stays")
def test_processes_that_write_at_once_lose_nothing(file):
    code = ("import sys; from ggjit.ops.native.measured import MeasuredFile\n"
            "f = MeasuredFile('kernels', 'reads', '0123', dict)\n"
            "assert all(f.add({f'{sys.argv[1]} {j}': 1}) for j in range(10))")
    env = {**os.environ, "GGJIT_CACHE_DIR": str(file.path.parent.parent)}
    writers = [subprocess.Popen([sys.executable, "-c", code, str(i)], env=env) for i in range(3)]
    assert [w.wait(timeout=300) for w in writers] == [0, 0, 0]
    assert len(json.loads(file.path.read_text())) == 30
