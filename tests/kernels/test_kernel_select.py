from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from distmm_kernels import device
from distmm_kernels.config import PRECISIONS, SUPPORTED, Problem
from distmm_kernels.gemm.cpu import CpuKernel
from distmm_kernels.select import CANDIDATES, explain, names, select, why_not

CPU = device.cpu()
GPU = device.Device("cuda", "NVIDIA H200", 0, 140 << 30, (9, 0), 132)


@pytest.fixture
def unasked(monkeypatch):
    """Let `select` choose among all of our own kernels, those on trial too."""
    ours = tuple(c if c.name == "cublas" else dataclasses.replace(c, by_name_only=False) for c in CANDIDATES)
    monkeypatch.setattr("distmm_kernels.select.CANDIDATES", ours)


def problem(dtype="float32", k=256, n=128):
    return Problem(n, k, n, np.dtype(dtype))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_cpu_serves_every_type_and_precision(dtype, precision):
    kernel = select(problem(dtype), CPU, precision)
    assert isinstance(kernel, CpuKernel)
    assert kernel.name == "cpu"
    assert kernel.device_kind == "cpu"


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_a_kernel_on_trial_is_not_chosen_unasked(dtype):
    assert select(problem(dtype, n=2048), GPU).name == "tiled"


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_large_products_on_a_gpu_take_the_kernel_with_the_fewest_global_loads(dtype):
    assert select(problem(dtype, n=2048), GPU).name == "register_tiled"
    assert select(Problem(200, 64, 200, np.dtype(dtype), batch=(3, 40)), GPU).name == "register_tiled"


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (128, 128), (256, 256), (1, 4096), (2000, 8)])
def test_products_that_large_tiles_would_leave_idle_take_small_ones(dtype, m, n):
    assert select(Problem(m, 500, n, np.dtype(dtype)), GPU).name == "tiled"


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize(("n", "name"), [(512, "tiled"), (768, "register_tiled")])
def test_the_choice_turns_when_large_tiles_keep_enough_multiprocessors_busy(n, name):
    assert select(problem("float32", k=n, n=n), GPU).name == name


@pytest.mark.parametrize("name", ["register_tiled", "naive", "tiled", "guvectorized", "cublas"])
def test_a_name_forces_a_kernel(name):
    assert select(problem(), GPU, name=name).name == name


def test_loads_fall_by_the_tile():
    loads = {candidate.name: candidate.loads for candidate in CANDIDATES if candidate.loads}
    assert loads["naive"](problem(k=1024)) == 2048
    assert loads["tiled"](problem(k=1024)) == 64
    assert loads["tiled"](problem(k=1025)) == 66
    assert loads["tiled"](problem(k=0)) == 0
    assert loads["register_tiled"](problem(k=1024)) == 16
    assert loads["register_tiled"](problem("complex128", k=1024)) == 32
    assert loads["register_tiled"](problem(k=0)) == 0


def test_a_name_that_cannot_serve_is_refused_with_the_names_that_can():
    with pytest.raises(
        ValueError, match=r"does not multiply int32; use one of register_tiled, tiled, naive, guvectorized$"
    ):
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
    assert names(GPU) == ("register_tiled", "tiled", "naive", "guvectorized", "cublas")


@pytest.mark.usefixtures("unasked")
def test_explain_gives_a_reason_for_every_candidate():
    text = explain(problem("int64", k=64), GPU)
    first, *others = text.splitlines()
    assert first.startswith("(128, 64) @ (64, 128) int64 on NVIDIA H200 (cuda:0), precision highest: tiled")
    assert sorted(line.split()[1].rstrip(":") for line in others) == [
        "cpu",
        "cublas",
        "guvectorized",
        "naive",
        "register_tiled",
    ]
    of_c = "loads per element of C"
    assert f"  not naive: 128 {of_c}, tiled 4 {of_c} in tiles of 32 x 32" in others
    assert f"  not register_tiled: 2 {of_c} in tiles of 64 x 64, tiled 4 {of_c} in tiles of 32 x 32" in others
    assert "  not cublas: it does not multiply int64" in others
    assert "used only when asked for by name" in explain(problem(), GPU)


def test_every_candidate_is_legal_somewhere():
    for candidate in CANDIDATES:
        assert why_not(candidate, problem(), CPU if candidate.device_kind == "cpu" else GPU) is None
