from __future__ import annotations

import dataclasses
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels.config import NARROW, SUPPORTED, Problem, compute_dtype, operand_dtype


@pytest.mark.parametrize(
    ("result", "accumulator"),
    [
        ("float16", "float32"),
        (ml_dtypes.bfloat16, "float32"),
        ("int8", "int32"),
        ("int16", "int32"),
        ("uint8", "int32"),
        ("uint16", "int32"),
        ("uint32", "int32"),
        ("uint64", "int64"),
        ("bool", "int64"),
        (">f4", "float32"),
        (">i8", "int64"),
    ],
)
def test_accumulator_of_each_narrow_type(result, accumulator):
    assert compute_dtype(result) == np.dtype(accumulator)


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_supported_types_are_their_own_accumulators(dtype):
    assert compute_dtype(dtype) is dtype


@pytest.mark.parametrize("dtype", ["O", "U3", "S2", "M8[s]", "m8[s]", "g", "G", "V4", [("x", "i4")]])
def test_types_without_a_product_are_refused_with_the_remedy(dtype):
    with pytest.raises(TypeError, match=r"no kernel multiplies.*\.astype to one of float32"):
        compute_dtype(dtype)


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_operands_stay_narrow_and_accumulate_wider(dtype):
    assert operand_dtype(dtype) == dtype
    assert Problem(2, 3, 4, dtype).accumulator == compute_dtype(dtype)
    assert compute_dtype(dtype).itemsize > dtype.itemsize


def test_other_operands_are_handed_over_in_the_accumulators_type():
    for dtype in ("int16", "uint16", "uint64", ">f4", "complex64"):
        assert operand_dtype(dtype) == compute_dtype(dtype)


def test_uint32_and_uint64_products_keep_their_bits_in_the_signed_accumulator():
    for dtype in (np.uint32, np.uint64):
        a, b = (np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, (9, 9), dtype) for seed in (0, 1))
        wide = compute_dtype(dtype)
        np.testing.assert_array_equal((a.astype(wide) @ b.astype(wide)).astype(dtype), a @ b)


def test_problem_checks_itself():
    with pytest.raises(ValueError, match="negative"):
        Problem(3, -1, 4, np.dtype("float32"))
    with pytest.raises(ValueError, match="negative"):
        Problem(3, 1, 4, np.dtype("float32"), batch=(2, -2))
    with pytest.raises(TypeError, match=r"operand_dtype\('uint16'\)"):
        Problem(3, 1, 4, np.dtype("uint16"))
    with pytest.raises(TypeError, match="integer"):
        Problem(3, 1.5, 4, np.dtype("float32"))


def test_problem_is_frozen_hashable_and_prints_its_shapes():
    problem = Problem(np.int64(3), 1, 4, np.float32, batch=(2, 5))
    assert problem == Problem(3, 1, 4, np.dtype("float32"), (2, 5))
    assert hash(problem) == hash(Problem(3, 1, 4, np.dtype("float32"), (2, 5)))
    assert str(problem) == "2x5 x (3, 1) @ (1, 4) float32"
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.m = 7


def test_import_and_selection_touch_neither_numba_nor_cuda():
    # in a process of its own: this one has imported everything
    code = (
        "import sys, distmm_kernels.config, distmm_kernels.device, distmm_kernels.select as s, distmm_kernels.bench\n"
        "problem = distmm_kernels.config.Problem(3, 4, 5, 'float32')\n"
        "s.select(problem, distmm_kernels.device.cpu())\n"
        "found = {name.split('.')[0] for name in sys.modules} & {'numba', 'cuda', 'cupy', 'dask', 'matplotlib'}\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
