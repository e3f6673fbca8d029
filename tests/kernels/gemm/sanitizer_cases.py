"""Small products by every CUDA kernel, for compute-sanitizer; `test_sanitizer` runs this file under it.

The arguments are names of kernels; without any, all take part. Each array is an allocation of its own, without CuPy's
pool, so that a read or write past its end is seen.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from distmm_kernels.candidates import CANDIDATES
from distmm_kernels.config import Problem
from distmm_kernels.device import current
from distmm_kernels.layout.float8 import carrier
from distmm_kernels.select import select, why_not

REAL = ("float32", "float64", "int32", "int64", "float16", "int8", "uint8", "bool", ml_dtypes.bfloat16)
TYPES = [np.dtype(name) for name in (*REAL, "complex64", "complex128", ml_dtypes.float8_e4m3fn)]
SHAPES = [(1, 1, 1), (65, 129, 97), (128, 300, 256), (33, 1100, 70), (20, 8208, 70)]


def placed(values: np.ndarray[Any, Any], order: str) -> Any:
    """Return a matrix in an allocation of its own: in C or Fortran order, or in C order from its second element on."""
    if order != "late":
        return cupy.asarray(np.asarray(values, order=order).view(carrier(values.dtype)))
    whole = np.append(np.zeros(1, values.dtype), values)
    return cupy.asarray(whole.view(carrier(values.dtype)))[1:].reshape(values.shape)


def main() -> None:
    cupy.cuda.set_allocator(None)
    wanted = sys.argv[1:] or [candidate.name for candidate in CANDIDATES]
    device, done = current(), 0
    for candidate, dtype in itertools.product(CANDIDATES, TYPES):
        left_out = candidate.name.startswith("cublas") or candidate.name not in wanted
        if left_out or why_not(candidate, Problem(1, 1, 1, dtype), device) is not None:
            continue
        kernel = select(Problem(1, 1, 1, dtype), device, name=candidate.name)
        for (m, k, n), order in itertools.product(SHAPES, ("C", "F", "late")):
            rng = np.random.default_rng(0)
            a, b = (rng.integers(-9, 10, s).astype(dtype) for s in ((m, k), (k, n)))
            left, right = (placed(x, order) for x in (a, b))
            c = cupy.ones((m, n), kernel.accumulator)
            sys.stdout.write(f"{candidate.name} {dtype} {m} {k} {n} {order}\n")
            prepared = kernel.prepare_a(left), kernel.prepare_b(right)
            d = kernel.multiply(*prepared, c)
            wide = np.dtype(np.complex128 if dtype.kind == "c" else np.float64)
            exact = a.astype(wide) @ b.astype(wide) + 1  # integers
            np.testing.assert_array_equal(d.get(), exact.astype(kernel.accumulator))
            *others, panels = kernel.joined([prepared] * 2)
            for pair in others:
                d = kernel.multiply(*pair, c)
            d = kernel.multiply(*panels, d if others else c, alpha=2, beta=3, c0=c)
            np.testing.assert_array_equal(d.get(), (2 * (2 * exact - 1) + 3).astype(kernel.accumulator))
            d = kernel.multiply(*kernel.prepare_both(left, "hermitian"), None, symmetry="hermitian")
            exact = a.astype(wide) @ a.astype(wide).T
            np.testing.assert_array_equal(d.get(), exact.astype(kernel.accumulator))
            done += 1
    sys.stdout.write(f"{done} products right\n")


if __name__ == "__main__":
    main()
