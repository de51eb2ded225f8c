"""Weights that a worker keeps: sent once, by their content, never false ones."""
import os

import numpy as np
import pytest
from helpers.clusters import workers
from helpers.device_contract import floats

import ggjit as gg
from ggjit.cluster import protocol, session, weight_cache
from ggjit.cluster.weight_cache import WeightCache, content_key
from ggjit.models import OwnWeights, save_gguf

N = 1 << 18                     # floats: 1 MiB


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_cache, "cache_dir", lambda: tmp_path)
    with workers(n=1, keep_nbytes=3 << 20) as made:
        yield made


def weight(cluster, values):
    """A weight on the worker; bytes that were sent for it."""
    device = cluster.devices[0]
    t = gg.Context().new_tensor(gg.F32, (values.size,))
    buf = device.init_backend().alloc_buffer(t.nbytes)
    buf.set_usage(gg.USAGE_WEIGHTS)
    gg.tensor_alloc(buf, t, 0)
    before = device.stream.n_bytes_out
    t.set(values)
    np.testing.assert_array_equal(t.numpy(), values)
    return device.stream.n_bytes_out - before


def test_weights_are_sent_once(cluster, tmp_path):
    values = floats(N)
    assert weight(cluster, values) > values.nbytes
    assert weight(cluster, values) < 1000
    cluster.devices[0].reopen()
    assert weight(cluster, values) < 1000
    assert weight(cluster, floats(N)) > values.nbytes
    assert weight(cluster, floats(64)) < 1000 and len(list((tmp_path / "weights").iterdir())) == 2       # small ones


def test_a_damaged_file_is_sent_again(cluster, tmp_path):
    values = floats(N)
    weight(cluster, values)
    (file,) = (tmp_path / "weights").iterdir()
    for damaged in (file.read_bytes()[:-1] + b"\xff", b"short"):
        file.write_bytes(damaged)
        assert weight(cluster, values) > values.nbytes
        assert weight(cluster, values) < 1000


def test_the_oldest_go_and_what_is_too_large_is_not_kept(tmp_path):
    keeps, arrays = WeightCache(2500, tmp_path), [np.full(1000, k, np.uint8) for k in range(4)]
    keys = [content_key(a) for a in arrays]
    for k in (0, 1):
        keeps.put(keys[k], arrays[k])
        os.utime(tmp_path / keys[k].hex(), (k, k))
    assert keeps.get(keys[0], 1000).tolist() == arrays[0].tolist()          # used: 1 is the oldest now
    keeps.put(keys[2], arrays[2])
    assert [keeps.get(key, 1000) is not None for key in keys] == [True, False, True, False]
    keeps.put(content_key(big := np.zeros(2501, np.uint8)), big)
    assert len(list(tmp_path.iterdir())) == 2
    keeps.put(keys[3], arrays[1])                                           # not the bytes of that key
    assert keeps.get(keys[3], 1000) is None and len(list(tmp_path.iterdir())) == 2


def test_a_disk_that_cannot_be_written_ends_the_keeping(cluster, tmp_path):
    (tmp_path / "weights").write_text("a file where the folder would be")
    values = floats(N)
    for _ in range(2):
        assert weight(cluster, values) > values.nbytes
    assert cluster.servers[0].machine.weight_cache is None


def test_weights_of_the_workers_own_files_are_not_sent(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "below" / "m.gguf"
    path.parent.mkdir()
    ctx, values = gg.Context(), [rng.standard_normal(N, np.float32) for _ in range(3)]
    save_gguf(path, {f"w{k}": gg.from_numpy(ctx, v) for k, v in enumerate(values[:2])})
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    own = OwnWeights(tmp_path)
    assert own.damaged == [str(tmp_path / "broken.gguf")]
    with workers(n=1, own=own) as cluster:
        for _ in range(2):
            assert [weight(cluster, v) > v.nbytes for v in values] == [False, False, True]
        path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")         # another file by now: no false weights
        assert [weight(cluster, v) > v.nbytes for v in values].count(True) == 2
    with pytest.raises(gg.ParamError, match="no .gguf file"):
        OwnWeights(tmp_path / "nowhere")
    with pytest.raises(gg.ParamError, match="not with scheduler"):
        gg.cluster.serve(scheduler="tcp://127.0.0.1:1", own=own)


def test_a_worker_that_keeps_nothing_is_not_asked():
    with workers(n=1) as cluster:
        values = floats(N)
        for _ in range(2):
            assert weight(cluster, values) > values.nbytes
        machine = cluster.servers[0].machine
        made = session.Session(machine)
        header, _ = made.execute([1, [[protocol.ALLOC, 1, 64], [protocol.HAVE, 1, 0, 64, b"k" * 16],
                                      [protocol.KEEP, 1, 0, 64, b"k" * 16]]], b"")
        assert session.wire.unpack(header) == [1, protocol.OK, [0]]
        made.close()
