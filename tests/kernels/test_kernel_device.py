from __future__ import annotations

import sys
import types

import pytest

from distmm_kernels import device


@pytest.fixture
def fresh_search(monkeypatch):
    """A search of its own for the test: what is found is remembered for the process."""
    device._found.cache_clear()
    yield monkeypatch
    device._found.cache_clear()


H200 = device.Device("cuda", "NVIDIA H200", 0, 140 << 30, (9, 0), 132)
V100 = device.Device("cuda", "Tesla V100", 1, 32 << 30, (7, 0), 80)


def test_cpu_has_memory_and_cores():
    cpu = device.cpu()
    assert cpu.kind == "cpu"
    assert cpu.memory > 1 << 28
    assert cpu.multiprocessors >= 1
    assert cpu.compute_capability is None


def test_a_gpu_and_a_reason_why_there_is_none_exclude_each_other():
    assert (device.why_no_gpu() is None) == bool(device.gpus())
    assert device.current() == (device.gpus()[0] if device.gpus() else device.cpu())


def test_without_a_driver_the_reason_is_one_sentence(fresh_search):
    def nothing():
        raise device._NoGpuError("no NVIDIA GPU or driver was found on this machine")

    fresh_search.setattr(device, "_driver_devices", nothing)
    assert device.gpus() == ()
    assert device.why_no_gpu() == "no NVIDIA GPU or driver was found on this machine"
    assert device.current() == device.cpu()


@pytest.mark.parametrize(
    ("gpus", "driver", "extra"),
    [
        ((H200,), 12040, "cuda12"),
        ((H200,), 13000, "cuda13"),
        ((H200,), 14010, "cuda13"),
        ((V100,), 12080, "cuda12"),
        ((V100,), 13000, "cuda12"),
        ((H200, V100), 13000, "cuda12"),
    ],
)
def test_a_gpu_without_cupy_says_what_to_type(fresh_search, gpus, driver, extra):
    fresh_search.setattr(device, "_driver_devices", lambda: (gpus, driver))
    fresh_search.setattr(device.importlib.util, "find_spec", lambda name: None)
    assert device.gpus() == ()
    named = gpus[-1].name  # the oldest
    assert device.why_no_gpu() == f"GPU found ({named}), but CuPy is missing: type pip install '.[{extra}]'"


@pytest.mark.parametrize(("driver", "said"), [(12030, "12.3"), (11080, "11.8"), (12020, "12.2")])
def test_a_driver_that_cannot_list_kernels_is_refused_before_any_product(fresh_search, driver, said):
    fresh_search.setattr(device, "_driver_devices", lambda: ((H200,), driver))
    fresh_search.setattr(device, "_missing_library", lambda oldest: None)
    assert device.gpus() == ()
    assert f"supports CUDA {said}, and the kernels need 12.4" in device.why_no_gpu()
    assert "driver 550 or a later one" in device.why_no_gpu()


@pytest.mark.parametrize(("gpu", "linker", "refused"), [(V100, 13, True), (V100, 12, False), (H200, 13, False)])
def test_a_gpu_that_the_compilers_do_not_know_is_refused_with_the_extra_that_does(fresh_search, gpu, linker, refused):
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=types.SimpleNamespace(getDeviceCount=lambda: 1)))
    bindings = types.ModuleType("cuda.bindings")
    bindings.nvvm = types.SimpleNamespace(version=lambda: (2, 0))
    bindings.nvjitlink = types.SimpleNamespace(version=lambda: (linker, 0))
    fresh_search.setattr(device, "_driver_devices", lambda: ((gpu,), 13000))
    fresh_search.setattr(device, "_simulated", lambda: False)
    fresh_search.setattr(device.importlib.util, "find_spec", lambda name: object())
    fresh_search.setitem(sys.modules, "cupy", cupy)
    fresh_search.setitem(sys.modules, "cuda.bindings", bindings)
    assert (device.gpus() == ()) == refused
    if refused:
        assert device.why_no_gpu() == (
            "GPU found (Tesla V100), but the compilers of CUDA 13 do not know its compute capability 7.0: "
            "type pip install '.[cuda12]'"
        )


def test_cupy_that_does_not_work_is_reported_with_its_own_words(fresh_search):
    def broken():
        raise RuntimeError("libcublas.so.13 not found")

    runtime = types.SimpleNamespace(getDeviceCount=broken)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    fresh_search.setattr(device, "_driver_devices", lambda: ((H200,), 13000))
    fresh_search.setattr(device.importlib.util, "find_spec", lambda name: object())
    fresh_search.setitem(sys.modules, "cupy", cupy)
    assert "CuPy cannot use it (libcublas.so.13 not found)" in device.why_no_gpu()


def test_the_simulator_is_not_taken_for_a_gpu(fresh_search):
    from numba import config

    fresh_search.setattr(device, "_driver_devices", lambda: ((H200,), 13000))
    fresh_search.setattr(device, "_missing_library", lambda oldest: None)
    assert device.gpus() == (H200,)
    device._found.cache_clear()
    fresh_search.setattr(config, "ENABLE_CUDASIM", 1)
    assert device.gpus() == ()
    assert "unset NUMBA_ENABLE_CUDASIM" in device.why_no_gpu()


def test_driver_answers_become_devices(fresh_search):
    driver = types.ModuleType("cuda.bindings.driver")
    ok = types.SimpleNamespace(name="CUDA_SUCCESS")
    driver.CUresult = types.SimpleNamespace(CUDA_SUCCESS=ok)
    driver.CUdevice_attribute = types.SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=132,
    )
    driver.cuInit = lambda flags: (ok,)
    driver.cuDeviceGetCount = lambda: (ok, 2)
    driver.cuDeviceGet = lambda index: (ok, index)
    driver.cuDeviceGetName = lambda size, handle: (ok, b"NVIDIA H200" + b"\0" * 245)
    driver.cuDeviceTotalMem = lambda handle: (ok, 140 << 30)
    driver.cuDeviceGetAttribute = lambda attribute, handle: (ok, attribute)
    driver.cuDriverGetVersion = lambda: (ok, 13020)
    fresh_search.setattr("cuda.bindings.driver", driver)
    found, version = device._driver_devices()
    assert found == (H200, device.Device("cuda", "NVIDIA H200", 1, 140 << 30, (9, 0), 132))
    assert version == 13020

    driver.cuInit = lambda flags: (types.SimpleNamespace(name="CUDA_ERROR_NO_DEVICE"),)
    with pytest.raises(device._NoGpuError, match=r"no usable NVIDIA GPU here: .* answered CUDA_ERROR_NO_DEVICE"):
        device._driver_devices()


@pytest.mark.gpu
def test_the_gpu_has_a_name_and_a_capability(gpu):
    assert gpu.kind == "cuda"
    assert gpu.name
    assert gpu.compute_capability >= (7, 0)
    assert gpu.memory > 1 << 30
