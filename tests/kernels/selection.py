"""GPUs and problems for the tests of the choice of a kernel. They need no GPU."""

from __future__ import annotations

import dataclasses

import numpy as np

from distmm_kernels import device
from distmm_kernels.candidates import CANDIDATES
from distmm_kernels.config import Problem
from distmm_kernels.select import ranked

H200 = device.Device("cuda", "NVIDIA H200", 0, 140 << 30, (9, 0), 132)
A100 = dataclasses.replace(H200, name="NVIDIA A100", compute_capability=(8, 0), multiprocessors=108)
GEFORCE = [dataclasses.replace(H200, name="GeForce", compute_capability=which) for which in ((8, 6), (8, 9), (12, 0))]
T4 = dataclasses.replace(H200, name="Tesla T4", compute_capability=(7, 5), multiprocessors=40)
BY_NAME = {candidate.name: candidate for candidate in CANDIDATES}
BY_MMA_SYNC = {
    "float64": "mma_sync_residues",
    "complex128": "mma_sync_complex_residues",
    **dict.fromkeys(("int32", "int64"), "mma_sync_integer_residues"),
}


def problem(dtype="float32", k=256, n=128):
    """A product of n x k and k x n elements."""
    return Problem(n, k, n, np.dtype(dtype))


def chosen(problem, where, precision="highest", **options):
    """The name of the best of our own kernels."""
    names = (candidate.name for candidate, _ in ranked(problem, where, precision, **options))
    return next(name for name in names if not name.startswith("cublas"))
