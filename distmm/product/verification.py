"""The check of a product by Freivalds' test, or by a full comparison for small sizes: for `verify` and for jobs."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Literal

import dask.array as da
import numpy as np
from distributed import Client

from distmm import config
from distmm.checking.freivalds import ProductCheck
from distmm.checking.verdict import Verdict
from distmm.clusters import cluster
from distmm.clusters.waiting import watched
from distmm.errors import InputError
from distmm.planning.precision import Precision
from distmm.planning.problem import Problem
from distmm.product.array_types import check_sendable
from distmm.product.context import computing
from distmm.product.operand import Operand
from distmm.product.operand_blocks import blocked, checked
from distmm.product.operand_pair import check_pair
from distmm.product.scalars import check_scalars, checked_seed, plain
from distmm.worker.gpu_copies import blocks_to_host
from distmm_kernels.tolerance import Tolerance

# The full comparison needs A, B and C in float64 at the same time. With more operations it would take minutes.
FULL_FLOPS = 2 * 4096**3

# Block edges of the check, for operands without chunks. The blocks take 17 MB and 0.3 GB in float32.
CPU_EDGE, GPU_EDGE = 2048, 8192


def verdict(
    a: Operand,
    b: Operand,
    c: Operand,
    *,
    check: Literal["freivalds", "full"] = "freivalds",
    seed: int | None = None,
    alpha: complex = 1,
    precision: Precision | None = None,
) -> Verdict:
    """Check that ``c = alpha * a @ b``. The other arguments, and the errors, are those of `distmm.verify`."""
    client = computing(now=True)  # refuses an asynchronous client before any work
    for operand in (a, b, c):
        if len(operand.shape) != 2:
            raise InputError(
                f"{operand.name} has shape {operand.shape}: verify takes matrices; check batches one by one"
            )
    check_pair(a, b)
    expected = (a.shape[0], b.shape[1])
    if c.shape != expected:
        raise InputError(f"C has shape {c.shape}, but A {a.shape} times B {b.shape} has shape {expected}")
    if not isinstance(check, str) or check not in ("freivalds", "full"):
        raise InputError(f"check {check!r} is not one of freivalds, full")
    check_scalars(alpha=alpha)
    alpha, seed = plain(alpha), secrets.randbits(32) if seed is None else checked_seed(seed)
    if alpha == 0:  # as in BLAS, A and B are not read
        a, b = a.part(slice(0), -1), b.part(slice(0), -2)
    check_possible(check, Problem(a.shape[0], a.shape[1], b.shape[1], c.dtype))
    accuracy = config.chosen("precision", precision)
    tolerance = Tolerance.of(a.dtype, b.dtype, c.dtype, a.shape[1], accuracy)
    on_gpu = check == "freivalds" and _on_gpu((a, b, c), tolerance.work, client)
    left, right, product = _blocks(tuple(x.here or x for x in (a, b, c)), on_gpu, client, check)
    comparison = ProductCheck(left, right, product, tolerance, alpha, c.chunks)
    with watched(client):
        return comparison.full() if check == "full" else comparison.by_vectors(seed).seeded(seed)


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


def _on_gpu(operands: tuple[Operand, ...], work: np.dtype, client: Client | None) -> bool:
    """Whether the check runs on GPUs: for floating-point blocks of CuPy, or on a cluster whose workers have GPUs."""
    if work.kind not in "fc":
        return False
    return all(x.kind == "cupy" for x in operands) or (
        client is not None and cluster.describe(client, work).device == "cuda"
    )


def _blocks(operands: tuple[Operand, ...], on_gpu: bool, client: Client | None, check: str) -> list[da.Array]:
    """Return operands as Dask arrays with blocks in GPU memory or host memory.

    Freivalds' test checks the blocks that arrive itself, but for those that are copied to a GPU before.
    """
    edge, arrays = GPU_EDGE if on_gpu else CPU_EDGE, []
    for operand in operands:
        # The largest multiples of the file's chunks that are no longer than `edge`, but at least one chunk.
        edges = tuple(max(1, edge // c) * c for c in operand.storage_chunk or (edge, edge))
        chunks = operand.chunks or da.core.normalize_chunks(edges, operand.shape, dtype=operand.dtype)
        source = operand.source
        if isinstance(source, da.Array) and (check == "full" or (on_gpu and operand.kind == "numpy")):
            operand = replace(operand, source=checked(source, operand.name))
        if client is not None:
            check_sendable(source, operand.name)
        array = blocked(operand, chunks, "cuda" if on_gpu else "cpu", client)
        if operand.kind == "cupy" and not on_gpu:
            array = blocks_to_host(array)
        arrays.append(array)
    return arrays
