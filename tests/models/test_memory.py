"""What a model takes from the process: announced before it is loaded, said while it runs, and as the system counts it.

Each case of helpers/memory_cases.py runs in a process of its own.  Some are drawn for every run, all with `-m slow`.
"""
import errno
import json
import mmap
import os
import pathlib
import random
import time
import tracemalloc
import types

import numpy as np
import pytest
from helpers import arch_files
from helpers.memory_cases import CASES
from helpers.paths import SHARED, TESTS_PATH
from helpers.processes import ggjit, python, result
from helpers.sample import SEED

from ggjit.core.process_memory import heap_free, is_cached, process_memory, resident
from ggjit.graphs.plan_cache import PlanCache
from ggjit.models import load_model, smollm2_path
from ggjit.models.files import smollm2
from ggjit.models.files.mapped_file import map_file
from ggjit.models.networks.base.memory import (
    AROUND,
    FREE,
    OF_ALL,
    PROCESS,
    WORK,
    Growth,
    HandedOut,
    MemoryTerm,
    MemoryUse,
    process_term,
    read_by_rows,
)
from ggjit.models.networks.peak import model_peak
from ggjit.ops.core.errors import OutOfMemory, StaleHandle
from ggjit.ops.core.host_memory import pages

MIB = 1 << 20
LONG = "8192", "4096", "2048", "training", "texts", "picture"
SHORT = [name for name in CASES if not any(word in name for word in LONG)]
DRAWN = random.Random(SEED).sample(SHORT, 2)
linux = pytest.mark.skipif(process_memory() is None, reason="the system does not tell what a process holds")
pytestmark = linux


def near(a, b):
    return abs(a - b) <= max(4 * MIB, 0.01 * b)


def case(what, name, folder):
    """What the case's process printed; where it compiled kernels or kept repacked weights, that of a second process,
    which finds them."""
    for _ in range(2):
        r = python("from helpers.memory_cases import main; main()", what, name, folder, PYTHONPATH=TESTS_PATH,
                   PYTHONWARNINGS="ignore", timeout=900)
        assert r.returncode == 0, r.stderr
        found = json.loads(r.stdout)
        if not (found and (found.get("compiled") or found.get("kept"))):
            break
    return found


@pytest.mark.parametrize("name", [name if name in DRAWN else pytest.param(name, marks=pytest.mark.slow)
                                  for name in CASES])
def test_announced_is_taken(name, tmp_path):
    if not SHARED.exists() and name in ("a mixture", "recurrent", "windows", "a picture"):
        pytest.skip("reference data not found (GGJIT_SHARED names its folder)")
    if smollm2_path(missing_ok=True) is None:
        pytest.skip("needs " + smollm2.INSTALL)
    case("taken", name, tmp_path)               # compiles kernels, which leaves free memory for the model to take
    d, announced = case("taken", name, tmp_path), case("announced", name, tmp_path)
    taken = d["taken"]
    assert near(d["total"], d["process"]), d
    for kind in ("anonymous", "file"):
        assert near(d["said"][kind], taken[kind]) or name == "training", (kind, d)
        if announced is not None:
            assert near(announced[kind], taken[kind]), (kind, announced, d)
    if "all logits" in name:                            # they exist once
        assert d["high_water"] < d["process"] + 16 * MIB, d
        assert d["terms"]["logits"] - d["held"] < 4 * MIB


def test_a_file_larger_than_memory_is_mapped(tmp_path):
    path, nbytes = tmp_path / "hole.gguf", 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with path.open("wb") as f:
            f.truncate(nbytes)
    except OSError as e:
        pytest.skip(f"no file of {nbytes} bytes here: {e}")
    if pathlib.Path("/proc/sys/vm/overcommit_memory").read_text("utf-8").strip() == "2":
        pytest.skip("the system maps no more than there is memory")
    data, _ = map_file(path)
    assert data.size == nbytes and data[-1] == 0


def test_a_file_that_may_not_be_mapped_is_no_broken_file(path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OutOfMemory, match="map no more memory; free models"):
        map_file(path)


@pytest.fixture
def loaded(path):
    with load_model(path, n_threads=1, n_ctx=64) as m:
        yield m


def test_terms_add_up_and_follow_what_is_held(loaded):
    m, ids = loaded, [1, 2, 3] * 10
    before = m.memory()
    logits = m.logits(ids)
    use = m.memory()
    assert use.terms["logits"] >= logits.nbytes and "logits" not in before.terms
    assert use.anonymous + use.file + use.terms[PROCESS] == use.total == sum(use.terms.values())
    assert near(use.total, use.process.total)
    assert use.terms["KV cache"] >= m.kv_nbytes and use.terms["compute"] > 0
    text, table = str(use), use._repr_html_()
    assert "KV cache" in text and "this process now" in text and "<table>" in table
    del logits
    assert "logits" not in m.memory().terms
    m.free()
    with pytest.raises(StaleHandle):
        m.memory()


@pytest.mark.skipif(not SHARED.exists(), reason="reference data not found (GGJIT_SHARED names its folder)")
@pytest.mark.parametrize("arch", ["mamba", "mamba2", "kimi-linear", "arwkv7"])
def test_states_of_more_layers_take_no_more_compute_memory(arch, tmp_path):
    """What a layer writes into its state is free before the next layer begins."""
    bounds = []
    for blocks in (4, 8):
        path = tmp_path / f"{blocks}.gguf"
        arch_files.write(SHARED / "tools", arch, path, kind="F16", vocab=256, embd=256, ff=256, blocks=blocks)
        bounds.append(model_peak(path, 256).lower_bound)
    assert bounds[0] == bounds[1] > 0


def test_what_models_of_a_process_share_counts_once():
    def use(own, work, free):
        return MemoryUse([MemoryTerm("code", 5, 5, about=OF_ALL), MemoryTerm(WORK, work, work, about=OF_ALL),
                          MemoryTerm("code", own, own), MemoryTerm(FREE, free, free), process_term((4, 3))])
    both = use(10, 0, 2) + use(20, 6, 1)
    assert both.terms == {"code": 35, WORK: 6, FREE: 2, PROCESS: 7} and both.anonymous == 43


def test_a_saved_state_is_held_once(loaded):
    loaded.decode([1, 2, 3] * 20)
    tracemalloc.start()
    try:
        state = loaded.save_state()
        held, most = tracemalloc.get_traced_memory()
        assert held < len(state) + 10_000 and most < 2 * len(state) + 10_000, "its parts, and these joined"
        tracemalloc.reset_peak()
        loaded.load_state(state)
        assert tracemalloc.get_traced_memory()[1] < held + len(state) / 2
    finally:
        tracemalloc.stop()


def test_masks_of_all_graphs_share_their_memory(loaded):
    m = loaded
    m.decode(list(range(40)))
    m.decode([1])
    steps = m._steps.plans()
    masks = [a for step in steps for name, a in step.inputs.items() if "mask" in name]
    assert len(masks) >= 2 and all(np.shares_memory(masks[0], a) for a in masks)


def test_tables_of_the_tokenizer_count_whoever_asks_for_them():
    with load_model(None, n_threads=1, n_ctx=64) as m:
        m.tokenizer.encode("Emma")
        assert m.memory().terms["tokenizer"] > MIB / 4


def test_plans_that_are_given_up_take_no_memory(loaded):
    """Only the last few of many are kept, and counted."""
    m = loaded

    def read(n):
        m.reset()
        m.decode([1] * n)
    for n in range(63, 31, -1):
        read(n)
    m._steps, before = PlanCache(2), m._code.term("code").anonymous
    for n in 2 * [*range(32, 64)]:
        read(n)
    assert len(m._steps) == 2 and m._code.term("code").anonymous < before + MIB


def test_pages_count_when_they_are_touched():
    a = pages(64 * MIB, "a test")
    assert resident(a)[0] < 4 * MIB
    a[:32 * MIB] = 1
    assert 32 * MIB <= resident(a)[0] <= 36 * MIB
    a[:] = 1
    before = process_memory().anonymous
    del a
    assert before - process_memory().anonymous > 60 * MIB, "its pages go back to the system at once"


@pytest.mark.skipif(not heap_free(), reason="the C library does not tell what is free on its heap")
def test_memory_that_was_free_on_the_heap_counts_as_growth():
    def small():
        return [np.ones(8000) for _ in range(200)]
    held, fence = small(), []
    fence.append(np.ones(8000))                         # what lies behind it is not given back
    before = heap_free()
    del held
    assert heap_free() - before > 10 * MIB
    with Growth() as growth:
        held = small()
    assert len(held) * held[0].nbytes <= growth.anonymous + MIB < 16 * MIB


def test_logits_that_a_user_keeps_do_not_slow_later_tokens():
    out, began = HandedOut(), time.process_time()
    held = list(map(out.add, map(np.empty, [1] * 30000)))
    assert time.process_time() - began < 1
    del held[1:]
    assert len(out.arrays()) == 1 and out.arrays()[0] is held[0]


def test_announcing_reads_nothing_from_the_disk(tmp_path):
    """A sparse file that no process has read: none of it is in memory afterwards."""
    with open(tmp_path / "w", "wb") as f:
        f.truncate(8 * MIB)
    data = np.memmap(tmp_path / "w", np.uint8, "r")
    file = types.SimpleNamespace(tensors={"t": types.SimpleNamespace(part=0, offs=0)},
                                 parts=[types.SimpleNamespace(map=lambda: data)])
    assert not is_cached(data) and 0 < read_by_rows(file, "t", data.nbytes, 10) <= 10 * AROUND
    assert resident(data) == (0, 0) and not is_cached(data)
    assert data.sum() == 0 and is_cached(data)
    assert 0 < read_by_rows(file, "t", data.nbytes, 10) <= data.nbytes


def test_the_command_announces_all_terms(path):
    memory = result(ggjit, "peak", path, "-c", 64, "--flash")["memory"]
    assert {"weights", "KV cache", "compute", "inputs", PROCESS} <= memory["terms"].keys()
    assert memory["anonymous"] + memory["file"] + memory["terms"][PROCESS] == memory["total"]
    report = model_peak(path, n_ctx=64, flash=True, planner="ggml")
    assert report.memory.terms["compute"] == report.peak
    server = model_peak(path, n_ctx=64, flash=True, planner="ggml", n_seqs=4, n_cells=4 * 64)
    assert server.kinds["KV cache"] == 4 * report.kinds["KV cache"]
    one, four = report.memory.terms, server.memory.terms
    assert four["inputs"] > 3 * one["inputs"], "masks of prompts that are read together"
    assert four["logits"] == 2 * 4 * one["logits"]
    with load_model(path, n_ctx=64, n_seqs=4, n_cells=4 * 64, reserve=False) as m:
        assert m.n_plans == 1 + len({1, 2, 4}), "of the prompts, and of tokens of fewer and fewer texts"
    assert "Python and libraries" in ggjit("peak", path, "-c", 64).stdout
