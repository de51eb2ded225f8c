"""PyTorch's traces: lifetimes, what was held, and what a static plan takes; damaged ones are refused.

Snapshots of its allocator are written here in the form that torch.cuda.memory._snapshot() has, traces of its profiler
as export_chrome_trace() writes them.
"""
import gzip
import json
import pickle

import numpy as np
import pytest
from helpers.processes import ggjit, result

from ggjit.alloc.csvio import read_trace, run_plan_csv
from ggjit.alloc.torch_trace import read_torch_trace
from ggjit.ops.core.errors import BadFile


def event(action, addr, size):
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": [], "time_us": 1}


def snapshot(events, segments=()):
    return {"segments": list(segments), "device_traces": [list(events)], "allocator_settings": {}}


EVENTS = [event("segment_alloc", 0, 1000), event("alloc", 0, 100), event("alloc", 100, 50),
          event("free_requested", 0, 100), event("free_completed", 0, 100), event("alloc", 150, 120),
          event("free_completed", 5000, 70), event("segment_free", 8000, 400)]
SEGMENT = {"device": 0, "address": 0, "total_size": 1000, "blocks": []}


@pytest.fixture
def path(tmp_path):
    out = tmp_path / "snapshot.json"
    out.write_text(json.dumps(snapshot(EVENTS, [SEGMENT])))
    return out


def test_lifetimes_are_those_of_the_events(path):
    t = read_torch_trace(path)
    assert list(zip(t.lower, t.upper, t.size, strict=True)) == [(1, 4, 100), (2, 8, 50), (5, 8, 120), (0, 6, 70)]
    assert t.taken == 1400, "the segment that was freed last was held beside the other"
    path.write_text(json.dumps(snapshot([EVENTS[1]], [SEGMENT | {"total_size": 46_442_615_724_864}])))
    assert read_torch_trace(path).taken is None, "a segment around all addresses, which a profile's snapshot has"


def test_a_pickle_is_the_same_and_calls_nothing(path, tmp_path):
    plain, evil = tmp_path / "s.pickle", tmp_path / "evil.pickle"
    plain.write_bytes(pickle.dumps(snapshot(EVENTS, [SEGMENT])))
    packed = tmp_path / "s.pickle.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_torch_trace(plain) == read_trace(packed) == read_torch_trace(path)

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))
    evil.write_bytes(pickle.dumps({"device_traces": [[Evil()]]}))
    with pytest.raises(BadFile, match=r"names \w+\.open"):
        read_torch_trace(evil)
    assert not (tmp_path / "written").exists()


def test_a_static_plan_beside_what_was_held(path, tmp_path):
    found = run_plan_csv(path, tmp_path / "out.csv")
    assert found["peak"] == found["lower_bound"] == 240 and found["taken"] == 1400
    assert (tmp_path / "out.csv").read_text().startswith("id,lower,upper,size,offset\n")
    assert result(ggjit, "plan", path)["taken"] == 1400
    assert "PyTorch held 1,400 bytes" in ggjit("plan", path).stdout


def test_random_traces_keep_every_byte(tmp_path):
    rng = np.random.default_rng()
    events, live, top, least = [], {}, 0, 0
    for _ in range(400):
        if live and rng.random() < 0.5:
            at = list(live)[rng.integers(len(live))]
            events.append(event("free_completed", at, live.pop(at)))
        else:
            size = int(rng.integers(1, 1000))
            events.append(event("alloc", top, size))
            live[top] = size
            top += size
        least = max(least, sum(live.values()))
    out = tmp_path / "s.json"
    out.write_text(json.dumps(snapshot(events)))
    t = read_torch_trace(out)
    most = max(sum(s for lo, hi, s in zip(t.lower, t.upper, t.size, strict=True) if lo <= i < hi) for i in range(400))
    assert most == least and t.taken is None
    assert run_plan_csv(out)["peak"] >= least


@pytest.mark.parametrize(("content", "text"), [
    (b"", "neither JSON nor"), (b"{}", "device_traces is missing"), (b"[1", "neither JSON nor"),
    (b"\x80\x04junk", "neither JSON nor"), (json.dumps(snapshot([{"addr": 1}])).encode(), "event 0 has no action"),
    (json.dumps(snapshot([event("alloc", 0, -1)])).encode(), "event 0: size is -1"),
    (json.dumps(snapshot([event("alloc", 0, 10), event("alloc", 5, 10)])).encode(),
     "event 1: 10 bytes at 5 overlap the 10 bytes at 0 of event 0"),
    (json.dumps(snapshot([event("alloc", 0, 10), *2 * [event("free_completed", 0, 10)]])).encode(),
     "event 2: the 10 bytes at 0 were freed already, by event 1"),
    (json.dumps(snapshot([], [SEGMENT])).encode(), r"no events; call torch.cuda.memory._record_memory_history\(\)"),
    (json.dumps(snapshot(EVENTS, [{}])).encode(), "segment 0: total_size is None"),
    (json.dumps(snapshot([event("alloc", k << 61, 1 << 61) for k in (0, 1)])).encode(), "do not fit 62 bits"),
    (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7fabc", "byte string is too large"),
    (gzip.compress(b"{}")[:12], "ended before the end-of-stream marker")])
def test_damaged_ones_say_where(tmp_path, content, text):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(BadFile, match=text):
        read_trace(path)
    r = ggjit("plan", path)
    assert r.returncode == 1 and str(path) in r.stderr and r.stderr.count("\n") == 1


def test_the_device_that_most_was_taken_on(tmp_path):
    path, busy = tmp_path / "two.json", [event("alloc", 0, 300), event("alloc", 300, 50)]
    segments = [SEGMENT, {"device": 1, "address": 0, "total_size": 512}]
    path.write_text(json.dumps({"segments": segments, "device_traces": [EVENTS[1:3], busy]}))
    t = read_torch_trace(path)
    assert t.size == [300, 50] and t.taken == 512 and t.what == "PyTorch on device 1"


# ---------------------------------------------------------------- of the profiler
def memory_event(ts, addr, nbytes, device=(0, -1), reserved=0):
    return {"ph": "i", "name": "[memory]", "ts": ts, "args": {
        "Bytes": nbytes, "Addr": addr, "Device Type": device[0], "Device Id": device[1], "Total Reserved": reserved}}


def profile_of(path, *events):
    other = {"ph": "X", "name": "aten::add", "ts": 0}
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [other, *events]}))
    return path


def test_a_trace_of_the_profiler(tmp_path):
    events = (memory_event(2.5, 4000, 50), memory_event(1.5, 1000, 100), memory_event(3.5, 1000, -100),
              memory_event(4.5, 1000, 120), memory_event(5.5, 9000, -70), memory_event(1.0, 0, 64, (1, 0), 512))
    path = profile_of(tmp_path / "step.json", *events)
    t = read_torch_trace(path)
    assert list(zip(t.lower, t.upper, t.size, strict=True)) == [(0, 2, 100), (1, 5, 50), (3, 5, 120), (0, 4, 70)]
    assert t.taken == 240 and t.what == "PyTorch on the CPU"
    assert "PyTorch on the CPU held 240 bytes" in ggjit("plan", path).stdout
    cuda = read_torch_trace(profile_of(path, events[-1], memory_event(2.0, 64, 200, (1, 0), 1024), events[0]))
    assert cuda.size == [64, 200] and cuda.taken == 1024 and cuda.what == "PyTorch on CUDA"


@pytest.mark.parametrize(("events", "text"), [
    ((), "no memory events"), ((memory_event(1, 0, 10), memory_event(2, 5, 10)),
     "event 2: 10 bytes at 5 overlap the 10 bytes at 0 of event 1"),
    ((memory_event(1, 0, "10"),), "event 1: Bytes is '10'"), ((memory_event(1, -4, 10),), "event 1: Addr is -4"),
    ((memory_event(1, 0, None, ([], {})),), "event 1: Bytes is None"),
    (({"name": "[memory]", "args": {}},), "event 1: a memory event has a time")])
def test_damaged_profiles_say_where(tmp_path, events, text):
    with pytest.raises(BadFile, match=text):
        read_torch_trace(profile_of(tmp_path / "bad.json", *events))
