"""Products whose finished blocks are reduced at once: their checks, their plan, and their results as lazy arrays."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, Unpack

import dask
import dask.array as da
import numpy as np
from distributed import Client

from distmm.errors import InputError
from distmm.graph import consumers
from distmm.graph.reduced_blocks import Reduced
from distmm.planning.plan import Plan
from distmm.planning.problem import accumulator_dtype
from distmm.product.array_types import check_sendable
from distmm.product.chains import Chains
from distmm.product.choices import BlockKeywords, Choices
from distmm.product.operand import Operand
from distmm.product.operand_blocks import blocked
from distmm.product.operand_pair import is_transpose, pair
from distmm.product.product import Gemm
from distmm.product.reduction_limits import bytes_widened
from distmm.worker.tasks.metrics import NORMED, squared_norms
from distmm.worker.tasks.reductions import Custom, Largest, Reduction

# Bytes of the piece of an operand that one task computes norms of. On a GPU a task takes some ms, however small it is.
NORMS_PIECE = {"cpu": 32 << 20, "cuda": 128 << 20}


def product_of(
    A: Any,
    B: Any,
    transa: bool,
    transb: bool,
    names: tuple[str, str] = ("A", "B"),
    now: bool = False,
    **choices: Unpack[BlockKeywords],
) -> tuple[Gemm, Choices]:
    """Return the product of two operands, or of A with its own transpose, and the choices for it.

    A B that is the transpose of A is recognised. Blocks and plans that the caller chose may be those of any product.

    Raises
    ------
    InputError
        As in `distmm.topk`.
    """
    a, b, symmetry = pair(A, B, transa, transb, names=names)
    chosen = choices.get("blocks") is not None or choices.get("plan") is not None
    if symmetry is None and not chosen and is_transpose(a, b):
        symmetry = "symmetric"
    a = a.here or a  # the plan chooses the blocks, which are the chunks of the results
    b = replace(a, transposed=not a.transposed) if symmetry is not None else b.here or b
    for operand in (a, b):
        if len(operand.shape) < 2:
            raise InputError(
                f"{operand.name} has shape {operand.shape}: give a matrix, as vectors are not accepted here"
            )
    product = Gemm.of(a, b, symmetry=symmetry)
    if 0 in product.shape[:-2]:
        raise InputError(f"the product has shape {product.shape}: there is nothing to reduce")
    return product, Choices.of(symmetric=B is None, now=now, **choices)


def results(product: Gemm, choices: Choices, reduction: Largest | Custom, down: bool = False) -> list[da.Array]:
    """Plan a product and return the results of its reduction, as lazy arrays.

    Parameters
    ----------
    product : Gemm
    choices : Choices
    reduction : Largest or Custom
    down : bool
        Whether lines are columns of the product, and not rows.

    Returns
    -------
    list of dask.array.Array
        One for each result of the reduction.

    Raises
    ------
    InputError, DoesNotFitError
        As in `distmm.topk`.
    """
    if choices.client is not None:
        check_sendable(reduction, "how")
    metric = getattr(reduction, "metric", None)
    *batch, m, n = product.shape
    of_line = sum(dtype.itemsize * math.prod(shape) for dtype, shape in reduction.kinds)
    nbytes = math.prod(batch) * (n if down else m) * of_line

    def kept(plan: Plan) -> int:
        """Bytes of the results and of the parts of one wave, all of whose parts may exist before any are merged."""
        height, _, width = plan.block_shape
        height, width = (width, height) if down else (height, width)
        share = min(1.0, width / reduction.k) if isinstance(reduction, Largest) else 1.0
        blocks = max(wave.c_blocks for wave in plan.waves) * (1 if product.symmetry is None else 2)
        parts = blocks * math.prod(map(max, plan.blocking.batch)) * math.ceil(height * of_line * share)
        return nbytes + parts + (0 if metric is None else bytes_widened(plan))

    plan = product.plan_reduced(choices, kept, shared=metric in NORMED)
    chains = reduced_chains(product, plan, reduction, choices.client, down)
    graph = chains.graph(None)
    assert chains.reduced is not None
    return consumers.results(chains.name, graph, plan, chains.reduced, reduction.kinds)


def reduced_chains(
    product: Gemm,
    plan: Plan,
    reduction: Reduction,
    client: Client | None,
    down: bool = False,
    by_wave: bool = False,
) -> Chains:
    """Return the chains of a product whose tasks reduce the blocks that they finish.

    With `by_wave`, the parts of blocks are collected, wave by wave, and not merged along lines. Blocks have no mirror
    images then. Norms are computed first, and not again for each wave.
    """
    metric = getattr(reduction, "metric", None)
    norms = norms_of(product, plan, client) if metric in NORMED else ()
    if norms and by_wave:
        norms = tuple(dask.persist(*norms) if client is None else client.persist(list(norms)))
    dtype = None if metric is None else accumulator_dtype(product.dtype)
    reduced = Reduced(reduction, down, (norms[0].name, norms[1].name) if norms else None, not by_wave, dtype)
    kind: Literal["numpy", "cupy"] = "cupy" if plan.cluster.device == "cuda" else "numpy"
    return Chains(product, plan, kind, client, reduced, norms)


def norms_of(product: Gemm, plan: Plan, client: Client | None) -> tuple[da.Array, da.Array]:
    """Return the squared norms of the rows of op(A) and of the columns of op(B): lazy, in the product's chunks."""
    of_a = _squares(product.a, plan.blocking.m, plan.cluster.device, client)
    if product.symmetry is not None:
        return of_a, of_a
    b = replace(product.b, transposed=not product.b.transposed)
    return of_a, _squares(b, plan.blocking.n, plan.cluster.device, client)


def _squares(x: Operand, edges: tuple[int, ...], device: Literal["cpu", "cuda"], client: Client | None) -> da.Array:
    """Return the squared norms of the rows of a matrix: lazy, in chunks of `edges`.

    Tasks load pieces to `device`: one core takes longer for the norms of a matrix than a GPU for the whole product. The
    chunks of a Dask array stay where they are, as they may be larger than the plan's blocks.
    """
    chunks = x.chunks
    if chunks is None:
        chunks = da.core.normalize_chunks("auto", x.shape, limit=NORMS_PIECE[device], dtype=x.dtype)
    blocks = blocked(x, chunks, device if x.chunks is None else "cpu", client)
    across = (1,) * len(chunks[1])
    norms = blocks.map_blocks(squared_norms, chunks=(chunks[0], across), dtype="f8", meta=np.empty((0, 0)))
    return norms.sum(axis=1).rechunk((edges,), method="tasks")
