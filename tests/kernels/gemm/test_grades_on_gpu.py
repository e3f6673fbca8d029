"""Grades of every kernel on a real GPU, as `kernels/README.md` has them (``pytest -m gpu -rP -k grade``)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.select import CANDIDATES, select, why_not
from tests.kernels.reference import grades

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

# These round their operands.
SHORTER = frozenset({"hopper_tf32", "hopper_bf16", "mma_sync_tf32", "mma_sync_bf16", "cublas_tf32"})
DTYPES = ("float32", "float64", "complex64", "complex128")
CASES = [
    (candidate, dtype)
    for candidate, dtype in itertools.product(CANDIDATES, DTYPES)
    if candidate.device_kind == "cuda" and candidate.name not in SHORTER and dtype in candidate.dtypes
]


@pytest.mark.parametrize(("candidate", "dtype"), CASES, ids=lambda value: getattr(value, "name", value))
def test_each_kernel_keeps_the_bound_of_each_element(gpu, candidate, dtype):
    problem = Problem(24, 1024, 20, np.dtype(dtype))
    if (reason := why_not(candidate, problem, gpu)) is not None:
        pytest.skip(reason)
    kernel = select(problem, gpu, name=candidate.name)

    def multiply(a, b):
        return kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None).get()

    found = grades.grade(multiply, dtype)
    print(f"{candidate.name}, {dtype}: {found}")  # noqa: T201 (a table to read, with -rP)
    assert found.letter == "A"
