"""A product whose blocks are reduced by the tasks that finish them: checks, its plan, its results as lazy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Any, Literal, SupportsIndex

import dask.array as da
import numpy as np
from distributed import Client

from distmm.api.array import square, with_itself
from distmm.api.operands import Operand, check_pair, wrap
from distmm.api.product import Gemm
from distmm.api.wishes import Wishes
from distmm.clusters import cluster
from distmm.errors import InputError
from distmm.graph import reduction_graph
from distmm.graph.product_graph import Reduced
from distmm.planning.plan import Plan
from distmm.planning.problem import Symmetry
from distmm.worker import tasks

__all__ = ["Kinds", "check_metric", "check_ordered", "checked_k", "norms_of", "product_of", "results"]

Kinds = Sequence[tuple[np.dtype[Any], tuple[int, ...]]]

# Bytes of a piece of an operand whose norms a task computes.
NORMS_PIECE = 32 << 20


def product_of(A: Any, B: Any, transa: bool, transb: bool, how: tuple[Any, ...]) -> tuple[Gemm, Wishes]:
    """Return the product of two operands, or of one with itself, that is to be reduced.

    Raises
    ------
    InputError
    """
    precision, kernel, device, blocks, plan = how
    symmetry: Symmetry | None = None
    if B is None:
        a, b, symmetry = with_itself(A, transa, hermitian=True)
        blocks = square(blocks)
    else:
        a, b = wrap(A, "A", transa), wrap(B, "B", transb)
        check_pair(a, b)
    for operand in (a, b):
        if len(operand.shape) < 2:
            raise InputError(f"{operand.name} has shape {operand.shape}: what is reduced is a product of matrices")
    product = Gemm.of(a, b, symmetry=symmetry)
    if 0 in product.shape[:-2]:
        raise InputError(f"the product has shape {product.shape}: there is nothing to reduce")
    return product, Wishes.chosen(precision, kernel, device, blocks, plan)


def check_ordered(product: Gemm, wanted: str) -> None:
    """Refuse a product of complex numbers.

    Raises
    ------
    InputError
    """
    if product.dtype.kind == "c":
        raise InputError(f"the product is {product.dtype}, and complex numbers have no order, so no {wanted}")


def check_metric(metric: Any, *operands: Operand) -> None:
    """Refuse unknown metrics, and integer operands, whose products may wrap around.

    Raises
    ------
    InputError
    """
    if metric not in tasks.METRICS:
        raise InputError(f"metric {metric!r} is not one of {', '.join(tasks.METRICS)}")
    for x in operands:
        if x.dtype.kind in "biuc":
            raise InputError(f"{x.name} is {x.dtype}: a metric needs real floating-point numbers")


def checked_k(k: Any, n: int, what: str) -> int:
    """Return how many of n elements are asked for; `what` says what has ``{n}`` of them.

    Raises
    ------
    InputError
    """
    if not isinstance(k, SupportsIndex) or isinstance(k, (bool, np.bool_)) or not 1 <= index(k) <= n:
        raise InputError(f"k is {k!r}, and {what.format(n=n)}: give a whole number from 1 to {n}")
    return index(k)


def results(
    product: Gemm,
    wishes: Wishes,
    reduction: tasks.Reduction,
    kinds: Kinds,
    client: Client | None,
    down: bool = False,
    normed: bool = False,
) -> list[da.Array]:
    """Plan a product and return the results of its reduction, as lazy arrays.

    Parameters
    ----------
    product : Gemm
    wishes : Wishes
    reduction : Reduction
    kinds : sequence of (dtype, shape)
        Of one line, for each result.
    client : distributed.Client, optional
    down : bool
        Whether lines are columns of the product, and not rows.
    normed : bool
        Whether the reduction asks for norms.
    """
    client = cluster.usable(client)
    *batch, m, n = product.shape
    of_line = sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds)
    nbytes = math.prod(batch) * (n if down else m) * of_line

    def kept(plan: Plan) -> int:
        """Bytes of the results, and of the parts of a wave: its blocks may all be finished before any are merged."""
        height, _, width = plan.block_shape
        height, width = (width, height) if down else (height, width)
        share = min(1.0, width / reduction.k) if isinstance(reduction, tasks.Largest) else 1.0
        blocks = max(wave.c_blocks for wave in plan.waves) * (1 if product.symmetry is None else 2)
        return nbytes + blocks * math.prod(map(max, plan.blocking.batch)) * math.ceil(height * of_line * share)

    plan = product.reduced(wishes, kept, client, shared=normed)
    norms = norms_of(product, plan, client) if normed else ()
    reduced = Reduced(reduction, down, (norms[0].name, norms[1].name) if norms else None)
    kind: Literal["numpy", "cupy"] = "cupy" if plan.cluster.device == "cuda" else "numpy"
    name, graph = product.graphs(plan, kind, client, reduced, norms)(None)
    return reduction_graph.results(name, graph, plan, reduced, kinds)


def norms_of(product: Gemm, plan: Plan, client: Client | None) -> tuple[da.Array, da.Array]:
    """Return the squared norms of the rows of op(A) and of the columns of op(B), lazy, cut like the product."""
    of_a = _squares(product.a, plan.blocking.m, client)
    if product.symmetry is not None:
        return of_a, of_a
    b = product.b
    return of_a, _squares(replace(b, transposed=not b.transposed), plan.blocking.n, client)


def _squares(x: Operand, edges: tuple[int, ...], client: Client | None) -> da.Array:
    """Return the squared norms of the rows of a matrix, lazy, cut at `edges`."""
    chunks = x.chunks
    if chunks is None:
        chunks = da.core.normalize_chunks("auto", x.shape, limit=NORMS_PIECE, dtype=x.dtype)
    blocks = x.blocked(chunks, "cpu", client)
    across = (1,) * len(chunks[1])
    norms = blocks.map_blocks(tasks.squared_norms, chunks=(chunks[0], across), dtype="f8", meta=np.empty((0, 0)))
    return norms.sum(axis=1).rechunk((edges,), method="tasks")
