"""Files made from files: quantised, edited, split, joined; and what can go wrong."""
import dataclasses
import errno
import hashlib
import os
import re
import resource
import signal

import numpy as np
import pytest
from helpers import tiny_model
from helpers.tiny_moe import write as write_moe

import ggjit as gg
from ggjit.models import edit_gguf, load_gguf, load_imatrix, load_model, quantize_gguf, save_gguf
from ggjit.models.files import rewrite
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.files.imatrix import Imatrix, ImportanceSums
from ggjit.models.files.save import CannotWrite

IDS = [1, 5, 9, 2, 7]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("rewrite") / "tiny.gguf")


def importances(path, seed=3):
    """An Imatrix for every matrix of the layers."""
    rng, sums = np.random.default_rng(seed), {}
    for name, info in GGUFFile(path).tensors.items():
        if len(info.ne) > 1 and name.startswith("blk."):
            n = info.ne[2] if len(info.ne) > 2 else 1
            sums[name] = ImportanceSums(rng.random((n, info.ne[0]), np.float32) + np.float32(0.1),
                                        np.full(n, 2, np.float32))
    return Imatrix(sums, ("a text",), 4, 64, "some.gguf")


def left(folder):
    return sorted(os.listdir(folder))


# ---------------------------------------------------------------- quantising
def test_tensors_are_what_gg_quantize_makes(tiny, tmp_path):
    matrix = importances(tiny)
    report = quantize_gguf(tiny, tmp_path / "q.gguf", "Q4_0", matrix, progress=False)
    old, new = GGUFFile(tiny), GGUFFile(tmp_path / "q.gguf")
    assert report["types"] == {name: t.type.name for name, t in new.tensors.items()} and report["imatrix"] == 14
    assert report["types"]["output_norm.weight"] == "f32" and report["types"]["token_embd.weight"] == "q8_0"
    for name, info in new.tensors.items():
        source = old.tensor_bytes(name).view(np.float32).reshape(info.shape)
        own = matrix.sums[name].importances if name in matrix.sums else None
        want = source if info.type is old.tensors[name].type else gg.quantize(info.type, source, own)
        assert new.tensor_bytes(name).tobytes() == want.tobytes(), name
    assert new.metadata["general.file_type"] == 2 and new.metadata["quantize.imatrix.entries_count"] == 14
    assert (new.metadata["quantize.imatrix.file"], new.metadata["quantize.imatrix.dataset"]) == ("some.gguf", "a text")
    with load_model(tmp_path / "q.gguf", n_threads=1) as m:
        assert m.logits(IDS).shape == (5, tiny_model.VOCAB)


def plain_model(path):
    """A file that only this package had a hand in; the norm's dimensions of length 1 are left out of what is made."""
    rng = np.random.default_rng(5)
    names = ("token_embd", "output", "blk.0.ffn_down", "blk.0.attn_v", "blk.1.attn_q")
    tensors = {f"{n}.weight": rng.integers(-99, 99, (3, 256)).astype(np.float32) / 64 for n in names}
    save_gguf(path, tensors | {"output_norm.weight": np.ones((1, 1, 256), np.float32)}, {
        "general.architecture": "llama", "general.file_type": 0, "general.name": "plain", "llama.block_count": 2,
        "llama.context_length": 8, "llama.embedding_length": 256, "llama.feed_forward_length": 256,
        "llama.attention.head_count": 4, "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": 3})


@pytest.mark.parametrize("type, digest", [("Q8_0", "8bb7f552"), ("Q4_K_M", "23ef480f"), ("F16", "9a955ddd")])
def test_whole_files_are_llamacpps(type, digest, tmp_path):
    """The digests are of files that llama_model_quantize wrote."""
    plain_model(tmp_path / "plain.gguf")
    quantize_gguf(tmp_path / "plain.gguf", tmp_path / "q.gguf", type, progress=False)
    assert hashlib.sha256((tmp_path / "q.gguf").read_bytes()).hexdigest()[:8] == digest


def test_pieces_make_no_difference(tmp_path, monkeypatch):
    path = write_moe(tmp_path / "moe.gguf", type="F16")
    matrix = importances(path)
    quantize_gguf(path, tmp_path / "a.gguf", "Q5_1", matrix, progress=False)
    monkeypatch.setattr(rewrite, "PIECE", 200)
    monkeypatch.setattr(rewrite, "COPIED", 100)
    quantize_gguf(path, tmp_path / "b.gguf", "Q5_1", matrix, progress=False)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    new, name = GGUFFile(tmp_path / "a.gguf"), "blk.1.ffn_down_exps.weight"
    source = GGUFFile(path).tensor_bytes(name).view(np.float16).astype(np.float32).reshape(new.tensors[name].shape)
    want = [gg.quantize(gg.Q5_1, x, w) for x, w in zip(source, matrix.sums[name].importances.reshape(6, -1),
                                                        strict=True)]
    assert new.tensor_bytes(name).tobytes() == b"".join(w.tobytes() for w in want)


def test_options(tiny, tmp_path):
    out = tmp_path / "q.gguf"
    types = quantize_gguf(tiny, out, "Q4_0", tensor_types={r"blk\.0\..*_down": "q5_1", "attn_v": gg.Q8_0},
                          embedding_type="f16", progress=False)["types"]
    assert (types["blk.0.ffn_down.weight"], types["blk.1.ffn_down.weight"], types["blk.1.attn_v.weight"],
            types["token_embd.weight"]) == ("q5_1", "q4_0", "q8_0", "f16")
    assert quantize_gguf(tiny, out, "copy", force=True, progress=False)["types"]["blk.0.attn_q.weight"] == "f32"
    assert out.read_bytes() == tiny_in_llama_order(tiny, tmp_path)


def tiny_in_llama_order(tiny, tmp_path):
    tensors, metadata = load_gguf(tiny)
    save_gguf(tmp_path / "sorted.gguf", {n: tensors[n] for n in sorted(tensors, key=lambda n: rewrite._llama_order(
        GGUFFile(tiny).tensors[n]))}, {k: np.uint32(v) if isinstance(v, int) else v for k, v in metadata.items()})
    return (tmp_path / "sorted.gguf").read_bytes()


@pytest.mark.parametrize("call, error, message", [
    (dict(type="Q4_K_X"), gg.ParamError, "no type 'Q4_K_X' of a file .did you mean Q4_K_"),
    (dict(type="Q4_0", tensor_types={"ffn_dwn": "q8_0"}), gg.ParamError, "no tensor's name has 'ffn_dwn'"),
    (dict(type="Q4_0", tensor_types={"(": "q8_0"}), gg.ParamError, "not a regular expression"),
    (dict(type="Q4_0", tensor_types={"ffn": "q4_kk"}), gg.ParamError, "no tensor type 'q4_kk' .did you mean q4_k"),
    (dict(type="Q4_0", imatrix=3), gg.ParamError, "imatrix takes the path of a file or an Imatrix, got int"),
    (dict(type="COPY", tensor_types={"ffn": "q8_0"}), gg.ParamError, "COPY gives every .* tensor_types .* be ignored"),
    (dict(type="F16", tensor_types={"ffn": "q8_0"}), gg.ParamError, "F16 gives every tensor its type"),
    (dict(type="COPY", pure=True), gg.ParamError, "pure .--pure. would be ignored"),
    (dict(type="Q4_0", leave_output=True, output_type="q8_0"), gg.ParamError, "leave_output .* leave one of them out"),
    (dict(type="Q4_0", keep_split=True, max_nbytes=100), gg.ParamError, "keep_split .* leave one of them out"),
    (dict(type="Q4_0", tensor_types={"ffn": "q8_K"}), gg.ParamError, "no tensor type 'q8_K'"),
    (dict(type="Q4_0", tensor_types=["ffn"]), gg.TypeMismatch, "tensor_types must be a dict"),
    (dict(type="Q4_0", output_type=""), gg.ParamError, "no tensor type ''"),
    (dict(path="a\0b", type="Q4_0"), gg.BadFile, "is not a path of a file"),
    (dict(type="Q4_0", max_nbytes=0), gg.ParamError, "max_nbytes is a positive number"),
    (dict(type="Q4_0", tipe=1), gg.TypeMismatch, "tipe")])
def test_refusals_before_anything_is_written(call, error, message, tiny, tmp_path):
    with pytest.raises(error, match=message):
        quantize_gguf(**{"path": tiny, "out": tmp_path / "q.gguf", "progress": False, **call})
    assert left(tmp_path) == []


def test_types_that_need_importances(tmp_path):
    rows = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    save_gguf(tmp_path / "m.gguf", {"token_embd.weight": rows, "blk.0.ffn_up.weight": rows}, {
        "general.architecture": "llama", "llama.block_count": 1, "llama.attention.head_count": 4})
    with pytest.raises(gg.ModelError, match="'blk.0.ffn_up.weight' would be IQ2_XS without an importance matrix"):
        quantize_gguf(tmp_path / "m.gguf", tmp_path / "q.gguf", "IQ2_XS")
    other = Imatrix({"blk.7.ffn_up.weight": ImportanceSums(np.ones((1, 256), np.float32), np.ones(1, np.float32))},
                    path="x.gguf")
    with pytest.raises(gg.ModelError, match="x.gguf has none for it"):
        quantize_gguf(tmp_path / "m.gguf", tmp_path / "q.gguf", "IQ2_XS", other)
    with pytest.raises(gg.ModelError, match="x.gguf: has importances for none of the 2 matrices"):
        quantize_gguf(tmp_path / "m.gguf", tmp_path / "q.gguf", "Q4_0", other)
    wrong = Imatrix({"blk.0.ffn_up.weight": ImportanceSums(np.ones((1, 64), np.float32), np.ones(1, np.float32))},
                    path="x.gguf")
    with pytest.raises(gg.ModelError, match="64 importances of 'blk.0.ffn_up.weight', .* needs 256; .* another model"):
        quantize_gguf(tmp_path / "m.gguf", tmp_path / "q.gguf", "Q4_0", wrong)
    assert left(tmp_path) == ["m.gguf"]


def test_quantised_input_has_to_be_allowed(tmp_path):
    path = tiny_model.write(tmp_path / "q8.gguf", type="Q8_0")
    with pytest.raises(gg.ParamError, match="is Q8_0 already, .*--allow-requantize"):
        quantize_gguf(path, tmp_path / "q.gguf", "Q4_0")
    assert quantize_gguf(path, tmp_path / "q.gguf", "Q4_0", requantize=True, progress=False)["nbytes"] < 60_000


def test_damaged_numbers_are_named(tiny, tmp_path):
    raw = bytearray(open(tiny, "rb").read())
    info = GGUFFile(tiny).tensors["blk.1.ffn_up.weight"]
    raw[info.offs + 40:info.offs + 44] = np.float32(np.nan).tobytes()
    (tmp_path / "nan.gguf").write_bytes(raw)
    with pytest.raises(gg.BadFile, match="nan.gguf: tensor 'blk.1.ffn_up.weight' as F32: the value is infinite"):
        quantize_gguf(tmp_path / "nan.gguf", tmp_path / "q.gguf", "Q8_0", progress=False)
    (tmp_path / "cut.gguf").write_bytes(raw[:-100])
    with pytest.raises(gg.BadFile, match="cut.gguf: tensor .*truncated"):
        quantize_gguf(tmp_path / "cut.gguf", tmp_path / "q.gguf", "Q8_0")
    assert left(tmp_path) == ["cut.gguf", "nan.gguf"]


# ---------------------------------------------------------------- nothing is left behind, nothing is overwritten
def test_existing_files_stay(tiny, tmp_path):
    (tmp_path / "q.gguf").write_text("mine")
    with pytest.raises(CannotWrite, match=r"q.gguf exists already; .*--force"):
        quantize_gguf(tiny, tmp_path / "q.gguf", "Q8_0")
    (tmp_path / "p-00002-of-00004.gguf").write_text("mine")
    with pytest.raises(CannotWrite, match="p-00002-of-00004.gguf exists already"):
        edit_gguf(tiny, tmp_path / "p.gguf", max_nbytes=GGUFFile(tiny).map().size // 3)
    assert left(tmp_path) == ["p-00002-of-00004.gguf", "q.gguf"] and (tmp_path / "q.gguf").read_text() == "mine"


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="the system has no limit for the size of a file")
def test_a_full_disk_leaves_nothing(tiny, tmp_path):
    (tmp_path / "q.gguf").write_text("mine")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CannotWrite, match=r"q.gguf: File too large, at tensor 'blk.*nothing is left of it"):
            quantize_gguf(tiny, tmp_path / "q.gguf", "F16", force=True, progress=False)
        with pytest.raises(CannotWrite, match="File too large"):
            edit_gguf(tiny, tmp_path / "p.gguf", max_nbytes=120_000, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert left(tmp_path) == ["q.gguf"] and (tmp_path / "q.gguf").read_text() == "mine"


def test_too_little_space_is_noticed_first(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: _Usage)
    with pytest.raises(CannotWrite, match=r"q.gguf: [\d,]+ bytes are needed, 1,000 are free there"):
        quantize_gguf(tiny, tmp_path / "q.gguf", "Q8_0")
    assert left(tmp_path) == []


class _Usage:
    free = 1000


def test_ctrl_c_leaves_nothing(tiny, tmp_path, monkeypatch):
    calls = []

    def convert(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return gg.quantize(*args)
    monkeypatch.setattr(rewrite, "quantize", convert)
    with pytest.raises(KeyboardInterrupt):
        quantize_gguf(tiny, tmp_path / "q.gguf", "Q8_0", progress=False)
    assert left(tmp_path) == []


# ---------------------------------------------------------------- several files
def test_split_read_and_joined(tiny, tmp_path):
    n = len(GGUFFile(tiny).tensors)
    paths = edit_gguf(tiny, tmp_path / "p.gguf", max_nbytes=80_000, progress=False)["paths"]
    assert [os.path.basename(p) for p in paths] == [f"p-{i:05d}-of-{len(paths):05d}.gguf" for i in
                                                    range(1, len(paths) + 1)] and len(paths) > 2
    file = GGUFFile(paths[0])
    assert len(file.parts) == len(paths) and len(file.tensors) == n and "parts" not in repr(file)
    assert file.metadata["split.count"] == len(paths) and list(file.parts[1].metadata) == [
        "split.no", "split.count", "split.tensors.count"]
    whole, parts = load_gguf(tiny)[0], load_gguf(paths[0])[0]
    assert all(parts[name].bytes() == t.bytes() for name, t in whole.items())
    with load_model(tiny, n_threads=1) as a, load_model(paths[0], n_threads=1, repack=True) as b, \
            load_model(paths[0], n_threads=1, validate=True) as c:
        np.testing.assert_allclose(b.logits(IDS), a.logits(IDS), rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(c.logits(IDS), a.logits(IDS))
    edit_gguf(paths[0], tmp_path / "back.gguf", progress=False)
    assert (tmp_path / "back.gguf").read_bytes() == open(tiny, "rb").read()
    kept = quantize_gguf(paths[0], tmp_path / "q.gguf", "Q8_0", keep_split=True, progress=False)["paths"]
    assert len(kept) == len(paths)
    quantize_gguf(kept[0], tmp_path / "q1.gguf", "COPY", progress=False)
    quantize_gguf(tiny, tmp_path / "q2.gguf", "Q8_0", progress=False)
    one, other = GGUFFile(tmp_path / "q1.gguf"), GGUFFile(tmp_path / "q2.gguf")
    assert all(one.tensor_bytes(n).tobytes() == other.tensor_bytes(n).tobytes() for n in other.tensors)


@pytest.mark.parametrize("before", [True, False])
def test_all_parts_or_none(tiny, tmp_path, monkeypatch, before):
    """The last part cannot be renamed: the others do not stay."""
    def run():
        return edit_gguf(tiny, tmp_path / "p.gguf", max_nbytes=80_000, progress=False, force=True)["paths"]
    old = {}
    if before:
        for i, path in enumerate(run()[:-1]):           # of a model before it, of which one part is gone
            old[path] = b"part %d" % i
        for path in tmp_path.glob("p-*"):
            path.unlink()
        for path, data in old.items():
            with open(path, "wb") as f:
                f.write(data)
    replace, calls = os.replace, []

    def fails(a, b):
        calls.append(b)
        if len(calls) == 3:
            raise OSError(errno.EIO, "Input/output error")
        return replace(a, b)
    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(CannotWrite, match="Input/output error, at the end; nothing is left"):
        run()
    left = {str(p): p.read_bytes() for p in tmp_path.iterdir() if p.name.startswith(("p-", ".p-"))}
    assert left == old and len(calls) >= 3
    monkeypatch.undo()
    run()
    assert not list(tmp_path.glob(".*"))


def test_broken_splits(tiny, tmp_path):
    paths = edit_gguf(tiny, tmp_path / "p.gguf", max_nbytes=130_000, progress=False)["paths"]
    n = len(paths)
    with pytest.raises(gg.BadFile, match=f"part 2 of {n}; open the first one, .*p-00001-of"):
        load_model(paths[1])
    second = open(paths[1], "rb").read()
    os.unlink(paths[1])
    with pytest.raises(gg.BadFile, match=f"of the model's {n} files 1 are missing: .*p-00002-of-.*into one folder"):
        load_model(paths[0])
    with open(paths[1], "wb") as f:
        f.write(second[:-50])
    with pytest.raises(gg.BadFile, match="p-00002-of-.*truncated"):
        load_model(paths[0])
    with open(paths[1], "wb") as f:
        f.write(open(paths[2], "rb").read())
    with pytest.raises(gg.BadFile, match="p-00002-of-.*split.no and split.count are 2 and"):
        load_model(paths[0])
    with open(paths[1], "wb") as f:
        f.write(second)
    os.rename(paths[0], tmp_path / "first.gguf")
    with pytest.raises(gg.BadFile, match="part 1 of a model in .* which its name does not say"):
        load_model(tmp_path / "first.gguf")
    os.rename(tmp_path / "first.gguf", paths[0])
    key = b"split.tensors.count" + (5).to_bytes(4, "little")
    first = open(paths[0], "rb").read()
    with open(paths[0], "wb") as f:
        f.write(first.replace(key + len(GGUFFile(tiny).tensors).to_bytes(4, "little"), key + b"\x09\0\0\0"))
    with pytest.raises(gg.BadFile, match=r"the parts hold \d+ tensors, split.tensors.count is 9"):
        load_gguf(paths[0])
    with open(paths[0], "wb") as f:
        f.write(first)
    last = open(paths[-1], "rb").read()
    with open(paths[-1], "wb") as f:
        f.write(last.replace(b"blk.1.", b"blk.0."))
    with pytest.raises(gg.BadFile, match="tensor 'blk.0.*' is in another part as well"):
        load_gguf(paths[0])


# ---------------------------------------------------------------- editing
def test_edits(tiny, tmp_path):
    out = tmp_path / "e.gguf"
    edit_gguf(tiny, out, {"general.name": "mine", "llama.context_length": 32, "new": [1, 2]},
              ["llama.rope.freq_base"], {"output_norm.weight": "renamed"}, {"blk.0.ffn_up.weight": "q8_0"},
              progress=False)
    old, new = GGUFFile(tiny), GGUFFile(out)
    assert list(new.tensors) == [n.replace("output_norm.weight", "renamed") for n in old.tensors]
    assert new.tensors["blk.0.ffn_up.weight"].type is gg.Q8_0 and new.get("general.name") == "mine"
    assert new.raw_value("llama.context_length") == old.raw_value("llama.context_length")[:4] + b"\x20\0\0\0"
    assert set(old.metadata) - set(new.metadata) == {"llama.rope.freq_base"}
    kept = [k for k in old.metadata if k not in ("llama.rope.freq_base", "llama.context_length")]
    assert all(new.raw_value(k) == old.raw_value(k) for k in kept)
    edit_gguf(out, out, {"general.name": "again"}, force=True, progress=False)          # over the input
    assert GGUFFile(out).get("general.name") == "again" and left(tmp_path) == ["e.gguf"]
    edit_gguf(tiny, out, {"general.alignment": 256}, force=True, progress=False)
    assert all(t.offs % 256 == 0 for t in GGUFFile(out).tensors.values())


@pytest.mark.parametrize("call, message", [
    (dict(remove_keys=["general.nam"]), r"no key 'general.nam'.* lists them"),
    (dict(remove_keys="general.name"), "remove_keys is a list of keys"),
    (dict(rename={"blk.0.ffn_u.weight": "x"}), r"no tensor 'blk.0.ffn_u.weight' \(did you mean blk.0.ffn_up"),
    (dict(rename={"output_norm.weight": "token_embd.weight"}), "two tensors would be called 'token_embd.weight'"),
    (dict(rename={"output_norm.weight": "x" * 64}), "has 64 bytes, 1 to 63"),
    (dict(set_types={"blk.0.ffn_up.weight": "q4_K"}), "rows of 64, not a multiple of Q4_K's block of 256"),
    (dict(rename={"output_norm.weight": ""}), "tensor name '' has 0 bytes"),
    (dict(set_keys={"llama.block_count": 3}, remove_keys=["llama.block_count"]), "removed and to be set; leave"),
    (dict(set_types={"blk.0.ffn_up.weight": "i32"}), "no tensor type 'i32'"),
    (dict(set_types={"blk.0.ffn_up.weight": "iq2_xxs"}), "IQ2_XXS without importances, which is garbage"),
    (dict(set_keys={"llama.block_count": "three"}), "'llama.block_count' holds .*, and 'three' is of another kind"),
    (dict(set_keys={"general.architecture": 7}), "holds 'llama', and 7 is of another kind"),
    (dict(set_keys={"general.alignment": 1 << 40}), "must be a power of two, got 1099511627776"),
    (dict(set_keys={"general.alignment": 3}), "must be a power of two, got 3")])
def test_edits_that_cannot_be(call, message, tiny, tmp_path):
    with pytest.raises(gg.ParamError, match=message):
        edit_gguf(tiny, tmp_path / "e.gguf", **call)
    assert left(tmp_path) == []


@pytest.mark.parametrize("length", [1, 33, 65, 97])
def test_tensors_stay_where_readers_look_without_the_key_of_alignment(length, tmp_path):
    rows = np.arange(64, dtype=np.float32).reshape(2, 32)
    save_gguf(tmp_path / "m.gguf", {"a": rows, "b": -rows}, {"general.alignment": 128, "note": "x" * length})
    edit_gguf(tmp_path / "m.gguf", tmp_path / "n.gguf", remove_keys=["general.alignment"], progress=False)
    tensors, _ = load_gguf(tmp_path / "n.gguf")
    np.testing.assert_array_equal(tensors["a"].numpy(), rows)
    np.testing.assert_array_equal(tensors["b"].numpy(), -rows)


# ---------------------------------------------------------------- importance matrices
def test_importances_in_a_file_whose_name_is_no_unicode(tiny, tmp_path):
    matrix = importances(tiny)
    matrix.path = "im\udcff.gguf"
    quantize_gguf(tiny, tmp_path / "q.gguf", "Q4_0", matrix, progress=False)
    assert GGUFFile(tmp_path / "q.gguf").get("quantize.imatrix.file") == "im.gguf"


def dat(entries, tail=b"\x03\0\0\0\x04\0\0\0text"):
    out = np.int32(len(entries)).tobytes()
    for name, calls, values in entries:
        out += np.int32(len(name)).tobytes() + name.encode() + np.int32([calls, len(values)]).tobytes()
        out += np.float32(values).tobytes()
    return out + tail


def test_files_of_importances(tiny, tmp_path):
    matrix = importances(tiny)
    matrix.save(tmp_path / "im.gguf")
    back = load_imatrix(tmp_path / "im.gguf")
    assert (back.datasets, back.n_chunks, back.chunk_size) == (("a text",), 4, 64) and "14 matrices" in repr(back)
    for name, s in matrix.sums.items():
        np.testing.assert_array_equal(back.sums[name].importances, (s.values / 2).reshape(-1))
    with pytest.raises(CannotWrite, match="exists already"):
        matrix.save(tmp_path / "im.gguf")
    name, s = next(iter(matrix.sums.items()))                  # newer files have the sums of x, too
    newer = Imatrix({name: dataclasses.replace(s, plain=-s.values)}, path="")
    newer.save(tmp_path / "newer.gguf")
    back = load_imatrix(tmp_path / "newer.gguf")
    assert list(back.sums) == [name] and f"{name}.in_sum" in GGUFFile(tmp_path / "newer.gguf").tensors
    np.testing.assert_array_equal(back.sums[name].plain, -s.values)
    np.testing.assert_array_equal(back.sums[name].importances, (s.values / 2).reshape(-1))
    Imatrix({name: dataclasses.replace(s, plain=s.values[:, :-1])}).save(tmp_path / "newer.gguf", force=True)
    with pytest.raises(gg.BadFile, match=r"in_sum' is F32 .*, expected F32"):
        load_imatrix(tmp_path / "newer.gguf")
    (tmp_path / "im.dat").write_bytes(dat([("a.weight", 2, [2, 4]), ("b", 0, [3])]))
    old = load_imatrix(tmp_path / "im.dat")
    assert (old.sums["a.weight"].importances.tolist(), old.sums["b"].importances.tolist()) == ([1, 2], [3])
    assert (old.datasets, old.n_chunks) == (("text",), 3)
    (tmp_path / "im.dat").write_bytes(dat([("a", 1, [1])], b""))
    assert load_imatrix(tmp_path / "im.dat").n_chunks == 0
    experts = ImportanceSums(np.float32([[4, 8], [1, 1]]), np.float32([2, 0]))
    assert experts.importances.tolist() == [2, 4, 1, 1]


@pytest.mark.parametrize("content, message", [
    (b"\xff\xff\xff\x7f", "2147483647 entries; the file is damaged"), (b"", "the file ends at 0"),
    (dat([("a", 1, [1, 2])])[:-20], "a needs 8 bytes at .*it is damaged"), (dat([("a", 1, [])]), "'a' has no values"),
    (dat([("a", 1, [np.nan])]), "the sums of 'a' are not all finite"), (dat([("a", 1, [-1])]), "at least 0")])
def test_broken_files_of_importances(content, message, tmp_path):
    (tmp_path / "im.dat").write_bytes(content)
    with pytest.raises(gg.BadFile, match=message):
        load_imatrix(tmp_path / "im.dat")


def test_gguf_files_that_are_no_importances(tiny, tmp_path):
    with pytest.raises(gg.BadFile, match="holds no sums of a matrix; make it with `ggjit imatrix`"):
        load_imatrix(tiny)
    save_gguf(tmp_path / "a.gguf", {"x.in_sum2": np.ones((1, 2), np.float32)})
    with pytest.raises(gg.BadFile, match="'x.counts' of type F32 is missing"):
        load_imatrix(tmp_path / "a.gguf")
    save_gguf(tmp_path / "a.gguf", {"x.in_sum2": np.ones((1, 2), np.float32), "x.counts": np.ones((1, 1), np.float32)},
              {"imatrix.datasets": 5})
    with pytest.raises(gg.BadFile, match="'imatrix.datasets' holds 5"):
        load_imatrix(tmp_path / "a.gguf")
    with pytest.raises(gg.BadFile, match=re.escape(f"{tmp_path / 'none'}: No such file")):
        load_imatrix(tmp_path / "none")
