"""Devices, events, the registry and the NULL device (rows A6, A8, B5)."""
import importlib.metadata
import types

import numpy as np
import pytest
from helpers import devices
from helpers.devices import Reg
from helpers.placed import CPU, placed

import ggjit as gg
from ggjit.api.registry import API_VERSION, Registry
from ggjit.cpu.device import CPU as CPU_DEVICE


# ---------------------------------------------------------------- A6 events and devices
def test_events_A6_01_A6_07():
    backend = devices.Fake("A", delay=3e-3).init_backend()
    event = gg.event_new(backend.device)
    t = placed((4,), backend)
    t.set(np.zeros(4))
    gg.tensor_set_async(backend, t, np.ones(4, np.float32))
    gg.event_record(event, backend)
    gg.event_synchronize(event)
    assert (t.numpy() == 1).all()
    other = devices.Fake("B", delay=1e-3).init_backend()
    gg.tensor_set_async(backend, t, np.full(4, 2, np.float32))
    gg.event_record(event, backend)
    gg.event_wait(other, event)
    other.synchronize()
    assert (t.numpy() == 2).all(), "the other stream went on only after the event"
    with pytest.raises(gg.ParamError, match="cannot be recorded"):
        gg.event_record(event, other)
    gg.event_free(event)
    gg.event_free(event)
    gg.event_free(None)
    with pytest.raises(gg.ParamError, match="freed"):
        gg.event_wait(other, event)
    with pytest.raises(gg.ParamError, match="expected an event"):
        gg.event_record(None, other)
    for b in (backend, other):
        b.free()


def test_device_facts_A6_02_A6_03_A6_04_A6_08_B5():
    props = CPU_DEVICE.props
    assert props["type"] == "cpu" and props["buffer_from_host_ptr"] and props["mmap_support"]
    assert not props["events"] and not props["async"]
    assert 0 < props["memory_free"] <= props["memory_total"] and CPU_DEVICE.description
    fake = devices.Fake("A", delay=1.0)
    assert not devices.Fake("S").props["events"], "its event_new gives None"
    assert fake.props["events"] and fake.props["device_id"] is None and fake.host_buffer_type() is None
    assert fake.supports_buft(fake.buffer_type()) and not fake.supports_buft(CPU.default_buffer_type)


# ---------------------------------------------------------------- A8 registry
def test_registry_A6_09_A6_10_A6_12_A8_01_A8_03_A8_05_A8_06():
    registry = Registry()
    a, b = devices.Fake("Alpha"), devices.Fake("Beta", type="accel")
    mine = Reg(a, b, proc_address=lambda name: name.upper() if name == "x" else None)
    registry.register(mine)
    registry.register(mine)
    assert [d.name for d in registry.devices()] == ["Alpha", "Beta", "CPU", "NULL"], "CPU and NULL come last"
    assert registry.device("aLPHA") is a and registry.by_type("accel") is b and registry.best() is a
    assert registry.registry("MINE") is mine and registry.registry("other") is None
    assert registry.proc_address("x") == "X" and registry.proc_address("nothing") is None
    assert "ggml_backend_get_features" and registry.proc_address("ggml_backend_get_features")()["isa"]
    registry.unregister(mine)
    assert registry.best() is CPU_DEVICE and registry.by_type("gpu") is None
    with pytest.raises(gg.ParamError, match="no device 'Alpha'; there are CPU"):
        registry.device("Alpha")
    with pytest.raises(gg.ParamError, match="device type"):
        registry.by_type("tpu")


def test_registry_refuses_wrong_versions_and_objects_A6_10():
    registry = Registry()
    with pytest.raises(gg.ParamError, match=f"version 99, this is {API_VERSION}"):
        registry.register(Reg(api_version=99))
    for bad in (None, object(), types.SimpleNamespace(name=3, devices=list)):
        with pytest.raises(gg.TypeMismatch, match=".name .a string. and .devices"):
            registry.register(bad)
    assert [d.name for d in registry.devices()] == ["CPU", "NULL"]


def test_best_prefers_gpu_then_igpu_then_cpu_B5():
    registry = Registry()
    igpu, gpu = devices.Fake("I", type="igpu"), devices.Fake("G", type="gpu")
    registry.register(Reg(igpu, name="i"))
    assert registry.best() is igpu
    registry.register(Reg(gpu, name="g"))
    assert registry.best() is gpu


def test_entry_points_and_their_failures_are_reported_A6_11_A8_04(monkeypatch):
    def point(name, load):
        return types.SimpleNamespace(name=name, load=load)

    def boom():
        raise ImportError("no libfoo.so")

    def script():
        raise SystemExit("usage: a script that was meant to be run")
    good = devices.Fake("Good")
    points = [point("broken", boom), point("script", script), point("good", lambda: lambda: Reg(good, name="good")),
              point("old", lambda: lambda: Reg(name="old", api_version=0))]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    registry = Registry()
    with pytest.warns(UserWarning, match="no libfoo|API version 0|a script"):
        assert [d.name for d in registry.devices()] == ["Good", "CPU", "NULL"]
    assert [n for n, _ in registry.errors] == ["broken", "script", "old"]
    assert registry.device("CPU") is CPU_DEVICE


def test_a_registry_that_raises_is_left_out():
    def devices_slot():
        raise RuntimeError("driver lost")
    registry = Registry()
    reg = Reg(name="bad")
    reg.devices = devices_slot
    registry.register(reg)
    with pytest.warns(UserWarning, match="driver lost"):
        assert [d.name for d in registry.devices()] == ["CPU", "NULL"]
    registry.devices()
    assert len(registry.errors) == 1, "reported once"


def test_loading_a_module_B5(tmp_path, monkeypatch):
    (tmp_path / "ggjit_test_backend.py").write_text(
        "from helpers import devices\nclass R:\n    name = 'loaded'\n    def devices(self):\n        return []\n"
        "def ggjit_backend():\n    return R()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry()
    assert registry.load("ggjit_test_backend") is registry.registry("loaded")
    with pytest.raises(ImportError, match="ggjit_no_such_backend"):
        registry.load("ggjit_no_such_backend")


def test_backends_from_strings_A8_02_A8_07_A8_09():
    assert gg.init_backend("CPU:n_threads=2").n_threads == 2 == gg.init_backend("cpu", n_threads=2).n_threads
    seen = []
    fake = devices.Fake("Fake")
    fake.init_backend = lambda params: seen.append(params) or gg.Backend(fake)
    reg = Reg(fake)
    gg.registry.register(reg)
    try:
        gg.init_backend("FAKE:a=1:b")
        gg.init_backend("fake", x=3)
        assert seen == ["a=1:b", "x=3"], "the name ends at the first colon"
        fake.init_backend = lambda params: None
        with pytest.raises(gg.GgjitError, match="made no backend"):
            gg.init_backend("fake")
    finally:
        gg.registry.unregister(reg)
    for bad, text in (("nope", "no device 'nope'"), ("CPU:threads=2", "unknown .*'threads=2'"),
                      ("CPU:n_threads=two", "n_threads='two': expected int"),
                      ("CPU:n_threads", "unknown .*'n_threads'")):
        with pytest.raises(gg.ParamError, match=text):
            gg.init_backend(bad)
    with pytest.raises(gg.ParamError, match="NVIDIA"):
        gg.init_backend("CUDA7")


# ---------------------------------------------------------------- NULL
def test_null_plans_and_reports_but_holds_nothing():
    null = gg.init_backend("NULL")
    ctx = gg.Context()
    a, b = ctx.new_tensor(gg.F32, (1 << 20, 1 << 18), "a"), ctx.new_tensor(gg.F32, (1 << 20,), "b")
    buf = gg.alloc_ctx_tensors(ctx, null)
    assert buf.size == 4 * ((1 << 38) + (1 << 20)), "a terabyte that does not exist"
    graph = gg.Graph(gg.silu(gg.add(a, b)))
    ga = gg.GraphAllocator(null)
    ga.alloc_graph(graph)
    assert ga.buffer_size(0) == 1 << 40
    null.graph_compute(graph)
    assert null.report == [{"what": "compute", "nodes": 2, "ops": {"ADD": 1, "UNARY": 1}, "written_nbytes": 1 << 41,
                            "read_nbytes": (1 << 41) + (1 << 22)}]
    gg.tensor_set(b, b"1234")
    assert buf.written_nbytes == 4
    with pytest.raises(gg.NotAllocated, match="NULL"):
        b.numpy()
    with pytest.raises(gg.ParamError, match="the NULL device has the parameters name=... and memory=..., got 'x=1'"):
        gg.init_backend("NULL:x=1")
    for bad in ("64", 1.5, None):
        with pytest.raises(gg.TypeMismatch, match="buffer size"):
            null.alloc_buffer(bad)
    for memory, size in ((b"abcd", 4), (memoryview(bytearray(5)), 5), (np.zeros((3, 4)), 96)):
        assert null.device.buffer_from_host_ptr(memory).size == size
    with pytest.raises(gg.TypeMismatch, match="buffer object"):
        null.device.buffer_from_host_ptr("text")


def test_devices_know_their_registry_A6_08():
    registry = Registry()
    device = devices.Fake("Alpha")
    assert device.reg is None
    mine = Reg(device)
    registry.register(mine)
    registry.devices()
    assert device.reg is mine and registry.device("alpha").reg is mine
    assert CPU_DEVICE.reg is registry.registry("CPU") and gg.init_backend("NULL").device.reg.name == "NULL"


def test_devices_offer_buffer_types_A6_04():
    class Pinned(devices.Fake):
        def host_buffer_type(self):
            return CPU.default_buffer_type
    pinned = Pinned("P")
    assert pinned.props["host_buffer"] and pinned.host_buffer_type().is_host()
    assert pinned.init_backend().default_buffer_type is pinned.buffer_type()
    assert not CPU_DEVICE.props["host_buffer"] and CPU_DEVICE.host_buffer_type() is None
    assert CPU_DEVICE.buffer_type() is CPU.default_buffer_type


def test_devices_say_whether_they_are_asynchronous_A6_02():
    class Late(devices.Fake):
        is_async = True
    assert Late("L").props["async"] is True and CPU_DEVICE.props["async"] is False


def test_entries_by_number_A8_08():
    registry = Registry()
    registry.register(Reg(devices.Fake("Alpha")))
    names = [d.name for d in registry.devices()]
    assert names == ["Alpha", "CPU", "NULL"]
    for i, name in enumerate(names):
        device = registry.devices()[i]
        assert device.init_backend("").device.name == name
        assert device.buffer_type().alloc_buffer(64).size == 64
    with pytest.raises(IndexError, match="out of range"):
        registry.devices()[3]


def test_registration_is_told_when_asked(monkeypatch, capsys):
    monkeypatch.setattr("ggjit.api.registry.debug", {"registry"})
    registry, reg = Registry(), Reg(devices.Fake("Alpha"), name="told")
    for _ in range(2):
        registry.register(reg)
    assert capsys.readouterr().err == "registered backend told: devices Alpha\n"


def test_extension_functions_of_the_cpu_B5():
    backend, calls = gg.init_backend("CPU", n_threads=1), []
    get = gg.registry.proc_address
    get("ggml_backend_set_n_threads")(backend, 2)
    get("ggml_backend_set_abort_callback")(backend, lambda: calls.append(1))
    assert backend.n_threads == 2 and backend.abort_callback is not None
    assert get("ggml_backend_dev_get_extra_bufts")(CPU_DEVICE) == CPU_DEVICE.extra_buffer_types() != []
    assert {"isa", "cpu", "cores"} == set(get("ggml_backend_get_features")())
    assert gg.registry.registry("CPU").proc_address("ggml_backend_cpu_numa_init") is None
