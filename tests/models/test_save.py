"""Writing GGUF and safetensors: read back here and by the formats' own packages; damage is noticed."""
import json
import os
import struct

import numpy as np
import pytest

import ggjit as gg
from ggjit.models import load_gguf, load_safetensors, save_gguf, save_safetensors
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.files.save import CannotWrite, refuse_source
from ggjit.ops.core.types import TYPE_INFO

RNG = np.random.default_rng()
CPU = gg.init_backend("CPU:n_threads=1")
METADATA = {"general.architecture": "test", "u32": 7, "i32": -7, "u64": 2**40, "i64": -2**40, "f32": 0.5, "bool": True,
            "text": "grün \N{SNOWMAN}", "empty": "", "ints": [1, -2], "uints": [2**32 - 1], "longs": [2**40, -1],
            "floats": [1.5, 2], "words": ["a", "", "ß"], "bools": [True, False], "nested": [[1], [2, 3]], "none": [],
            "f64": np.float64(0.1), "u8": np.uint8(200), "i16s": np.array([1, -2], np.int16)}


def leaves():
    """A leaf of every live type, random bytes."""
    ctx = gg.Context()
    made = {repr(t): ctx.new_tensor(t, (2 * t.block, 3), repr(t)) for t in TYPE_INFO.values()}
    gg.alloc_ctx_tensors(ctx, CPU)
    for t in made.values():
        t.set_bytes(RNG.integers(0, 256, t.nbytes, dtype=np.uint8))
    return made


def plain(x):
    return x.tolist() if isinstance(x, np.ndarray) else [plain(i) for i in x] if not isinstance(
        x, str | int | float | bool | np.generic) else x


def test_gguf_of_every_type_and_kind_reads_back(tmp_path):
    made = leaves()
    save_gguf(tmp_path / "a.gguf", made, METADATA)
    back, metadata = load_gguf(tmp_path / "a.gguf")
    assert list(back) == list(made) and list(metadata) == list(METADATA)
    for name, t in made.items():
        assert (back[name].type, back[name].ne, back[name].bytes()) == (t.type, t.ne, t.bytes())
    assert {k: plain(v) for k, v in metadata.items()} == {k: plain(v) for k, v in METADATA.items()}
    with pytest.raises(gg.ParamError, match="read-only"):
        back["F32"].set(np.zeros((3, 2)))


def test_the_gguf_package_reads_it(tmp_path, need):
    need("gguf", "the format's own reader")
    import gguf
    known = {int(q): size for q, size in gguf.GGML_QUANT_SIZES.items()}       # its Q8_1 has 40 bytes, ggml's 36
    made = {n: t for n, t in leaves().items() if known.get(t.type.id) == (t.type.block, t.type.nbytes)}
    assert len(made) > 20
    save_gguf(tmp_path / "a.gguf", made, METADATA)
    r = gguf.GGUFReader(tmp_path / "a.gguf")
    assert [(t.name, int(t.tensor_type), bytes(t.data.tobytes())) for t in r.tensors] == \
        [(n, t.type.id, t.bytes()) for n, t in made.items()]
    kinds = {k: f.types[-1].name for k, f in r.fields.items() if not k.startswith("GGUF.") and f.types}
    assert [kinds[k] for k in ("u32", "i32", "u64", "i64", "f32", "f64", "u8", "ints", "uints", "longs", "i16s")] == \
        ["UINT32", "INT32", "UINT64", "INT64", "FLOAT32", "FLOAT64", "UINT8", "INT32", "UINT32", "INT64", "INT16"]
    assert r.fields["text"].contents() == METADATA["text"] and r.fields["words"].contents() == METADATA["words"]


def test_arrays_views_and_results_can_be_saved(tmp_path):
    x = RNG.standard_normal((2, 3, 4))
    a = gg.from_numpy(gg.Context(), x.astype(np.float32))
    y = a + 1
    gg.compute(y)
    save_gguf(tmp_path / "a.gguf", {"f64": x, "big endian": x.astype(">f4"), "strided": x.T.astype(np.float16).T,
                                    "view": a[:, ::2], "result": y, "scalar": np.float32(3) * np.ones(())})
    back, _ = load_gguf(tmp_path / "a.gguf")
    np.testing.assert_array_equal(back["f64"].numpy(), x)
    np.testing.assert_array_equal(back["big endian"].numpy(), x.astype(np.float32))
    np.testing.assert_array_equal(back["strided"].numpy(), x.astype(np.float16))
    np.testing.assert_array_equal(back["view"].numpy(), x.astype(np.float32)[:, ::2])
    np.testing.assert_allclose(back["result"].numpy(), x + 1, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(gg.compute(back["view"] * 2), 2 * x.astype(np.float32)[:, ::2])


@pytest.mark.parametrize("align", [1, 32, 4096])
def test_alignment_is_kept(tmp_path, align):
    save_gguf(tmp_path / "a.gguf", {"a": np.ones(3, np.float32), "b": np.ones(5, np.float16)},
              {"general.alignment": align})
    file = GGUFFile(tmp_path / "a.gguf")
    assert file.alignment == align and all(t.offs % align == 0 for t in file.tensors.values())


@pytest.mark.parametrize("tensors,metadata,error,text", [
    ({"": np.ones(1)}, {}, gg.ParamError, "'' has 0 bytes"), ({"x" * 64: np.ones(1)}, {}, gg.ParamError, "64 bytes"),
    ({3: np.ones(1)}, {}, TypeError, "a tensor name is a string, got int"),
    ({"a": [1.0]}, {}, gg.TypeMismatch, "saving 'a': .*got list"),
    ({"a": np.ones(1, np.complex64)}, {}, gg.TypeMismatch, "saving 'a': .*complex64"),
    ({"a": np.ones((1,) * 5)}, {}, gg.ShapeError, "saving 'a': 5 dimensions"),
    ({}, {"k": None}, gg.TypeMismatch, "key 'k': .*NoneType"), ({}, {"k": 2**70}, gg.ParamError, "key 'k': .*64 bits"),
    ({}, {"k": b"x"}, gg.TypeMismatch, "key 'k': .*bytes"), ({}, {"k": {"a": 1}}, gg.TypeMismatch, "key 'k': .*dict"),
    ({}, {"k": [1, "a"]}, gg.TypeMismatch, "key 'k': .*int, str"),
    ({}, {"k": np.ones((2, 2))}, gg.TypeMismatch, "key 'k': an array of 2 dimensions"),
    ({}, {"general.alignment": 3}, gg.ParamError, "general.alignment must be a power of two, got 3"),
    ([np.ones(1)], {}, gg.TypeMismatch, "tensors must be a dict .*got list"),
    ({}, ["k"], gg.TypeMismatch, "metadata must be a dict .*got list"),
    ({}, 5, gg.TypeMismatch, "metadata must be a dict .*got int"),
    ({}, {"k": "\ud800"}, gg.ParamError, "not Unicode text"),
    ({"a": gg.Context().new_tensor(gg.F32, (3,), "a")}, {}, gg.NotAllocated, "a F32 .* has no memory")])
def test_what_cannot_be_written_leaves_no_file(tmp_path, tensors, metadata, error, text):
    (tmp_path / "a.gguf").write_bytes(b"as before")
    with pytest.raises(error, match=text):
        save_gguf(tmp_path / "a.gguf", tensors, metadata)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"] and (tmp_path / "a.gguf").read_bytes() == b"as before"


@pytest.mark.parametrize("save", [save_gguf, save_safetensors])
def test_a_missing_folder_is_named(save, tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder: '.*none'$"):
        save(tmp_path / "none" / "a.bin", {"a": np.ones(1, np.float32)})
    with pytest.raises(IsADirectoryError, match=f"a folder, not a file: '.*{tmp_path.name}'$"):
        save(tmp_path, {"a": np.ones(1, np.float32)})
    assert not list(tmp_path.iterdir()) and not list(tmp_path.parent.glob("*.part"))


def test_an_error_in_the_middle_leaves_the_old_file(tmp_path, monkeypatch):
    from ggjit.models.files import save
    save_safetensors(tmp_path / "a", {"x": np.ones(3, np.float32)})
    before = (tmp_path / "a").read_bytes()

    def full(self):
        raise OSError("no space left")
    monkeypatch.setattr(save._Source, "bytes", full)
    with pytest.raises(OSError, match="no space"):
        save_safetensors(tmp_path / "a", {"x": np.zeros(300, np.float32)})
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == before


# ---------------------------------------------------------------- safetensors
def test_safetensors_read_back(tmp_path):
    made = {n: t for n, t in leaves().items() if n in ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")}
    save_safetensors(tmp_path / "a.safetensors", made, {"made by": "a test"})
    back = load_safetensors(tmp_path / "a.safetensors")
    assert {n: (t.type, t.shape, t.bytes()) for n, t in back.items()} == \
        {n: (t.type, t.shape, t.bytes()) for n, t in made.items()}
    with pytest.raises(gg.TypeMismatch, match="save_gguf"):
        save_safetensors(tmp_path / "b", {"q": leaves()["Q8_0"]})
    with pytest.raises(gg.TypeMismatch, match="metadata maps strings to strings"):
        save_safetensors(tmp_path / "b", {}, {"n": 3})


def test_the_safetensors_package_agrees(tmp_path, need):
    need("safetensors", "the format's own reader")
    from safetensors.numpy import load_file, save_file
    arrays = {"a": RNG.standard_normal((3, 4)).astype(np.float32), "b": np.arange(5), "c": np.ones((), np.float16),
              "d": np.zeros((0, 3), np.float32)}
    save_safetensors(tmp_path / "ours", arrays)
    save_file(arrays, tmp_path / "theirs")
    for name, a in load_file(tmp_path / "ours").items():
        np.testing.assert_array_equal(a, arrays[name])
    for name, t in load_safetensors(tmp_path / "theirs").items():
        assert t.shape == arrays[name].shape
        np.testing.assert_array_equal(t.numpy(), arrays[name])


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize("header", [
    b"no json", b"[]", b"[" * 5000, json.dumps({"a": 3}).encode(), json.dumps({"a": {"dtype": "F32"}}).encode(),
    *(json.dumps({"a": entry(**c)}).encode() for c in (
        {"data_offsets": [0, 80]}, {"data_offsets": [8, 0]}, {"data_offsets": [0, 4]}, {"shape": [-2]},
        {"shape": [2**62]}, {"shape": ["2"]}, {"data_offsets": [0.0, 8]}, {"data_offsets": [0]}, {"shape": 2})),
    json.dumps({"a": entry(), "b": entry(data_offsets=[4, 12])}).encode()], ids=lambda h: h[:60].decode())
def test_damaged_safetensors(tmp_path, header):
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(gg.BadFile, match="a: .*fetch it again"):
        load_safetensors(tmp_path / "a")


def test_truncated_and_missing_files(tmp_path):
    save_safetensors(tmp_path / "a", {"x": np.ones(30, np.float32)})
    whole = (tmp_path / "a").read_bytes()
    for n in (0, 1, 7, 8, 30, len(whole) - 1):
        (tmp_path / "b").write_bytes(whole[:n])
        with pytest.raises(gg.BadFile, match="bytes|empty file"):
            load_safetensors(tmp_path / "b")
    (tmp_path / "b").write_bytes(struct.pack("<Q", 1 << 60) + whole[8:])
    with pytest.raises(gg.BadFile, match="do not hold a header"):
        load_safetensors(tmp_path / "b")
    with pytest.raises(gg.BadFile, match="No such file"):
        load_safetensors(tmp_path / "c")
    header = json.dumps({"a": entry(dtype="F8_E4M3")}).encode()
    (tmp_path / "b").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(gg.NotSupported, match="F8_E4M3"):
        load_safetensors(tmp_path / "b")
    assert os.path.exists(tmp_path / "a")


def test_what_is_read_is_not_replaced_by_what_is_made_of_it(tmp_path):
    """By any name of it, and neither a file of a folder that is read; a GGUF beside the source is no part of it."""
    text, other = tmp_path / "text.txt", tmp_path / "m.gguf"
    text.write_text("a"), other.write_text("b")
    (tmp_path / "link").symlink_to(text)
    for path, sources in ((text, (None, text)), (tmp_path / "link", (text,)), (text, (tmp_path,))):
        with pytest.raises(CannotWrite, match="is what is read"):
            refuse_source(path, *sources)
    refuse_source(other, text, tmp_path, tmp_path / "none")
    refuse_source(tmp_path / "new", text)
