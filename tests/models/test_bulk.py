"""embed_texts and `ggjit embed --input`: parts, workers of Dask, going on where it stopped."""
import json
import os
import re
import signal
import sys

import numpy as np
import pytest
from helpers import small_bert
from helpers.clusters import workers

import ggjit as gg
from ggjit.cluster import Cluster
from ggjit.cluster.dask_worker import distributed
from ggjit.models import embed_texts, generate_texts, load_model
from ggjit.models.files import minilm
from ggjit.models.networks import bulk
from ggjit.tools.command.texts import texts_of

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
    monkeypatch.setattr(bulk, "_here", lambda *args: calls.extend(args[2]) or computed(*args))
    np.testing.assert_array_equal(embed_texts(path, TEXTS, keep=keep, n_part=3), want)
    assert calls == [3, 4, 5, 6]
    embed_texts(path, TEXTS[:3], keep=keep, n_part=3)           # other texts: other parts
    assert calls == [3, 4, 5, 6, 0] and len(list(keep.iterdir())) == 2
    (folder / "0.npy").write_bytes(b"x")
    with pytest.raises(gg.BadFile, match="0.npy.*delete it"):
        embed_texts(path, TEXTS, keep=keep, n_part=3)
    bulk.drop_kept(keep)
    assert not keep.exists()


def test_a_worker_with_another_file_says_so(path):
    for name, match in ((path, "another file under this path"), (path + ".gone", "cannot read it")):
        with pytest.raises(gg.ModelError, match=match):
            bulk.done_part(bulk.BulkTask(bulk.EmbeddingResults, name, "1-ab", {}, {}), ["the dog"])


def test_a_file_is_known_by_all_its_bytes(tmp_path):
    """Also where only a weight in the middle differs, or changes later."""
    path, stamps = tmp_path / "m.gguf", set()
    for k in range(3):
        path.write_bytes(bytes(3 << 20) + bytes([k]) + bytes(3 << 20))
        stamps.add(bulk._stamp(path))
    assert len(stamps) == 3


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


# ---------------------------------------------------------------- texts that continue texts
PROMPTS, GREEDY = ["It was", "She had", "Mr.", "The", "A"], {"n_predict": 6, "temp": 0}


@pytest.fixture(scope="module")
def answers():
    with load_model() as m:
        runs = m.generate(PROMPTS, **GREEDY)
        assert list(runs)
        return runs.texts


def test_texts_continued_on_workers_are_the_same_and_a_stopped_run_goes_on(answers, cluster, tmp_path, monkeypatch):
    assert gg.cluster.generate is generate_texts and gg.cluster.embed is embed_texts
    assert gg.cluster.generate(None, PROMPTS, cluster, n_part=2, **GREEDY) == answers

    def stop(n):
        if n == 2:
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        generate_texts(None, PROMPTS, keep=tmp_path, n_part=2, progress=stop, **GREEDY)
    calls, computed = [], bulk._here
    monkeypatch.setattr(bulk, "_here", lambda *args: calls.extend(args[2]) or computed(*args))
    assert generate_texts(None, PROMPTS, keep=tmp_path, n_part=2, **GREEDY) == answers and calls == [1, 2]
    generate_texts(None, PROMPTS[:2], keep=tmp_path, n_part=2, **{**GREEDY, "n_predict": 5})
    assert len(list(tmp_path.iterdir())) == 2           # other options: other parts
    with pytest.raises(gg.GgjitError, match="n_predict"):
        generate_texts(None, PROMPTS, n_predict=-7)
    with pytest.raises(gg.TypeMismatch, match="path of a GGUF file"):
        embed_texts(None, PROMPTS)


def test_the_command_continues_texts_of_a_file(answers, command, tmp_path):
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("\n".join(PROMPTS) + "\n")
    r = command("generate", "--input", source, "--output", out, "-n", "6", "--temp", "0")
    assert r.returncode == 0, r.stderr
    assert [json.loads(line) for line in out.open()] == [
        {"text": text, "answer": answer} for text, answer in zip(PROMPTS, answers, strict=True)]
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "out.jsonl"]
    for args, words in (([], "--prompt TEXT, or --input"), (["--input", source], "expected a file .jsonl or .parquet"),
                        (["--input", source, "--output", out, "-p", "a"], "goes without --prompt")):
        r = command("generate", *args)
        assert r.returncode in (1, 2) and words in r.stderr


# ---------------------------------------------------------------- parquet
def test_parquet_in_and_out(path, want, answers, command, tmp_path, need):
    need("pyarrow", "reads and writes parquet")
    import pyarrow
    from pyarrow import parquet
    source, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    parquet.write_table(pyarrow.table({"id": list(range(len(TEXTS))), "words": TEXTS}), source)
    r = command("embed", "-m", path, "--input", source, "--output", out, "--column", "words")
    assert r.returncode == 0, r.stderr
    table = parquet.read_table(out)
    np.testing.assert_array_equal(np.array(table["embedding"].to_pylist(), np.float32), want)
    assert table["text"].to_pylist() == TEXTS and table.schema.field("embedding").type.list_size == want.shape[1]
    parquet.write_table(pyarrow.table({"text": PROMPTS}), source)
    r = command("generate", "--input", source, "--output", out, "-n", "6", "--temp", "0")
    assert r.returncode == 0 and parquet.read_table(out)["answer"].to_pylist() == answers, r.stderr
    for content, words in ((None, "no column 'none' (text)"), (b"PAR1, not really", "expected a .parquet file")):
        if content is not None:
            source.write_bytes(content)
        r = command("embed", "-m", path, "--input", source, "--output", out, "--column", "none")
        assert r.returncode == 1 and words in r.stderr and "Traceback" not in r.stderr, r.stderr


def test_without_pyarrow_parquet_says_what_to_install(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(gg.MissingExtra, match=r"pip install 'ggjit\[parquet\]'"):
        texts_of(str(tmp_path / "a.parquet"), "text")


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
    assert r.returncode == 1 and "a.jsonl line 1" in r.stderr and "UTF-8 text of a .jsonl file" in r.stderr


def test_results_do_not_replace_the_texts(path, command, tmp_path):
    source, link = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    source.write_text('{"text": "a"}\n')
    link.symlink_to(source)
    for out in (source, link):
        r = command("embed", "-m", path, "--input", source, "--output", out)
        assert r.returncode == 2 and "is the --input" in r.stderr and source.read_text() == '{"text": "a"}\n'


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
