"""Rates of kernels beside cuBLAS in the same race, against the floors that they are not to fall below."""

from __future__ import annotations

import pytest

from distmm_kernels.bench import HEATS, race
from distmm_kernels.candidates import CANDIDATES

# Least ratio of a kernel's sustained rate to that of cuBLAS in the same race, n = 8192, operands prepared, on Hopper
# GPUs. A lower one is a fault: `pytest -m speed`. Measured ratios less 8 %.
FLOORS: dict[str, dict[str, float]] = {
    "fp16x3": {"float32": 4.4},
    "tf32x3": {"float32": 2.4},
    "register_tiled": {"float32": 0.95},
    "mma_sync_fp16x3": {"float32": 2.3},
    "hopper_tf32": {"float32": 0.94},
    "hopper_bf16": {"float32": 13.8},
    "mma_sync_bf16": {"float32": 8.9},
    "hopper": {"bfloat16": 0.92, "float16": 0.92, "int8": 1.5},
    "mma_sync": {"bfloat16": 0.49, "float16": 0.46, "int8": 0.85},
    "dmma": {"float64": 0.91},
    "residues": {"float64": 1.4},
    "complex_fp16x3": {"complex64": 4.0},
    "complex_residues": {"complex128": 2.05},
}

RACED = [heat for heat in HEATS if any(heat.dtype in FLOORS.get(name, {}) for name in heat.kernels)]


def test_floors_are_of_kernels_and_types_that_a_race_measures():
    known = {each.name: each.dtypes for each in CANDIDATES}
    for name, by_type in FLOORS.items():
        assert by_type.keys() <= known[name]
        for dtype in by_type:
            assert any(heat.dtype == dtype and name in heat.kernels for heat in RACED), (name, dtype)


@pytest.mark.gpu
@pytest.mark.speed
@pytest.mark.parametrize("heat", RACED, ids=lambda heat: f"{heat.dtype}-{heat.precision}-to-{heat.out}")
def test_kernels_are_as_fast_beside_cublas_as_they_were_measured_to_be(hopper, heat):
    pytest.importorskip("torch", reason="cuBLAS for 16 bits and int8 is reached through PyTorch")
    found = race(hopper, ((8192, 8192, 8192),), (heat,), rounds=5)
    ratios = {run.contestant: run.ratio for run in found.runs if run.contestant != run.peer and not run.whole}
    slow = {
        name: f"{ratio:.2f} times cuBLAS, at least {FLOORS[name][heat.dtype]} expected"
        for name, ratio in ratios.items()
        if ratio < FLOORS.get(name, {}).get(heat.dtype, 0)
    }
    assert ratios, found.notes
    assert not slow
