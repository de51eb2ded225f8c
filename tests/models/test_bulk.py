"""embed_texts and `ggjit embed --input`: parts, workers of Dask, going on where it stopped."""
import json
import os
import re
import signal

import numpy as np
import pytest
from helpers import small_bert
from helpers.clusters import workers

import ggjit as gg
from ggjit.cluster import Cluster
from ggjit.cluster.dask_worker import distributed
from ggjit.models import embed_texts, load_model
from ggjit.models.files import minilm
from ggjit.models.networks import bulk

TEXTS = [" ".join(["the", "dog", "dogs", "ran"][k % 4:]) * (1 + k % 2) for k in range(20)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    with pytest.MonkeyPatch.context() as m:
        small_bert.package(folder / "package")
        m.setattr(minilm, "source_dir", lambda: folder / "package")
        m.setattr(minilm, "cache_dir", lambda: folder)
        return str(minilm.minilm_path(progress=False))


@pytest.fixture(scope="module")
def want(path):
    with load_model(path) as m:
        return m.embed(TEXTS)


@pytest.fixture(scope="module")
def cluster():
    with distributed.Client(processes=False, n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0",
                            set_as_default=False) as client:
        yield Cluster([], client)


@pytest.mark.parametrize("n_part", [1, 7, 64])
def test_parts_here_give_the_models_bits(path, want, n_part):
    done = []
    np.testing.assert_array_equal(embed_texts(path, TEXTS, n_part=n_part, progress=done.append), want)
    assert sum(done) == len(TEXTS) and max(done) <= n_part
    assert embed_texts(path, [], n_part=n_part).shape == (0, 32)


def test_parts_on_workers_give_the_same_bits(path, want, cluster):
    np.testing.assert_array_equal(embed_texts(path, TEXTS, cluster, n_part=3), want)
    with pytest.raises(gg.ParamError, match="do not fit the context"):
        embed_texts(path, ["the " * 50], cluster)
    np.testing.assert_array_equal(embed_texts(path, TEXTS, cluster, n_part=20), want)


def test_a_stopped_run_goes_on(path, want, cluster, tmp_path, monkeypatch):
    keep, calls, done = tmp_path / "keep", [], []

    class Stop(Exception):
        pass

    def stop(n):
        done.append(n)
        if sum(done) >= 9:
            raise Stop
    with pytest.raises(Stop):
        embed_texts(path, TEXTS, keep=keep, n_part=3, progress=stop)
    (folder,) = keep.iterdir()
    assert len(list(folder.iterdir())) == 3
    computed = bulk._here
    monkeypatch.setattr(bulk, "_here", lambda *args: calls.extend(args[3]) or computed(*args))
    np.testing.assert_array_equal(embed_texts(path, TEXTS, keep=keep, n_part=3), want)
    assert calls == [3, 4, 5, 6]
    embed_texts(path, TEXTS[:3], keep=keep, n_part=3)           # other texts: other parts
    assert calls == [3, 4, 5, 6, 0] and len(list(keep.iterdir())) == 2
    (folder / "0.npy").write_bytes(b"x")
    with pytest.raises(gg.BadFile, match="0.npy.*delete it"):
        embed_texts(path, TEXTS, keep=keep, n_part=3)
    bulk.drop_kept(keep)
    assert not keep.exists()


def test_a_worker_with_another_file_says_so(path, monkeypatch):
    with pytest.raises(gg.ModelError, match="another file under this path"):
        bulk.embed_part(path, "1-ab", ["the dog"])
    with pytest.raises(gg.ModelError, match="cannot read it"):
        bulk.embed_part(path + ".gone", "1-ab", ["the dog"])


def test_what_cannot_be_embedded(path):
    for texts in ("a text", [1], None):
        with pytest.raises(gg.TypeMismatch, match="list of strings"):
            embed_texts(path, texts)
    with pytest.raises(gg.ParamError, match="n_part"):
        embed_texts(path, TEXTS, n_part=0)
    with workers(n=1) as cl, pytest.raises(gg.ParamError, match="no Dask scheduler"):
        embed_texts(path, TEXTS, cl)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt"])
def test_the_command_reads_files_of_texts(path, want, kind, command, tmp_path):
    source, out = tmp_path / f"in.{kind}", tmp_path / "out.npy"
    lines = {"jsonl": [json.dumps({"text": t, "id": 1}) for t in TEXTS], "txt": TEXTS,
             "csv": ["id,text", *(f'1,"{t}"' for t in TEXTS)]}[kind]
    source.write_text("\n".join(lines) + "\n", "utf-8")
    r = command("embed", "-m", path, "--input", source, "--output", out, "--json")
    assert r.returncode == 0 and json.loads(r.stdout)["texts"] == len(TEXTS), r.stderr
    np.testing.assert_array_equal(np.load(out), want)
    assert os.listdir(tmp_path) in ([source.name, out.name], [out.name, source.name])
    rows = tmp_path / "out.jsonl"
    assert command("embed", "-m", path, "--input", source, "--output", rows).returncode == 0
    np.testing.assert_array_equal([json.loads(line)["embedding"] for line in rows.open()], want)


@pytest.mark.parametrize("args,words", [
    ([], "TEXT..., or --input"), (["--output", "x.npy", "a"], "TEXT..., or --input"),
    (["--input", "a.jsonl"], "expected a file"),
    (["--input", "a.doc", "--output", "x.npy"], "expected a file .jsonl"),
    (["--input", "{}", "--output", "x.npy"], "line 1: no text under 'text' .id.; name the column"),
    (["--input", "{}", "--output", "x.npy", "a"], "not both")])
def test_files_that_are_none(path, args, words, command, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"id": 1}\n')
    r = command("embed", "-m", path, *(str(source) if a == "{}" else a for a in args))
    assert r.returncode in (1, 2) and not r.stdout

    assert re.search(words, r.stderr), r.stderr


def test_broken_json_names_the_file(path, command, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": ')
    r = command("embed", "-m", path, "--input", source, "--output", tmp_path / "o.npy")
    assert r.returncode == 1 and "a.jsonl" in r.stderr and "UTF-8 text of a .jsonl file" in r.stderr


@pytest.mark.slow
def test_the_parts_of_a_killed_worker_are_computed_by_another(path, want):
    with gg.cluster.local(n_workers=2) as cl:
        killed = []

        def kill(n):
            if not killed:
                killed.append(next(iter(cl.client.run(os.getpid).values())))
                os.kill(killed[0], signal.SIGKILL)
        texts = TEXTS * 10
        got = embed_texts(path, texts, cl, n_part=2, progress=lambda n: n and kill(n))
        np.testing.assert_array_equal(got, np.tile(want, (10, 1)))
        assert killed
