"""The GGUF reader: against the `gguf` package, against hostile headers, against the clock."""
import contextlib
import copy
import math
import random
import struct

import numpy as np
import pytest
from helpers import tiny_model
from helpers.gguf_files import written
from helpers.timing import processor_time

from ggjit.models import load_model
from ggjit.models.files.gguf import DEFAULT_ALIGNMENT, GGUFFile, StringArray
from ggjit.models.files.quantized_part import quantized_file
from ggjit.models.files.save import save_gguf
from ggjit.ops.core.errors import BadFile, TypeMismatch

gguf = pytest.importorskip("gguf")

U8, U32, STR, ARR, U64, F32 = 0, 4, 8, 9, 10, 6


# ---------------------------------------------------------------- bytes by hand
def text(s):
    s = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(s)) + s


def key(name, kind, payload):
    return text(name) + struct.pack("<I", kind) + payload


def array(kind, n, payload):
    return struct.pack("<IQ", kind, n) + payload


def info(name, ne, kind, offs):
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offs)


def file(keys=(), infos=(), data=b"", n_kv=None, n_tensors=None, magic=b"GGUF", version=3, alignment=32):
    head = magic + struct.pack("<IQQ", version, len(infos) if n_tensors is None else n_tensors,
                               len(keys) if n_kv is None else n_kv)
    head += b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def write_every_kind(path):
    """A file with every value type, written by the reference writer."""
    w = gguf.GGUFWriter(path, "test")
    scalars = dict(uint8=200, int8=-100, uint16=60000, int16=-30000, uint32=4_000_000_000, int32=-2_000_000_000,
                   float32=0.1, bool=True, uint64=2**63 + 5, int64=-2**62, float64=math.pi, string="naïve ▁ 日本 😀")
    for name, value in scalars.items():
        getattr(w, "add_" + name)("s." + name, value)
    w.add_array("a.int", [1, -2, 3])
    w.add_array("a.float", [0.5, -1.5])
    w.add_array("a.bool", [True, False, True])
    w.add_array("a.string", ["", "a", "é" * 300, "▁x"])
    rng = np.random.default_rng(1)
    w.add_tensor("f32", rng.standard_normal((3, 5), np.float32))
    w.add_tensor("f16", rng.standard_normal((2, 3, 4, 6)).astype(np.float16))
    w.add_tensor("i8", rng.integers(-9, 9, 7, np.int8))
    w.add_tensor("q8_0", gguf.quants.quantize(rng.standard_normal((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0),
                 raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    return written(w, path)


def same(ours, field):
    theirs = field.contents()
    if isinstance(ours, StringArray):
        return list(ours) == theirs
    if isinstance(ours, np.ndarray):
        return ours.tolist() == list(theirs)
    return ours == theirs and type(ours) is type(theirs)


def assert_equals_reference(path):
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    fields = {k: v for k, v in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    assert [k for k in fields if not same(ours.metadata[k], fields[k])] == []
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert (info.type.id, list(info.ne), info.offs, info.nbytes) == (
            t.tensor_type, t.shape.tolist(), t.data_offset, t.n_bytes)
        assert ours.tensor_bytes(t.name).tobytes() == t.data.tobytes()


def test_every_kind_equals_the_reference_reader(tmp_path):
    assert_equals_reference(write_every_kind(tmp_path / "all.gguf"))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_real_files_equal_the_reference_reader(shared, kind):
    assert_equals_reference(shared("data", "stories260k", f"stories260K-{kind}.gguf"))


def test_nested_arrays_version_2_and_alignment():
    nested = array(ARR, 2, array(U32, 2, struct.pack("<II", 1, 2)) + array(STR, 1, text("x")))
    f = GGUFFile.from_bytes(file([key("n", ARR, nested), key("general.alignment", U32, struct.pack("<I", 64))],
                                 [info("t", (4,), 0, 64)], bytes(80), version=2, alignment=64))
    a, b = f.metadata["n"]
    assert a.tolist() == [1, 2] and list(b) == ["x"] and f.alignment == 64 and f.version == 2
    assert f.tensors["t"].offs == f.data_offs + 64 and f.data_offs % 64 == 0
    assert GGUFFile.from_bytes(file()).alignment == DEFAULT_ALIGNMENT


def test_map_is_private_and_arrays_are_read_only(tmp_path):
    path = write_every_kind(tmp_path / "all.gguf")
    before = path.read_bytes()
    f = GGUFFile(path)
    f.tensor_bytes("f32")[:] = 255
    assert path.read_bytes() == before and f.map().nbytes == len(before)
    with pytest.raises(ValueError, match="read-only"):
        f.metadata["a.int"][0] = 5


def test_string_array_is_a_sequence():
    payload = array(STR, 4, text("a") + text(b"\xff\xfe") + text("") + text("é"))
    s = GGUFFile.from_bytes(file([key("k", ARR, payload)])).metadata["k"]
    assert list(s) == [s[i] for i in range(4)] == ["a", "\ufffd\ufffd", "", "é"]
    assert s[-1] == "é" and s[1:3] == ["\ufffd\ufffd", ""] and s.raw(1) == b"\xff\xfe" and "é" in s
    for i in (4, -5):
        with pytest.raises(IndexError, match=f"string {i} of 4"):
            s[i]


def test_get_names_the_key_and_what_it_holds():
    f = GGUFFile.from_bytes(file([key("general.architecture", STR, text("bert")), key("n", U32, struct.pack("<I", 7)),
                                  key("bert.x", F32, struct.pack("<f", 0.5)), key("b", 7, b"\1"),
                                  key("a", ARR, array(U8, 2, b"\1\2"))]))
    assert f.arch == "bert" and f.arch_get("x", kind=float) == 0.5 and f.arch_get("y", None) is None
    assert f.get("n", kind=int) == 7 and type(f.get("n", kind=float)) is float and f.get("b", kind=bool) is True
    for name, kind, said in [("n", str, "7"), ("b", int, "True"), ("a", int, "array of 2 uint8"), ("n", bool, "7"),
                             ("general.architecture", float, "str"), ("missing", int, "missing")]:
        with pytest.raises(BadFile, match=f"'{name}'.*{said}"):
            f.get(name, kind=kind)
    with pytest.raises(BadFile, match="'nope' is missing"):
        f.tensor_bytes("nope")


# ---------------------------------------------------------------- hostile headers
BIG = struct.pack("<Q", 2**64 - 1)
HOSTILE = {
    "starts with b'GGML'": file(magic=b"GGML"),
    "version 1": file(version=1),
    "version 4": file(version=4),
    "big-endian": file(version=0x03000000),
    "number of tensors": file(n_tensors=2**63),
    "number of keys": file(n_kv=2**64 - 1),
    "at most 65536": file(n_kv=70000, data=bytes(2_000_000)),
    "key 0 needs": file([BIG + bytes(9)]),
    "1 to 65535": file([key("", U32, bytes(4))]),
    "not UTF-8": file([key(b"\xff", U32, bytes(4))]),
    "'k' appears twice": file([key("k", U8, b"\1")] * 2),
    "value type 13": file([key("k", 13, bytes(8))]),
    "array of type 77": file([key("k", ARR, array(77, 1, bytes(8)))]),
    "k says": file([key("k", ARR, array(U64, 2**61, bytes(8)))]),
    "k says 9999": file([key("k", ARR, array(STR, 9999, bytes(8)))]),
    "string 1 of 2 is longer": file([key("k", ARR, array(STR, 2, text("a") + BIG))]),
    "string 2 of 3 starts beyond": file([key("k", ARR, array(STR, 3, text("a") + struct.pack("<Q", 23) + bytes(23)))],
                                        alignment=1),
    "k: 5000000 more entries": file([key("k", ARR, array(STR, 5_000_000, bytes(40_000_000)))]),
    "nested deeper": file([key("k", ARR, array(ARR, 1, b"") + array(ARR, 1, b"") * 8)]),
    "neither 0 nor 1": file([key("k", ARR, array(7, 2, b"\1\2"))]),
    "'k' holds a bool": file([key("k", 7, b"\2")]),
    "alignment is 48": file([key("general.alignment", U32, struct.pack("<I", 48))]),
    "alignment is 0": file([key("general.alignment", U32, bytes(4))]),
    "alignment is str": file([key("general.alignment", STR, text("32"))]),
    "'t' has 5 dimensions": file(infos=[info("t", (1,) * 5, 0, 0)]),
    "1 to 63": file(infos=[info("n" * 64, (1,), 0, 0)]),
    "'t' has type number 4,": file(infos=[info("t", (32,), 4, 0)], data=bytes(99)),
    "'t' has type number 4294967295": file(infos=[info("t", (32,), 2**32 - 1, 0)], data=bytes(99)),
    "64 bits": file(infos=[info("t", (2**32, 2**31), 0, 0)], data=bytes(99)),
    "'t' of shape .*64 bits": file(infos=[info("t", (2**40, 0, 2**40), 0, 0)], data=bytes(99)),
    "not a multiple of Q4_0's": file(infos=[info("t", (33,), 2, 0)], data=bytes(99)),
    "multiple of the alignment": file(infos=[info("t", (1,), 0, 4)], data=bytes(99)),
    "truncated": file(infos=[info("t", (25,), 0, 0)], data=bytes(99)),
    "'t' needs bytes": file(infos=[info("t", (1,), 0, 2**64 - 32)], data=bytes(99)),
    "'t' appears twice": file(infos=[info("t", (1,), 0, 0), info("t", (1,), 0, 32)], data=bytes(99)),
    "'t' and 'u' overlap": file(infos=[info("u", (1,), 0, 32), info("t", (9,), 0, 0)], data=bytes(99)),
}


@pytest.mark.parametrize("said", HOSTILE)
def test_hostile_header_is_refused_by_name(said):
    with processor_time() as spent, pytest.raises(BadFile, match=said) as e:
        GGUFFile.from_bytes(HOSTILE[said], "evil.gguf")
    assert str(e.value).startswith("evil.gguf: ") and len(str(e.value)) < 700
    assert spent.seconds < 1


def test_long_strings_are_refused_before_they_are_copied():
    blob = bytearray(file([key("k", STR, struct.pack("<Q", 1 << 27))]))
    with pytest.raises(BadFile, match="at most 67108864"):
        GGUFFile.from_bytes(blob + bytes(1 << 27))


def test_a_file_with_matrices_in_memory_is_not_copied_as_the_one_on_disk(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    save_gguf(path, {"token_embd.weight": np.ones((2, 32), np.float32)}, {"general.architecture": "llama"})
    monkeypatch.chdir(tmp_path)
    stored = GGUFFile("m.gguf")
    made = quantized_file(quantized_file(stored, "Q8_0"), "Q4_0")
    with pytest.raises(TypeMismatch, match="was quantised.*in memory alone"):
        copy.copy(made)
    monkeypatch.chdir("/")
    assert copy.copy(made.stored).tensors == stored.tensors
    assert made.stored is stored.stored is stored


def test_path_problems_are_bad_files(tmp_path):
    (tmp_path / "empty.gguf").write_bytes(b"")
    for name, said in [("none.gguf", "No such file"), ("", "not a regular file"), ("empty.gguf", "0 bytes")]:
        with pytest.raises(BadFile, match=said):
            GGUFFile(tmp_path / name)


def test_what_is_no_file_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "a.gguf").write_bytes(b"x")
    for path, said in [("HuggingFaceTB/SmolLM2-135M", "hf download HuggingFaceTB/SmolLM2-135M .*ggjit convert"),
                       ("https://a.b/c/d.gguf?download=true", "curl -L -O .*give 'd.gguf'"),
                       ("hf", "ggjit convert hf model.gguf"), (".", "has a.gguf"), ("b.gguf", "has a.gguf"),
                       ("~/b.gguf", "Python does not"), ("hf/b.gguf", "has no .gguf file"),
                       ("no/folder/b.gguf", "no folder 'no/folder'"), ("hf/b.bin", "has no .bin file")]:
        with pytest.raises(BadFile, match=said):
            GGUFFile(path)


def test_every_truncation_is_refused(tmp_path):
    blob = write_every_kind(tmp_path / "all.gguf").read_bytes()
    whole = max(t.offs + t.nbytes for t in GGUFFile.from_bytes(blob).tensors.values())
    for n in range(whole):
        with pytest.raises(BadFile, match="file ends at|left can hold|longer than the file|end of the file"):
            GGUFFile.from_bytes(blob[:n])
    assert len(GGUFFile.from_bytes(blob[:whole]).tensors) == 4


# ---------------------------------------------------------------- random mutations
NASTY = [0, 1, 2, 31, 63, 64, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1,
         2**63, 2**64 - 1]


def mutate(blob, n_head, rnd):
    """A few damaged places in the first n_head bytes; sometimes a cut or a shift."""
    out = bytearray(blob)
    for _ in range(rnd.choice((1, 1, 1, 2, 4, 16))):
        at, how = rnd.randrange(n_head - 8), rnd.randrange(5)
        if how == 0:
            out[at] ^= 1 << rnd.randrange(8)
        elif how == 1:
            out[at] = rnd.randrange(256)
        elif how == 2:
            out[at:at + 4] = struct.pack("<I", rnd.choice(NASTY) % 2**32)
        elif how == 3:
            out[at:at + 8] = struct.pack("<Q", rnd.choice(NASTY))
        else:
            out[at:at + 8] = struct.pack("<Q", rnd.randrange(2**rnd.randrange(1, 65)))
    cut = rnd.randrange(40)
    if cut == 0:
        return out[:rnd.randrange(len(out))]
    if cut == 1:
        at = rnd.randrange(n_head)
        return out[:at] + out[at + rnd.randrange(1, 9):]
    if cut == 2:
        at = rnd.randrange(n_head)
        return out[:at] + rnd.randbytes(rnd.randrange(1, 9)) + out[at:]
    return out


def check_loaded(f):
    """Whatever loads must be usable: every value decodes, every tensor lies in the file, apart from the others."""
    for value in f.metadata.values():
        if isinstance(value, (StringArray, np.ndarray)):
            assert len(list(value)) == len(value)
    end = f.data_offs
    for t in sorted(f.tensors.values(), key=lambda t: (t.offs, t.nbytes)):
        assert t.offs % f.alignment == f.data_offs % f.alignment and (not t.nbytes or t.offs >= end)
        assert f.tensor_bytes(t.name).nbytes == t.nbytes
        end = max(end, t.offs + t.nbytes)
    assert end <= max(f.map().nbytes, f.data_offs)


def fuzz(blob, n, seed):
    rnd = random.Random(seed)
    n_head = GGUFFile.from_bytes(blob).data_offs
    loaded, slowest = 0, 0.0
    for _ in range(n):
        bad = mutate(blob, n_head, rnd)
        f = None
        with processor_time() as spent, contextlib.suppress(BadFile):
            f = GGUFFile.from_bytes(bad)
            loaded += 1
        slowest = max(slowest, spent.seconds)
        if f:
            check_loaded(f)
    assert slowest < 1
    assert 0 < loaded < n
    return loaded, slowest


def test_random_mutations_of_a_made_header(tmp_path):
    fuzz(write_every_kind(tmp_path / "all.gguf").read_bytes(), 1000, seed=1)


def test_random_mutations_of_a_real_header(shared):
    with open(shared("data", "stories260k", "stories260K-Q4_0.gguf"), "rb") as f:
        fuzz(f.read(), 1000, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_100000_mutations_of_real_headers(shared, seed):
    kind = ["F32", "F16", "Q8_0", "Q4_0"][seed % 4]
    with open(shared("data", "stories260k", f"stories260K-{kind}.gguf"), "rb") as f:
        print(fuzz(f.read(), 10_000, seed=100 + seed))


# ---------------------------------------------------------------- speed
def vocabulary(n, merges):
    words = b"".join(text(f"▁word{i}") for i in range(n))
    keys = [key("tokens", ARR, array(STR, n, words)), key("scores", ARR, array(F32, n, bytes(4 * n)))]
    if merges:
        keys.append(key("merges", ARR, array(STR, n, b"".join(text(f"a{i} b{i}") for i in range(n)))))
    return file(keys)


@pytest.mark.parametrize("n, merges, limit", [(30_522, False, 0.030), (150_000, True, 0.200)])
def test_vocabularies_are_read_in_time(tmp_path, n, merges, limit):
    path = tmp_path / "v.gguf"
    path.write_bytes(vocabulary(n, merges))
    seconds = []
    for _ in range(5):
        with processor_time() as spent:
            f = GGUFFile(path)
        seconds.append(spent.seconds)
    assert len(f.metadata["tokens"]) == n and f.metadata["tokens"][-1] == f"▁word{n - 1}"
    assert min(seconds) < limit, f"{min(seconds) * 1e3:.1f} ms"


def test_damaged_numbers_are_found_when_asked(tmp_path):
    good = np.arange(8, dtype=np.float32)
    bad = good.copy()
    bad[5] = np.nan
    for values in (good, bad):
        raw = file(infos=[info("a", (8,), 0, 0), info("b", (8,), 0, 32)], data=good.tobytes() + values.tobytes())
        f = GGUFFile.from_bytes(raw)
        if values is good:
            f.validate()
    with pytest.raises(BadFile, match=r"tensor 'b' \(F32\): the value is infinite or NaN in block 5"):
        f.validate()


def test_load_model_validates_when_asked(tmp_path):
    path = tiny_model.write(tmp_path / "m.gguf")
    GGUFFile(path).validate()
    raw = bytearray(path.read_bytes())
    info = GGUFFile(path).tensors["output_norm.weight"]
    raw[info.offs + 8:info.offs + 12] = struct.pack("<f", math.inf)
    path.write_bytes(raw)
    with pytest.raises(BadFile, match="'output_norm.weight' .F32.: the value is infinite or NaN in block 2"):
        load_model(path, validate=True)
