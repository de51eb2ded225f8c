"""gg.fit: the best setting within a limit, why not the others, and that the run it proposes stays below it."""
import dataclasses
import gc
import itertools
import json
import random
import re
import types

import pytest
from helpers import small_bert, tiny_moe
from helpers.processes import ggjit, python, result
from helpers.sample import SEED

import ggjit as gg
from ggjit.core.process_memory import process_memory, resident_now
from ggjit.models import smollm2_path
from ggjit.models.files import minilm, smollm2
from ggjit.models.files.gguf import GGUFFile
from ggjit.models.networks.fit import BATCHES, KV_TYPES, Candidate, Fit, Setting, _first, _found, _places, _Search
from ggjit.ops.core import machine

# bytes beside what the process holds: {what is tried: (bytes, what is asked for)}
ROOMS = {"weights streamed": (130 << 20, {}), "a short context": (175 << 20, {}), "repacked": (260 << 20, {}),
         "cache of Q8_0": (175 << 20, {"kv_type": "Q8_0"})}
DRAWN = random.Random(SEED).choice(sorted(ROOMS))
SLACK_NBYTES = 8 << 20
RUN = """
import gc, json, os, re, resource, sys
import numpy as np
import ggjit as gg
from ggjit.core.process_memory import process_memory
from ggjit.models import load_model
from ggjit.models.networks import fit
from ggjit.ops.native.jit import CACHE
path, room, options, more, compiling = sys.argv[1], *map(json.loads, sys.argv[2:])
gg.compute(gg.scale(gg.tensor([1.0]), 2.0))
limit = process_memory().total + room
if compiling:                                   # the same setting is found, its kernels are compiled
    fit.missing, more = lambda kernels: [], int(1.1 * fit.COMPILING_NBYTES)
found = gg.fit(path, memory=limit, n_threads=1, **options)
# what RLIMIT_DATA counts: private pages that may be written, the mapped file among them; streamed weights take nothing
of_file = 0 if found.setting.streamed else found.memory.file
data = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
allowed = data + found.limit - process_memory().total - of_file + os.path.getsize(path) + more
resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
try:
    load_model(path, **found.options | {"n_ctx": allowed // 1000})
    refused = False
except gg.OutOfMemory:
    refused = True
gc.collect()                                    # the file is mapped until then
with load_model(path, **found.options) as m:
    m.tokenize("Once upon a time")
    ids = np.random.default_rng(0).integers(0, m.n_vocab, m.n_ctx)
    m.decode(ids[:-1]), m.decode(ids[-1:])
    weights = m.memory().terms["weights"] if found.setting.streamed else 0
print(json.dumps([process_memory().high_water - weights, limit, CACHE.compiled, refused, found.setting.streamed,
                  found.options]))
"""


@pytest.fixture(scope="module")
def shape():
    return "tinyllama-1.1b"


def beside(nbytes):
    """A limit that leaves so many bytes beside what this process holds already, after whatever tests."""
    return sum(resident_now()) + int(nbytes)


def test_more_memory_is_a_better_setting(shape):
    settings = [gg.fit(shape, memory=beside(size)) for size in (1e9, 1.4e9, 4e9)]
    contexts = [f.setting.n_ctx for f in settings]
    assert contexts == sorted(contexts) and contexts[-1] == 2048
    assert all(f.nbytes <= f.limit for f in settings)
    assert settings[-1].options["n_batch"] == BATCHES[0] and settings[-1].options["kv_type"] == KV_TYPES[0]
    for f in settings:
        assert f.others and all(c.why for c in f.others)
        assert str(f.setting) in str(f) and "<table>" in f._repr_html_()


def test_what_is_given_stays(shape):
    found = gg.fit(shape, memory=beside(1.3e9), n_ctx=1024, n_batch=64, kv_type="q8_0", repack=False)
    assert found.setting == Setting(1024, 64, True, "Q8_0", False)
    found = gg.fit(shape, memory=beside(1.3e9), n_ctx=512, n_batch=64, kv_type="q5_1", n_seqs=4, n_threads=1)
    given = {"kv_type": "Q5_1", "n_seqs": 4, "n_threads": 1}
    assert given.items() <= found.options.items(), "what load_model needs besides"
    assert "Q5_1" in found.frontier()
    with pytest.raises(gg.ParamError, match="override_tensor: say which devices there are"):
        gg.fit(shape, memory=beside(1.3e9), override_tensor={"ffn": "GPU0"})
    found = gg.fit(shape, memory=beside(1.3e9), n_ctx=512, override_tensor={"ffn": "CPU"})
    assert found.options["override_tensor"] == {"ffn": "CPU"} and found.nbytes <= found.limit
    found = gg.fit(shape, memory=beside(7e8), n_ctx=2048)
    assert {repack: str(Setting(8, repack=repack)).split(", ")[-1] for repack in (None, True, False)} == \
        {None: "repacked where it pays", True: "repacked", False: "not repacked"}
    over = [c for c in found.others if "above the limit" in c.why]
    assert over and all(c.nbytes > found.limit for c in over)


@pytest.mark.parametrize("model, asked", [("tinyllama-1.1b", {"n_ctx": 2048, "kv_type": "F16"}), (None, {})])
def test_too_little_says_the_least_that_is_enough(model, asked):
    for _ in range(2):
        with pytest.raises(gg.BudgetError, match="are too little") as e:
            gg.fit(model, memory=1 << 20, **asked)
        assert f"use memory={e.value.minimum} or more" in str(e.value)
        found = gg.fit(model, memory=e.value.minimum, **asked)      # while the error is kept
        assert found.nbytes <= found.limit == e.value.minimum


def test_a_fit_that_is_kept_holds_no_file():
    """Nor its vocabulary; what needs it opens it again."""
    found = gg.fit(None, memory=beside(4e8), n_ctx=256)
    gc.collect()
    assert not any(isinstance(x, GGUFFile) and str(x.path) == found.title for x in gc.get_objects())
    assert found.frontier() and "file" not in vars(found._search)


def test_the_command_accepts_the_least_that_it_names():
    r = ggjit("fit", "tinyllama-1.1b", "-c", "512", "--memory", "1MB")
    least = re.search(r"use memory=(\d+) or more", r.stderr)[1]
    assert result(ggjit, "fit", "tinyllama-1.1b", "-c", "512", "--memory", least)["nbytes"] <= int(least)


def test_wrong_arguments_are_refused(shape):
    for bad in ("8X", "", "-1", 0):
        with pytest.raises(gg.ParamError, match="a size is a number of bytes"):
            gg.fit(shape, memory=bad)
    with pytest.raises(gg.ParamError, match="memory is needed"):
        gg.fit(shape)
    with pytest.raises(gg.TypeMismatch, match="from its file: expected a path, got dict"):
        gg.fit({}, memory=1e9)
    for bad, why in (({"n_batch": "x"}, "n_batch must be an integer"),
                     ({"n_threads": "4"}, "n_threads must be an integer"),
                     ({"n_gpu_layers": 1}, "unknown option 'n_gpu_l"),
                     ({"devices": 5}, "devices takes"), ({"n_contexts": 1}, "unknown option 'n_contexts'")):
        with pytest.raises((gg.ParamError, gg.TypeMismatch), match=why):
            gg.fit(shape, memory=1e9, **bad)


def test_a_network_that_has_one_context_is_planned_with_it(tmp_path):
    pytest.importorskip("safetensors")
    small_bert.package(tmp_path / "package")
    path = str(tmp_path / "bert.gguf")
    minilm.convert(tmp_path / "package", path)
    n_ctx = small_bert.CONFIG["max_position_embeddings"]
    for given in ({}, {"n_ctx": n_ctx}):
        found = gg.fit(path, memory="8G", **given)
        assert {c.setting.n_ctx for c in found.others} == {found.setting.n_ctx} == {n_ctx}
    with pytest.raises(gg.ParamError, match=f"texts of up to {n_ctx} tokens whatever n_ctx is: leave n_ctx out"):
        gg.fit(path, memory="8G", n_ctx=100_000)


def test_a_context_beyond_memory_is_refused_before_memory_is_touched(shape, monkeypatch):
    monkeypatch.setattr(machine, "available_nbytes", lambda: 1000)
    with pytest.raises(gg.OutOfMemory, match="context of 2048 .less with a smaller n_ctx"):
        gg.fit(shape, memory=1e9, n_ctx=2048)


def test_experts_and_layers_by_device(tmp_path):
    path = str(tiny_moe.write(tmp_path / "moe.gguf"))
    whole = gg.fit(path, memory="8G", devices={"GPU0": "1G"})
    assert whole.options["n_gpu_layers"] == -1 and "cpu_moe" not in whole.options
    sizes = {s.n_gpu_layers: n for s, n in ((c.setting, c.devices["GPU0"]) for c in [
        whole._search(Setting(whole.setting.n_ctx, n_gpu_layers=n)) for n in (0, 1, 2, -1)])}
    assert sizes[0] < sizes[1] < sizes[2] <= sizes[-1]
    some = gg.fit(path, memory="8G", devices={"GPU0": whole.devices["GPU0"] - 1}, n_ctx=whole.setting.n_ctx,
                  n_batch=whole.setting.n_batch)
    assert some.options["cpu_moe"] is True, "the experts go first"
    assert any("GPU0 would hold" in c.why for c in some.others)


def test_layers_that_devices_hold_leave_the_rest_in_memory(shape):
    """Neither all layers on the device fit, nor all of them in memory: those that the device does not hold do."""
    found = gg.fit(shape, memory=beside(5e8), n_ctx=512, n_batch=64, devices={"GPU0": "300M"})
    n = found.setting.n_gpu_layers
    assert not found.setting.streamed and 0 < n < 22 and found.devices["GPU0"] <= 300_000_000
    more = found._search(dataclasses.replace(found.setting, n_gpu_layers=n + 1))
    assert "GPU0 would hold" in found._search.over(more)
    for length in range(1, 9):
        for first, near in itertools.product(range(length), repeat=2):
            assert _first(lambda k, first=first: k >= first, length, near) == first


def test_the_longest_context_is_no_power_of_two(shape):
    found = gg.fit(shape, memory=beside(7.55e8), n_batch=64, kv_type="F16", repack=False)
    assert found.setting.n_ctx % 256 == 0 and not found.setting.streamed
    longer = found._search(dataclasses.replace(found.setting, n_ctx=found.setting.n_ctx + 256))
    assert found.setting.n_ctx == 2048 or longer.nbytes > found.limit >= found.nbytes


def test_the_least_may_be_of_a_batch_whose_kernels_are_there(shape, monkeypatch):
    monkeypatch.setattr(_Search, "_compiles", lambda self, m, graph, setting: setting.n_batch < 64)
    with pytest.raises(gg.BudgetError, match="batch 64,") as e:
        gg.fit(shape, memory="200MB", n_ctx=2048)
    monkeypatch.undo()
    monkeypatch.setattr(_Search, "_compiles", lambda self, m, graph, setting: True)
    with pytest.raises(gg.BudgetError, match="batch 8,") as whole:
        gg.fit(shape, memory="200MB", n_ctx=2048)
    assert e.value.minimum < whole.value.minimum


class Drawn(_Search):
    """Settings of a model of drawn sizes, within `limit` bytes; kernels of some of them are there."""
    takes_n_ctx = True

    def __init__(self, seed, limit, devices):
        draw = random.Random(seed)
        sizes = {"context_length": draw.choice([300, 1000, 8192]), "block_count": draw.randrange(1, 12)}
        self.file = types.SimpleNamespace(path="drawn", arch_get=lambda key, default, kind: sizes.get(key, default))
        self.sizes = {f"GPU{i}": draw.randrange(600) for i in range(devices)}
        self.limit, self.measured, self.near, self.n_layer = limit, {}, 0, sizes["block_count"]
        self.layer, self.key, self.token = draw.randrange(1, 40), draw.random() / 20, draw.random()
        self.compiling, self.missing = draw.randrange(400), [
            s for s in itertools.product(KV_TYPES, BATCHES, (None, False)) if draw.random() < 0.5]

    def _measure(self, s):
        n = self.n_layer if s.n_gpu_layers == -1 else s.n_gpu_layers or 0
        layer, batch = self.layer + self.key * s.n_ctx / (1 + KV_TYPES.index(s.kv_type)), self.token * s.n_batch
        nbytes = 50 + batch + (self.n_layer - n) * (layer + (s.repack is None))
        nbytes -= max(self.n_layer - n - 1, 0) * self.layer * s.streamed
        compiling = self.compiling * ((s.kv_type, s.n_batch, s.repack) in self.missing)
        return Candidate(s, int(1.01 * (nbytes + compiling)), None,
                         {name: int(n * layer + batch * (n > 0)) for name in self.sizes}, compiling)

    def enough(self, nbytes):
        return nbytes                           # no process grows here


@pytest.mark.parametrize("devices", [0, 2])
def test_the_least_that_a_refusal_names_is_enough(devices):
    for seed in range(200):
        with pytest.raises(gg.BudgetError) as refused:
            _found(Drawn(seed, 0, devices), None, None, None, None)
        least = refused.value.minimum
        assert _found(Drawn(seed, least, devices), None, None, None, None).nbytes <= least
        if not devices:
            with pytest.raises(gg.BudgetError):
                _found(Drawn(seed, least - 1, devices), None, None, None, None)


def rank(found, search):
    """Lower is better, in the order that fit prefers: of contexts the halves, then the place, the layout, the batch,
    the longest."""
    s, places = found.setting, _places(search)
    half = next(n for n in search.contexts if n <= s.n_ctx)
    return (s.streamed, KV_TYPES.index(s.kv_type), search.contexts.index(half),
            places.index((s.n_gpu_layers, s.cpu_moe)), s.repack is False, BATCHES.index(s.n_batch), -s.n_ctx)


@pytest.mark.slow
@pytest.mark.parametrize("model", [None, "tinyllama-1.1b", "llama-70b"])
def test_a_larger_limit_is_never_a_worse_setting_of_a_model(model):
    with pytest.raises(gg.BudgetError) as refused:
        gg.fit(model, memory=1 << 20)
    last = None
    for step in range(8):
        found = gg.fit(model, memory=int(refused.value.minimum * 1.7 ** step))
        now = rank(found, found._search)
        assert last is None or now <= last, found.limit
        last = now


@pytest.mark.parametrize("devices", [0, 2])
def test_a_larger_limit_is_never_a_worse_setting(devices):
    for seed in range(SEED, SEED + 30):
        search = Drawn(seed, 0, devices)
        with pytest.raises(gg.BudgetError) as refused:
            _found(search, None, None, None, None)
        least, last = refused.value.minimum, None
        for step in range(24):
            search = Drawn(seed, int(least * 1.14 ** step), devices)
            now = rank(_found(search, None, None, None, None), search)
            assert last is None or now <= last, (seed, search.limit)
            last = now


def test_the_picture(shape):
    pytest.importorskip("matplotlib")
    found = gg.fit(shape, memory=beside(1.3e9))
    assert isinstance(found, Fit)
    ax = found.plot()
    assert len(ax.lines) == len(KV_TYPES) + 2
    lines = found.frontier()
    assert all(b > a for _, points in lines.items() for (_, a), (_, b) in zip(points, points[1:], strict=False))
    f16, q8 = (dict(lines[k]) for k in ("F16", "Q8_0"))
    assert all(q8[n] < f16[n] for n in f16.keys() & q8.keys())


def test_the_command(shape):
    found = result(ggjit, "fit", shape, "--memory", "4GiB")
    assert found["options"]["n_ctx"] == 2048 and found["nbytes"] <= found["limit"] == 4 << 30
    r = ggjit("fit", shape, "--memory", "100M")
    assert r.returncode == 1 and "the least is" in r.stderr and r.stderr.count("\n") == 1


@pytest.mark.skipif(process_memory() is None, reason="the system does not tell what a process holds")
@pytest.mark.parametrize("name", [name if name == DRAWN else pytest.param(name, marks=pytest.mark.slow)
                                  for name in ROOMS])
def test_the_run_stays_below_the_limit(name):
    path, (room, asked) = smollm2_path(missing_ok=True), ROOMS[name]
    if path is None:
        pytest.skip("needs " + smollm2.INSTALL)
    for compiling in True, False:
        r = python(RUN, path, room, json.dumps(asked), SLACK_NBYTES, json.dumps(compiling), timeout=600)
        assert r.returncode == 0, r.stderr
    most, limit, compiled, refused, streamed, options = json.loads(r.stdout)
    assert most <= limit and refused and not compiled, options
    assert streamed == (name == "weights streamed") and asked.items() <= options.items()
