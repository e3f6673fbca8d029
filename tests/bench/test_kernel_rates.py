"""`kernel_rates.py` prints a section that `rates.toml` can take as it is."""

from __future__ import annotations

import tomllib

import pytest

from distmm_kernels.candidate import Candidate
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.rates import SIZES, rates_of, seconds
from tests.bench import kernel_rates

H100 = Device("cuda", "NVIDIA H100 80GB HBM3", 0, 80 * 10**9, (9, 0), 132)
A10 = Device("cuda", "NVIDIA A10", 0, 24 * 10**9, (8, 6), 72)


def test_the_section_has_the_same_kernels_types_and_sizes_as_those_that_are_there() -> None:
    measured: list[tuple[str, str, int]] = []

    def measure(candidate: Candidate, cube: Problem, device: Device) -> float:
        assert device is H100
        measured.append((candidate.name, cube.dtype.name, cube.k))
        return 100 + cube.k / 1e3

    text = "\n".join(kernel_rates.section(H100, measure, copy=3.1e12))
    (model, facts), *rest = tomllib.loads(text).items()
    assert (model, facts["capability"], facts["copy"], rest) == (H100.name, [9, 0], 3.1, [])
    there = {name: set(types) for name, types in rates_of(H100).kernels.items()}
    assert {name: set(types) for name, types in facts["kernels"].items()} == there
    assert facts["kernels"]["hopper"]["bfloat16"] == [101, 101, 102, 104, 108]
    assert {size for name, _, size in measured if name == "hopper"} == set(SIZES)


def test_products_that_take_long_are_not_measured_and_have_the_rate_of_the_size_before() -> None:
    longest: dict[str, int] = {}

    def measure(candidate: Candidate, cube: Problem, device: Device) -> float:
        longest[candidate.name] = cube.k
        assert cube.k == SIZES[0] or seconds(candidate, cube, device) < 0.2
        return float(cube.k)

    text = "\n".join(kernel_rates.section(H100, measure, ["tiled", "hopper"]))
    facts = tomllib.loads(text)[H100.name]["kernels"]
    assert longest == {"tiled": 4096, "hopper": 8192}
    assert {tuple(rates) for rates in facts["tiled"].values()} == {(512, 1020, 2050, 4100, 4100)}
    assert facts["hopper"]["int8"][-1] == 8190


def test_kernels_that_do_not_run_on_a_gpu_are_left_out() -> None:
    names = {candidate.name for candidate, _ in kernel_rates.entries(A10)}
    assert "hopper" not in names
    assert {"mma_sync", "tiled", "cublas"} <= names


@pytest.mark.gpu
def test_rates_of_this_gpu_are_measured() -> None:
    from distmm_kernels import device

    here = device.current()
    text = "\n".join(kernel_rates.of_this_gpu(here, ["register_tiled", "cublas"]))
    facts = tomllib.loads(text)[here.name]
    assert facts["copy"] > 0.05
    for types in facts["kernels"].values():
        for dtype, rates in types.items():
            assert 0.01 < rates[0] < 1000, dtype
