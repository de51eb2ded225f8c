"""What the system says of a machine: containers, hybrid processors, systems that tell nothing."""
import os

import pytest

from ggjit.ops.core import machine


@pytest.fixture
def container(tmp_path, monkeypatch):
    """A function that writes files of control groups: of the outer group, of the one inside."""
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)

    def write(name, outer, inner=None):
        (tmp_path / name).write_text(outer)
        if inner is not None:
            own = next((x[3:] for x in machine._text(machine.pathlib.Path("/proc/self/cgroup")).splitlines()
                        if x.startswith("0::")), "/").lstrip("/")
            (tmp_path / own).mkdir(parents=True, exist_ok=True)
            (tmp_path / own / name).write_text(inner)
    return write


def test_this_machine():
    assert 1 <= machine.performance_cores() <= machine.available_cores() <= (os.cpu_count() or 1)
    assert 0 < machine.available_nbytes() <= machine.total_nbytes()


def test_the_quota_of_a_container_bounds_the_cores(container, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    container("cpu.max", "250000 100000\n")
    assert machine.available_cores() == machine.performance_cores() == 3
    container("cpu.max", "max 100000\n")
    assert machine.available_cores() == 64
    container("cpu.max", "50000 100000")
    assert machine.available_cores() == 1


def test_the_memory_of_a_container(container):
    container("memory.max", f"{1 << 30}\n")
    container("memory.current", f"{700 << 20}\n")
    container("memory.stat", f"anon 5\ninactive_file {100 << 20}\n")
    machine.total_nbytes.cache_clear()
    assert machine.total_nbytes() == 1 << 30
    machine.total_nbytes.cache_clear()
    assert machine.available_nbytes() == (1024 - 700 + 100) << 20
    container("memory.current", f"{3 << 30}\n")
    assert machine.available_nbytes() == 0


@pytest.mark.parametrize("files, cores", [
    ({}, None), ({"devices/cpu_core/cpus": "0-3,8"}, {0, 1, 2, 3, 8}),
    ({f"cpu/cpu{i}/cpu_capacity": c for i, c in enumerate(("446", "446", "1024", "1024"))}, {2, 3}),
    ({f"cpu/cpu{i}/cpu_capacity": "1024" for i in range(4)}, None)])
def test_performance_cores_of_hybrid_processors(files, cores, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(machine, "_INTEL_CORES", tmp_path / "devices/cpu_core/cpus")
    machine._fast_cores.cache_clear()
    try:
        assert machine._fast_cores() == cores
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1, 10)), raising=False)
        monkeypatch.setattr(machine, "_quota", lambda: 10)
        allowed = len(cores & set(range(1, 10))) if cores else 9
        assert machine.performance_cores() == allowed
    finally:
        machine._fast_cores.cache_clear()


def test_efficiency_cores_alone_are_used(monkeypatch):
    """A process bound to efficiency cores has those."""
    monkeypatch.setattr(machine, "_fast_cores", lambda: {8, 9})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    monkeypatch.setattr(machine, "_quota", lambda: 10)
    assert machine.performance_cores() == 3


@pytest.mark.parametrize("text, cores", [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set())])
def test_core_list(text, cores):
    assert machine.core_list(text) == cores
