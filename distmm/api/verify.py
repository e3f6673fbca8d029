"""The public function `verify`: checks a product by Freivalds' test, or by a full comparison for small sizes."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any, Literal

import dask.array as da
import numpy as np

from distmm import config
from distmm.api.array_types import check_sendable
from distmm.api.operands import Operand, check_pair, checked, wrap
from distmm.api.scalars import check_scalars, checked_seed, plain
from distmm.checking.freivalds import ProductCheck
from distmm.checking.tolerance import Tolerance
from distmm.checking.verdict import Verdict
from distmm.clusters import cluster
from distmm.clusters.context import computing
from distmm.errors import InputError
from distmm.planning.precision import Precision
from distmm.planning.problem import Problem
from distmm.transfer import share
from distmm.worker.tasks import to_host

__all__ = ["CHECKS", "check_possible", "verify"]

CHECKS = ("freivalds", "full", "none")

# The full comparison needs A, B and C in float64 at the same time. With more operations it would take minutes.
FULL_FLOPS = 2 * 4096**3

# Block edges of the check, for operands without chunks. The blocks take 17 MB and 0.3 GB in float32.
CPU_EDGE, GPU_EDGE = 2048, 8192


def verify(
    A: Any,
    B: Any,
    C: Any,
    *,
    check: Literal["freivalds", "full"] = "freivalds",
    seed: int | None = None,
    transa: bool = False,
    transb: bool = False,
    alpha: complex = 1,
    precision: Precision | None = None,
) -> Verdict:
    """Check that ``C = alpha * op(A) @ op(B)``. Any program may have computed C.

    Parameters
    ----------
    A : array-like of shape (m, k), or (k, m) with `transa`
        A Dask, NumPy or CuPy array, or a Zarr-like object. Each matrix is read once, block by block. It is read twice
        if the columns of B differ much in size, or if elements are near the limits of float64's range. B is read once
        more if rows of C stand out.
    B : array-like of shape (k, n), or (n, k) with `transb`
        As `A`.
    C : array-like of shape (m, n)
        As `A`.
    check : {"freivalds", "full"}
        "freivalds": compare ``A (B x)`` with ``C x`` for random vectors x, in O(n^2) operations. "full": compare every
        element with a float64 product, for small sizes.
    seed : int, optional
        Seed of the random vectors, at least 0. By default a random one. The verdict names it, so that a check can be
        repeated.
    transa, transb : bool
        Use the transpose of A or B.
    alpha : scalar
        Factor of the product.
    precision : {"highest", "ieee", "high", "medium"}, optional
        The precision that C was computed with. "high" and "medium" allow larger errors, because they round the
        operands. By default as in `matmul`.

    Returns
    -------
    Verdict
        ``bool(verdict)`` is True only if C is right. The outcome is "cannot tell" if C has inf or NaN, and the order
        of a sum decides whether the sum overflows.

    Raises
    ------
    InputError
        If the shapes do not match, a full check would be too large, or an argument has a value that is not allowed.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B = np.ones((30, 40)), np.ones((40, 50))
    >>> C = A @ B
    >>> distmm.verify(A, B, C).outcome
    'right'
    >>> C[2, 3] = 41
    >>> bool(distmm.verify(A, B, C))
    False
    """
    computing(now=True)  # refuses an asynchronous client before any work
    a, b, c = wrap(A, "A", transa), wrap(B, "B", transb), wrap(C, "C")
    for operand in (a, b, c):
        if len(operand.shape) != 2:
            raise InputError(
                f"{operand.name} has shape {operand.shape}: verify takes matrices; check batches one by one"
            )
    check_pair(a, b)
    expected = (a.shape[0], b.shape[1])
    if c.shape != expected:
        raise InputError(f"C has shape {c.shape}, but A {a.shape} times B {b.shape} has shape {expected}")
    if check not in ("freivalds", "full"):
        raise InputError(f"check {check!r} is not one of freivalds, full")
    check_scalars(alpha=alpha)
    alpha, seed = plain(alpha), secrets.randbits(32) if seed is None else checked_seed(seed)
    check_possible(check, Problem(a.shape[0], a.shape[1], b.shape[1], c.dtype))
    tolerance = Tolerance.of(a.dtype, b.dtype, c.dtype, a.shape[1], config.chosen("precision", precision))
    if check == "full":
        left, right, product = _blocks((a, b, c), on_gpu=False)
        return ProductCheck(left, right, product, tolerance, alpha).full()
    left, right, product = _blocks((a, b, c), _on_gpu((a, b, c), tolerance.work))
    return ProductCheck(left, right, product, tolerance, alpha).by_vectors(seed).seeded(seed)


def check_possible(check: str, problem: Problem) -> None:
    """Refuse a check that does not work for a product, or would take too long. Called before any work.

    Raises
    ------
    InputError
        For Freivalds' test of booleans, and for a full check of more than `FULL_FLOPS` operations.
    """
    if check == "freivalds" and problem.dtype.kind == "b":
        raise InputError(
            "C is boolean, and Freivalds' test needs a type with subtraction: use check full, or none in a job"
        )
    if check == "full" and problem.flops > FULL_FLOPS:
        raise InputError(
            f"a full check of a product of {problem.flops:.2g} operations would take more than {FULL_FLOPS:.2g} in "
            f"float64: use check freivalds"
        )


def _on_gpu(operands: tuple[Operand, ...], work: np.dtype) -> bool:
    """Whether the check runs on GPUs: for floating-point blocks of CuPy, or on a cluster whose workers have GPUs."""
    if work.kind not in "fc":
        return False
    client = computing()
    return all(x.kind == "cupy" for x in operands) or (
        client is not None and cluster.describe(client, work).device == "cuda"
    )


def _blocks(operands: tuple[Operand, ...], on_gpu: bool) -> list[da.Array]:
    """Return operands as Dask arrays with blocks in GPU memory or host memory."""
    edge, client = GPU_EDGE if on_gpu else CPU_EDGE, computing()
    arrays = []
    for operand in operands:
        # The largest multiples of the file's chunks that are no longer than `edge`, but at least one chunk.
        edges = tuple(max(1, edge // c) * c for c in operand.storage_chunk or (edge, edge))
        chunks = operand.chunks or da.core.normalize_chunks(edges, operand.shape, dtype=operand.dtype)
        source = operand.source
        if isinstance(source, da.Array):
            operand = replace(operand, source=checked(source, operand.name))
        if client is not None:
            check_sendable(source, operand.name)
        if client is not None and isinstance(source, np.ndarray) and operand.file is None:  # read without a copy
            operand = replace(operand, source=share(source, client) or source)
        array = operand.blocked(chunks, "cuda" if on_gpu else "cpu")
        if operand.kind == "cupy" and not on_gpu:
            array = array.map_blocks(to_host, dtype=array.dtype, meta=np.empty((0, 0), array.dtype))
        arrays.append(array)
    return arrays
