from __future__ import annotations

import numpy as np
import pytest

from distmm_kernels import device
from distmm_kernels.config import PRECISIONS, SUPPORTED, Problem
from distmm_kernels.gemm.cpu import CpuKernel
from distmm_kernels.select import CANDIDATES, explain, names, select, why_not

CPU = device.cpu()
GPU = device.Device("cuda", "NVIDIA H200", 0, 140 << 30, (9, 0), 132)


def problem(dtype="float32", k=256):
    return Problem(128, k, 128, np.dtype(dtype))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_cpu_serves_every_type_and_precision(dtype, precision):
    kernel = select(problem(dtype), CPU, precision)
    assert isinstance(kernel, CpuKernel)
    assert kernel.name == "cpu"
    assert kernel.device_kind == "cpu"


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_gpu_takes_the_kernel_with_the_fewest_global_loads(dtype):
    assert select(problem(dtype), GPU).name == "tiled"


@pytest.mark.parametrize("name", ["naive", "tiled", "guvectorized", "cublas"])
def test_a_name_forces_a_kernel(name):
    assert select(problem(), GPU, name=name).name == name


def test_loads_fall_by_the_tile():
    loads = {candidate.name: candidate.loads for candidate in CANDIDATES if candidate.loads}
    assert loads["naive"](1024) == 2048
    assert loads["tiled"](1024) == 64
    assert loads["tiled"](1025) == 66
    assert loads["tiled"](0) == 0


def test_a_name_that_cannot_serve_is_refused_with_the_names_that_can():
    with pytest.raises(ValueError, match=r"does not multiply int32; use one of tiled, naive, guvectorized$"):
        select(problem("int32"), GPU, name="cublas")
    with pytest.raises(ValueError, match=r"runs on cuda devices.*; use one of cpu$"):
        select(problem(), CPU, name="tiled")
    with pytest.raises(ValueError, match=r"'fastest'.*no kernel of this name; use one of cpu$"):
        select(problem(), CPU, name="fastest")


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="'double': use one of highest, high, medium, ieee"):
        select(problem(), CPU, "double")
    with pytest.raises(ValueError, match="'double'"):
        explain(problem(), CPU, "double")


def test_names_are_those_of_the_device():
    assert names(CPU) == ("cpu",)
    assert names(GPU) == ("tiled", "naive", "guvectorized", "cublas")


def test_explain_gives_a_reason_for_every_candidate():
    text = explain(problem("int64", k=64), GPU)
    first, *others = text.splitlines()
    assert first.startswith("(128, 64) @ (64, 128) int64 on NVIDIA H200 (cuda:0), precision highest: tiled")
    assert sorted(line.split()[1].rstrip(":") for line in others) == ["cpu", "cublas", "guvectorized", "naive"]
    assert "  not naive: 128 loads per element of C, tiled 4 loads per element of C" in others
    assert "  not cublas: it does not multiply int64" in others
    assert "used only when asked for by name" in explain(problem(), GPU)


def test_every_candidate_is_legal_somewhere():
    for candidate in CANDIDATES:
        assert why_not(candidate, problem(), CPU if candidate.device_kind == "cpu" else GPU) is None
