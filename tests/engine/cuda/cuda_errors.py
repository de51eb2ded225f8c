"""What can be wrong with a CUDA device, in the simulator: no driver, an old one, a toolkit that does not fit, no
memory in the middle of a model, a lost device.  Each is a typed error with the remedy, and the CPU goes on.

Run by test_cuda.py.  The compilers' own errors are in test_cuda_compile.py, positions beyond RoPE's in cuda_ops.py.
"""
import gc

import numpy as np
import pytest
from helpers import tiny_model
from helpers.device_contract import floats, on
from helpers.sample import sampled

import ggjit as gg
from ggjit.cuda import device as cuda
from ggjit.cuda import driver as cuda_driver
from ggjit.cuda import functions
from ggjit.cuda import simulated_driver as cuda_sim
from ggjit.cuda.driver import DeviceLost
from ggjit.models import load_model


def the_cpu_goes_on():
    x = floats(3)
    np.testing.assert_array_equal(gg.compute(gg.neg(gg.from_numpy(gg.Context(), x))), -x)


# ---------------------------------------------------------------- no device
@pytest.fixture
def undiscovered():
    """As in a new process, which has not looked for devices; those of this one come back."""
    kept = cuda_driver.driver, cuda.found_devices, cuda.missing
    found = [f() for f in kept]
    for f in kept:
        f.cache_clear()
    yield
    cuda_sim.fail.clear()
    cuda.missing.cache_clear()
    assert found[0] is not None and cuda.missing() is None


def no_device_because(match):
    assert [d.name for d in gg.registry.devices()] == ["CPU", "NULL"]
    with pytest.raises(gg.ParamError, match=match) as e:
        gg.init_backend("CUDA0")
    assert isinstance(e.value.__cause__, gg.GgjitError)
    the_cpu_goes_on()

@pytest.mark.parametrize("function,status,match", [
    ("cuInit", "CUDA_ERROR_NO_DEVICE", "no NVIDIA GPU.*use the CPU backend"), ("cuInit", "CUDA_ERROR_UNKNOWN", "lost"),
    ("cuDeviceGetCount", "CUDA_ERROR_NO_DEVICE", "no NVIDIA GPU")])
def test_without_a_usable_gpu_the_reason_is_named(undiscovered, failing, function, status, match):
    failing[function] = status, 0
    no_device_because(match)


def test_without_a_driver_the_remedy_is_named(undiscovered, monkeypatch):
    def absent():
        raise RuntimeError("libcuda.so.1: cannot open shared object file")
    monkeypatch.setattr(cuda_driver, "_api", absent)
    no_device_because("no usable NVIDIA driver.*libcuda.*install one, or use the CPU")


def test_a_driver_that_is_too_old_is_named(undiscovered, monkeypatch):
    monkeypatch.setattr(cuda_sim, "cuDriverGetVersion", lambda: (cuda_sim.CUresult.CUDA_SUCCESS, 12040))
    no_device_because("serves CUDA 12.4; ggjit needs 13.0: update the driver")


def test_an_old_gpu_is_refused(gpu, monkeypatch):
    monkeypatch.setattr(gpu.device, "compute_capability", (7, 5))
    with pytest.raises(gg.GgjitError, match="8.0"):
        gpu.device.init_backend()


# ---------------------------------------------------------------- while it is used
def test_out_of_device_memory(gpu):
    with pytest.raises(gg.OutOfMemory, match="n_gpu_layers"):
        gpu.alloc_buffer(2 << 30)
    assert gpu.alloc_buffer(64).size == 64


def test_code_for_another_gpu_names_the_driver(gpu, failing):
    failing["cuModuleLoadData"] = "CUDA_ERROR_NO_BINARY_FOR_GPU", 0
    a = on(gpu, gg.F32, (4,), floats(4))
    with pytest.raises(gg.NotSupported, match="update the driver"):
        gg.compute(gg.leaky_relu(a, 0.123), backend=gpu)


def test_a_toolkit_that_does_not_fit_stops_the_plan_and_nothing_else(gpu, monkeypatch):
    def unfit(device, launch):
        raise gg.NotSupported("the CUDA toolkit of this installation does not link kernels; pip install")
    a, gpu.device.functions = on(gpu, gg.F32, (4,), floats(4)), {}
    monkeypatch.setattr(functions, "_image", unfit)
    with pytest.raises(gg.NotSupported, match="toolkit.*pip install"):
        gg.compute(gg.neg(a), backend=gpu)
    the_cpu_goes_on()
    monkeypatch.undo()
    np.testing.assert_array_equal(gg.compute(gg.neg(a), backend=gpu), -a.numpy())


@pytest.mark.parametrize("n_before", sampled([(n,) for n in range(4)], lambda case: ["one"]))
def test_out_of_device_memory_in_the_middle_of_a_model(tmp_path, gpu, failing, n_before):
    """What was computed is kept: the same tokens go on when there is memory again, and nothing leaks."""
    path, device = tiny_model.write(tmp_path / "tiny.gguf"), gpu.device
    with load_model(path, n_threads=1) as cpu, load_model(path, backend=gpu, reserve=False) as m:
        cpu.logits([3])
        m.logits([3])
        failing["cuMemAlloc"] = "CUDA_ERROR_OUT_OF_MEMORY", n_before
        try:
            got = m.decode([5, 9])
        except gg.OutOfMemory as e:
            assert "smaller context" in str(e) and "n_gpu_layers" in str(e)
            the_cpu_goes_on()
            failing.clear()
            got = m.decode([5, 9])
        failing.clear()
        np.testing.assert_allclose(got, cpu.decode([5, 9]), rtol=1e-3, atol=1e-4)
    del m
    gc.collect()
    device.collect()
    free = device.memory()[0]
    with load_model(path, backend=gpu, reserve=False) as m:
        m.logits([3])
    del m
    gc.collect()
    device.collect()
    assert device.memory()[0] == free


def test_a_lost_device_is_named_by_all_who_use_it_and_the_cpu_goes_on(tmp_path, failing):
    """Every call of the driver fails from then on, as on a card: reading, computing, closing the model."""
    path = tiny_model.write(tmp_path / "tiny.gguf")

    def used_until_lost():
        gpu = gg.init_backend("CUDA1")
        a = on(gpu, gg.F32, (8,), floats(8))
        m = load_model(path, backend=gpu, reserve=False)
        m.logits([3])
        for name in dir(cuda_sim):
            if name.startswith("cu") and hasattr(getattr(cuda_sim, name), "__wrapped__"):
                failing[name] = "CUDA_ERROR_ILLEGAL_ADDRESS", 0
        for use in (lambda: m.decode([5]), lambda: m.decode([5]), a.numpy, lambda: a.set(floats(8)), gpu.synchronize,
                    lambda: gg.compute(gg.neg(a), backend=gpu), m.free):
            with pytest.raises(DeviceLost, match="start a new process.*CPU backend goes on"):
                use()
        m.free()                                    # its memory on the host went at the first time
    used_until_lost()
    gc.collect()
    the_cpu_goes_on()
    with load_model(path, n_threads=1) as cpu:
        assert np.isfinite(cpu.logits([3])).all()
