"""Silero VAD: convolutions, an LSTM with its state in tensors, one plan replayed; and the rules that make segments."""
import importlib
import itertools
import json
import struct
import wave

import numpy as np
import pytest
from helpers.paths import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ggjit as gg
from ggjit.models import load_vad
from ggjit.models.files.silero_file import read_silero
from ggjit.models.files.wav import read_wav
from ggjit.models.networks.sounds.speech import find_segments
from ggjit.ops.core.errors import BadFile, GgjitError, ModelError, ParamError, ShapeError, TypeMismatch

N_WINDOW, N_FFT, HIDDEN = 128, 64, 20
ENCODER = ((33, 24, 3), (24, 12, 3), (12, 12, 3), (12, 16, 3))
NAME = "_model."


# ---------------------------------------------------------------- a small model of the same form
def weights(seed=0):
    """{name: array} of a random network; convolutions F16, the rest F32, as in the real file."""
    rng = np.random.default_rng(seed)

    def draw(*shape, dtype=np.float16, fan_in=1):
        return (rng.standard_normal(shape) * fan_in ** -0.5).astype(dtype)
    out = {"stft.forward_basis_buffer": draw(2 * ENCODER[0][0], 1, N_FFT)}
    for i, (ic, oc, k) in enumerate(ENCODER):
        out[f"encoder.{i}.reparam_conv.weight"] = draw(oc, ic, k, fan_in=ic * k)
        out[f"encoder.{i}.reparam_conv.bias"] = draw(oc, dtype=np.float32)
    n_in = ENCODER[-1][1]
    for x, n in (("ih", n_in), ("hh", HIDDEN)):
        out[f"decoder.rnn.weight_{x}"] = draw(4 * HIDDEN, n, dtype=np.float32, fan_in=n)
        out[f"decoder.rnn.bias_{x}"] = draw(4 * HIDDEN, dtype=np.float32)
    return out | {"decoder.decoder.2.weight": draw(HIDDEN, fan_in=1 / 16),
                  "decoder.decoder.2.bias": draw(dtype=np.float32)}


def encode(tensors, kind="silero-16k", encoder=ENCODER, lstm=(ENCODER[-1][1], HIDDEN), n_window=N_WINDOW,
           n_context=64, version=(6, 2, 0)):
    def ints(*values):
        return struct.pack(f"<{len(values)}i", *values)
    out = [ints(0x67676D6C, len(kind)), kind.encode(), ints(*version, n_window, n_context, len(encoder)),
           ints(*itertools.chain(*encoder)), ints(*lstm, lstm[1], 1)]
    for name, a in tensors.items():
        raw = (NAME + name).encode()
        out += [ints(a.ndim, len(raw), {"float32": 0, "float16": 1}[a.dtype.name], *a.shape[::-1]), raw, a.tobytes()]
    return b"".join(out)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("vad") / "small.bin"
    path.write_bytes(encode(weights()))
    return path


def reference(tensors, samples):
    """float64 forward of every window."""
    t = {k: v.astype(np.float64) for k, v in tensors.items()}
    h = c = np.zeros(HIDDEN)
    edge, out = N_FFT // 4, []

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))
    for x in samples.reshape(-1, N_WINDOW).astype(np.float64):
        x = np.pad(x, edge, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(x, N_FFT)[::N_FFT // 2]
        s = t["stft.forward_basis_buffer"][:, 0] @ frames.T
        y = np.hypot(*np.split(s, 2))
        for i, stride in enumerate((1, 2, 2, 1)):
            w = t[f"encoder.{i}.reparam_conv.weight"]
            windows = np.lib.stride_tricks.sliding_window_view(np.pad(y, ((0, 0), (1, 1))), 3, 1)[:, ::stride]
            y = np.maximum(np.einsum("oik,iwk->ow", w, windows) + t[f"encoder.{i}.reparam_conv.bias"][:, None], 0)
        gates = sum(t[f"decoder.rnn.weight_{x}"] @ v + t[f"decoder.rnn.bias_{x}"]
                    for x, v in (("ih", y[:, 0]), ("hh", h)))
        i, f, g, o = np.split(gates, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        out.append(sigmoid(t["decoder.decoder.2.weight"] @ np.maximum(h, 0) + t["decoder.decoder.2.bias"]))
    return np.array(out)


def sound(n_windows, seed=1):
    """Noise, each window of another loudness."""
    rng = np.random.default_rng(seed)
    return (rng.uniform(-1, 1, (n_windows, N_WINDOW)) * rng.uniform(0, 1, (n_windows, 1)) ** 2).astype("f4").ravel()


# ---------------------------------------------------------------- the network
@pytest.mark.parametrize("conv_type, bound", [("F32", 1e-5), ("F16", 2e-3)])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_probabilities_are_the_reference_s(small, conv_type, bound, n_threads):
    x, want = sound(40), reference(weights(), sound(40))
    assert np.ptp(want) > 0.1                               # the network has an opinion, and it changes
    with load_vad(small, conv_type=conv_type, n_threads=n_threads) as vad:
        p = vad.probabilities(x)
    assert p.dtype == np.float32 and np.abs(p - want).max() < bound


def test_streaming_resetting_and_odd_lengths(small):
    x = sound(9)
    with load_vad(small) as vad:
        whole = vad.probabilities(x)
        vad.reset()
        assert [vad(w) for w in x.reshape(-1, N_WINDOW)] == whole.tolist()
        assert vad.probabilities(x).tolist() == whole.tolist()              # a recording starts from nothing
        first, rest = x[:3 * N_WINDOW], x[3 * N_WINDOW:]
        assert [*vad.probabilities(first), *vad.probabilities(rest, reset=False)] == whole.tolist()
        cut = x[:-100]
        assert vad.probabilities(cut).tolist() == vad.probabilities(np.r_[cut, np.zeros(100, "f4")]).tolist()
        assert vad.probabilities(x[:0]).shape == (0,) and vad.segments(x[:0]) == []
        assert vad.probabilities(x.astype(np.float64)[::-1][::-1]).tolist() == whole.tolist()


def test_one_plan_serves_every_window_and_two_models_are_apart(small):
    x = sound(6)
    with load_vad(small) as vad, load_vad(small) as other:
        want, plan = vad.probabilities(x), vad.plan
        runs = plan.runs
        other(x[:N_WINDOW])                                                 # its state is its own
        vad.reset()
        got = []
        for w in x.reshape(-1, N_WINDOW):
            got.append(vad(w))
            other(w[::-1])
        assert got == want.tolist() and vad.plan is plan and plan.runs == runs + 6
        assert vad.h.numpy().any() and vad.c.numpy().any()
        vad.reset()
        assert not vad.h.numpy().any() and not vad.c.numpy().any()


def test_bad_samples_change_nothing(small):
    x = sound(2)
    with load_vad(small) as vad:
        want = vad.probabilities(x)
        vad.reset()
        assert vad(x[:N_WINDOW]) == want[0]
        for bad, error, text in (
                (x[:5], ShapeError, "128 samples, got 5"), (np.zeros(N_WINDOW, np.int16), TypeMismatch, "got int16"),
                ("abc", TypeMismatch, "got <U3"), (np.full(N_WINDOW, np.nan, "f4"), ParamError, "not a finite number"),
                (x[:N_WINDOW].reshape(2, -1), ShapeError, "one row of one channel"), (None, TypeMismatch, "got object"),
                ([[1.0], [1.0, 2.0]], TypeMismatch, "got object")):
            with pytest.raises(error, match=text):
                vad(bad)
        assert vad(x[N_WINDOW:]) == want[1]
    with pytest.raises(ParamError, match="freed"):
        vad(x[:N_WINDOW])
    vad.free()


# ---------------------------------------------------------------- files
def test_every_cut_and_many_damages_are_typed_errors(small, tmp_path):
    raw, path = small.read_bytes(), tmp_path / "damaged.bin"
    rng = np.random.default_rng(3)
    header = raw.index(NAME.encode()) + 40
    for n in [*range(0, header, 3), *rng.integers(header, len(raw), 40)]:
        path.write_bytes(raw[:n])
        with pytest.raises((BadFile, ModelError), match="fetch it again"):
            load_vad(path)
    survivors = 0
    for _ in range(300):
        damaged = bytearray(raw)
        at = int(rng.integers(0, header)) // 4 * 4
        damaged[at:at + 4] = struct.pack("<i", int(rng.choice([-1, 0, 1, 7, 2**31 - 1, -2**31, 65536])))
        path.write_bytes(damaged)
        try:
            read_silero(path)
            load_vad(path).free()
            survivors += 1                                  # a minor version, which no computation uses
        except GgjitError as e:
            assert "damaged.bin" in str(e)
    assert survivors < 60


def test_files_that_are_something_else(small, tmp_path):
    t = weights()
    path = tmp_path / "other.bin"

    def refused(raw, error, words):
        path.write_bytes(raw)
        with pytest.raises(error, match=words):
            load_vad(path)
    refused(b"GGUF" + bytes(100), BadFile, "magic")
    refused(encode(t, kind="silero-8k"), ModelError, "silero-8k")
    refused(encode(t, lstm=(ENCODER[-1][1], 21)), ModelError, "shape")
    refused(encode(t, encoder=ENCODER[:3]), ModelError, "3 encoder layers")
    for n in (32, 100, 65535, -1):
        refused(encode(t, n_window=n), ModelError, "n_window")
    for n in (0, 1, 65):
        refused(encode(t, n_context=n), ModelError, "n_context")
    for version in ((0, 2, 0), (7, 0, 0), (6, -1, 0), (6, 2, 65536)):
        refused(encode(t, version=version), ModelError, "version")
    refused(encode({k: v for k, v in t.items() if k != "decoder.rnn.bias_hh"}), ModelError, "decoder.rnn.bias_hh")
    refused(encode(t) + encode(t)[-90:], BadFile, "other.bin")
    for where, words in ((tmp_path, "regular file"), (tmp_path / "none", "none"), ("a\0b", "path")):
        with pytest.raises(BadFile, match=words):
            load_vad(where)
    with pytest.raises(TypeMismatch, match="takes the path of a file, got int"):
        load_vad(3)
    with pytest.raises(ParamError, match="conv_type"):
        load_vad(small, conv_type="Q4_0")
    with pytest.raises(ParamError, match="NULL"):
        load_vad(small, backend="NULL")


def write_wav(path, samples, rate=16000, width=2):
    with wave.open(str(path), "wb") as w:
        w.setnchannels(samples.shape[1] if samples.ndim > 1 else 1)
        w.setsampwidth(width)
        w.setframerate(rate)
        w.writeframes(samples.tobytes())
    return path


def test_wav_files(tmp_path):
    x = np.array([[-32768, 16384], [100, -100], [1, 2]], "<i2")
    path = tmp_path / "x.wav"
    assert read_wav(write_wav(path, x)).tolist() == [-0.25, 0, 1.5 / 32768]
    assert read_wav(write_wav(path, x[:, 1])).tolist() == [0.5, -100 / 32768, 2 / 32768]
    assert read_wav(write_wav(path, np.array([0, 128, 192], "u1"), width=1)).tolist() == [-1, 0, 0.5]
    assert read_wav(write_wav(path, np.array([2**30], "<i4"), width=4)).tolist() == [0.5]
    with pytest.raises(BadFile, match="44100.*ffmpeg"):
        read_wav(write_wav(path, x, rate=44100))
    for raw in (b"", b"RIFF", path.read_bytes()[:30], b"nothing like it" * 9):
        path.write_bytes(raw)
        with pytest.raises(BadFile, match="WAV"):
            read_wav(path)
    with pytest.raises(BadFile, match="none"):
        read_wav(tmp_path / "none.wav")


# ---------------------------------------------------------------- segments
def test_segments_by_hand():
    def find(text, **params):
        """One window of a second a character: # speech, - nothing, ~ between the two thresholds."""
        p = np.array([{"#": 0.9, "-": 0.0, "~": 0.4}[x] for x in text])
        return find_segments(p, 16000, **{"speech_pad_ms": 0, **params})
    assert find("--###--") == [(2, 5)] and find("--##~~#--") == [(2, 7)] and find("~~--") == []
    assert find("#--#") == [(0, 1), (3, 4)] and find("####") == [(0, 4)]
    assert find("#-#") == [(0, 3)]                          # a silence counts when a second window follows its first
    assert find("#--#", min_silence_duration_ms=1001) == [(0, 4)]
    assert find("#--##--", min_speech_duration_ms=1000) == [(3, 5)]
    assert find("-#--#--", speech_pad_ms=500) == [(0.5, 2.5), (3.5, 5.5)]
    assert find("-#--#--", speech_pad_ms=1200) == [(0, 3), (3, 6.2)]                # the gap is shared
    assert find("#######", max_speech_duration_s=4, min_speech_duration_ms=0) == [(0, 4), (5, 7)]
    assert find("-~--", threshold=0.4) == [(1, 2)]
    for bad in ({"threshold": 0}, {"threshold": np.nan}, {"threshold": "x"}, {"speech_pad_ms": -1},
                {"min_speech_duration_ms": 1.5}, {"max_speech_duration_s": 0}, {"max_speech_duration_s": "x"}):
        with pytest.raises(GgjitError, match=next(iter(bad))):
            find("#", **bad)
    with pytest.raises(TypeMismatch, match="one row of floats"):
        find_segments([[0.5]], 512)


def test_named_tensors(small):
    samples = np.random.default_rng(3).standard_normal(1500).astype(np.float32) * 0.1
    with load_vad(small) as vad:
        want = vad.probabilities(samples)
        assert [s.name for s in vad.names()] == ["magnitudes", *(f"blk.{i}.l_out" for i in range(4)), "gates", "c_out",
                                                 "h_out", "probability"]
        vad(samples[:vad.n_window])                             # heard before
        got = vad.capture(["probability", "h_out", "l_out-*"], samples)
        np.testing.assert_array_equal(got["probability"][:, 0], want)
        np.testing.assert_array_equal(got["h_out"][-1], vad.h.numpy())
        assert got["blk.3.l_out"].shape == (len(want), *vad.names("blk.3.l_out")[0].shape)
        assert (got["blk.0.l_out"] >= 0).all() and got["blk.0.l_out"].any()
        np.testing.assert_array_equal(vad.probabilities(samples), want)
        with pytest.raises(gg.ParamError, match="no tensor of silero-16k is called 'gate'; the nearest is 'gates'"):
            vad.capture("gate", samples)
    with pytest.raises(gg.ParamError, match="was freed"):
        vad.capture("gates", samples)


@pytest.fixture(scope="module")
def real(shared):
    return shared("data", "silero-vad", "silero-v6.2.0-ggml.bin")


@pytest.fixture(scope="module")
def jfk(shared):
    return read_wav(shared("data", "silero-vad", "jfk.wav"))


@pytest.fixture(scope="module")
def libwhisper(real, need):
    need("pywhispercpp", "libwhisper as oracle")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        lib = importlib.import_module("benchmarks.silero_bench").Libwhisper(real)
    yield lib
    lib.free()


@pytest.fixture
def its_probabilities(libwhisper, jfk):
    return libwhisper.probabilities(jfk)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 0.3, 0.5, 0.9]), st.sampled_from([0, 30, 100, 250, 700]),
       st.sampled_from([0, 32, 98, 100, 200, 500]), st.sampled_from([1.0, 2.0, 3.7, 1e9]),
       st.sampled_from([0, 30, 150]))
def test_segments_are_libwhisper_s(libwhisper, its_probabilities, seed, threshold, speech, silence, longest, pad):
    rng, p = np.random.default_rng(seed), its_probabilities             # its own array: write what we like
    walk = np.cumsum(rng.standard_normal(p.size)) * rng.choice([0.05, 0.3, 1.0])
    p[:] = 1 / (1 + np.exp(-walk + rng.choice([-1, 0, 1])))
    params = dict(threshold=threshold, min_speech_duration_ms=speech, min_silence_duration_ms=silence,
                  max_speech_duration_s=longest, speech_pad_ms=pad)
    want = libwhisper.segments(**params)
    # a float32 threshold, as the struct holds it
    got = find_segments(p, 512, **{**params, "threshold": float(np.float32(threshold))})
    assert len(got) == len(want)
    assert np.allclose(got, want, rtol=0, atol=0.0101), (got, want)      # libwhisper rounds to centiseconds


# ---------------------------------------------------------------- the real model
def test_jfk_is_within_the_bounds(real, jfk, shared):
    golden = np.load(shared("data", "silero-vad", "probs.npz"))
    for conv_type, bound, from_libwhisper in (("F32", 1e-5, 2e-3), ("F16", 2e-3, 5e-4)):
        with load_vad(real, conv_type=conv_type) as vad:
            plan, p = vad.plan, vad.probabilities(jfk)
            assert p.shape == (344,) and plan.runs == 344 and vad.plan is plan
            assert np.abs(p - golden["jfk"]).max() < bound
            assert np.abs(p - golden["jfk_libwhisper"]).max() < from_libwhisper
            found = [round(x, 1) for pair in vad.segments(jfk) for x in pair]
            assert found == [0.3, 2.3, 3.3, 4.4, 5.4, 7.7, 8.2, 10.6]


def test_jfk_beside_libwhisper(real, jfk, libwhisper):
    with load_vad(real, conv_type="F16") as vad:
        assert np.abs(vad.probabilities(jfk) - libwhisper.probabilities(jfk)).max() < 5e-4
        assert np.allclose(vad.segments(jfk), libwhisper.segments(), rtol=0, atol=0.0101)


def test_bench(real, shared, libwhisper, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        main = importlib.import_module("benchmarks.silero_bench").main
    main([str(real), str(shared("data", "silero-vad", "jfk.wav")), "--rounds", "2", "--nodes", "--clock", "cpu"])
    out = capsys.readouterr().out
    assert all(word in out for word in ("ggjit F32", "ggjit F16", "libwhisper", "ratio", "mul_mat-short"))


def test_command(small, tmp_path, command):
    x = (sound(20) * 32767).astype("<i2")
    path = write_wav(tmp_path / "x.wav", x)

    r = command("vad", path, "--model", small, "--threshold", 0.3, "--min-speech-ms", 0, "--json")
    assert r.returncode == 0, r.stderr
    got = json.loads(r.stdout)
    with load_vad(small) as vad:
        samples = read_wav(path)
        assert got["probabilities"] == vad.probabilities(samples).tolist()
        want = vad.segments(samples, threshold=0.3, min_speech_duration_ms=0)
        assert [(s["start"], s["end"]) for s in got["segments"]] == want
    assert got["window_seconds"] == N_WINDOW / 16000 and got["audio_seconds"] == 20 * N_WINDOW / 16000
    r = command("vad", path, "--model", small)
    assert r.returncode == 0 and "stretches of speech" in r.stderr
    for args, status in (((path, "--model", path), 1), ((small, "--model", small), 1),
                         ((path, "--model", small, "--threshold", 2), 2)):
        r = command("vad", *args)
        assert r.returncode == status and len(r.stderr.strip().splitlines()) == 1 and r.stdout == ""


# ---------------------------------------------------------------- the product that convolutions of short signals make
@pytest.mark.parametrize("type", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8])
def test_products_of_few_rows(type, m):
    rng = np.random.default_rng(m)
    for k, n, a23, b23 in ((1, 17, (1, 1), (1, 1)), (16, 33, (1, 2), (3, 2)), (67, 18, (2, 1), (2, 3)),
                           (256, 258, (1, 1), (1, 1))):
        ctx = gg.Context()
        a, b = (rng.standard_normal((*s[::-1], rows, k), np.float32) for s, rows in ((a23, m), (b23, n)))
        a, b = (gg.from_numpy(ctx, v, type=getattr(gg, type)) for v in (a, b))
        y = gg.mul_mat(a, b)
        cpu, graph = gg.init_backend("CPU", n_threads=1 + m % 2), gg.Graph(y)
        gg.GraphAllocator(cpu).alloc_graph(graph)
        plan = cpu.graph_plan_create(graph)
        got = plan.compute_and_read(y).reshape(*b23[::-1], n, m)
        want = b.numpy().reshape(*b23[::-1], n, k).astype(np.float64)
        left = a.numpy().reshape(*a23[::-1], m, k).astype(np.float64)
        left = np.repeat(np.repeat(left, b23[1] // a23[1], 0), b23[0] // a23[0], 1)
        assert np.abs(got - want @ left.swapaxes(-1, -2)).max() < 1e-5 * k ** 0.5 + 1e-6
        kernel = plan.kernels[0].name
        assert "short" in kernel or type == "BF16", kernel
