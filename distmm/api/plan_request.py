"""From operands and wishes to a plan: the chunks that users gave, the files' chunks, and what the cluster has."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from distributed import Client

from distmm.api.operands import Operand
from distmm.clusters import cluster
from distmm.errors import InputError
from distmm.planning.cluster_spec import Residence
from distmm.planning.geometry import Blocking, Problem, even_edges
from distmm.planning.plan import TILE, Plan, make_plan
from distmm.planning.precision import Precision

__all__ = ["Chunks", "Wishes", "batch_chunks", "plan_for", "storage_multiples", "users_blocking"]

Chunks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Wishes:
    """How a product is to be made, as far as the caller says: see `distmm.matmul`."""

    precision: Precision = "highest"
    kernel: str | None = None
    device: cluster.Device = "auto"
    blocks: tuple[int, ...] | None = None
    plan: Plan | str | None = None


def plan_for(
    problem: Problem,
    a: Operand,
    b: Operand,
    wishes: Wishes,
    client: Client | None,
    written: bool = False,
    c_chunks: Chunks | None = None,
    unit: tuple[int, ...] | None = None,
) -> Plan:
    """Plan a product of operands, or take the plan that the caller has made for it.

    Parameters
    ----------
    problem : Problem
    a, b : Operand
        Of a symmetric product, B is the transpose of A.
    wishes : Wishes
    client : distributed.Client, optional
    written : bool
        Whether finished blocks of C are written, and do not stay.
    c_chunks : tuple of tuple of int, optional
        Chunks that C will have: its blocks too, along dimensions that the operands' chunks do not cut.
    unit : tuple of int, optional
        Shape of what is written of C in one go: blocks are multiples of it, where they are chosen and it leaves each
        worker a block that fits.

    Raises
    ------
    InputError
        For a plan that is for another product, and wishes that cannot be met.
    """
    if isinstance(wishes.plan, Plan):
        if wishes.plan.problem != problem:
            raise InputError(
                f"the plan is for {wishes.plan.problem}, the operands are {problem}: make a new plan with "
                f"distmm.plan({'A, B' if problem.symmetry is None else 'A'})"
            )
        return wishes.plan
    if wishes.plan is not None and not isinstance(wishes.plan, str):
        raise InputError(
            f"plan is {wishes.plan!r}: give one that distmm.plan has made, or its text, such as "
            "g2x1x1 b8192x8192x8192 p1 w1 l2"
        )
    on_gpu = a.kind == "cupy"
    if on_gpu and wishes.device == "cpu":
        raise InputError(
            "device is 'cpu', but A and B have CuPy blocks: convert them with x.map_blocks(cupy.asnumpy), or drop it"
        )
    precision, kernel, text = wishes.precision, wishes.kernel, wishes.plan
    spec = cluster.describe(
        client, problem.dtype, "gpu" if on_gpu else wishes.device, any_gpu=on_gpu, kernel=kernel, precision=precision
    )
    if spec.device == "cuda" and (a.pageable or b.pageable):
        spec = replace(spec, load=cluster.LOADS["cuda, pageable"])
    result: Literal["workers", "host", "out"] = "host" if spec.device == "cuda" and a.kind == "numpy" else "workers"

    def planned(blocking: Blocking | None, unit: tuple[int, ...] | None = None) -> Plan:
        cuts = ((blocking.m, blocking.k), (blocking.k, blocking.n)) if blocking and text is None else (None, None)
        return make_plan(
            problem,
            spec,
            blocking=blocking,
            edges=wishes.blocks,
            multiples=storage_multiples(a, b, unit),
            precision=precision,
            kernel=kernel,
            text=text,
            result="out" if written else result,
            operands=(_residence(a, cuts[0]), _residence(b, cuts[1])),
        )

    if unit is not None and problem.symmetry is not None:
        unit = (*unit[:-2], *[math.lcm(*unit[-2:])] * 2)  # its blocks are cut alike along m and n
    blocking = users_blocking(problem, a, b, c_chunks, unit) if wishes.blocks is None else None
    if (
        unit is not None
        and math.prod(-(-size // n) for size, n in zip(problem.shape, unit, strict=True)) < spec.workers
    ):
        unit = None
    plan = planned(blocking, unit)
    if unit is not None and plan.shortfall:
        plan = planned(blocking)
    if blocking is not None or wishes.blocks is not None or text is not None or c_chunks is None:
        return plan
    if problem.symmetry is not None and c_chunks[-2] != c_chunks[-1]:
        return plan
    # Nothing but C is chunked: its chunks are the blocks, as deep as the planner finds good.
    *batch, m, n = c_chunks
    k = even_edges(problem.k, plan.block_shape[1])
    return planned(Blocking(m, k, n, tuple(batch), triangle=problem.symmetry is not None))


def _residence(operand: Operand, cuts: tuple[tuple[int, ...], tuple[int, ...]] | None) -> Residence:
    """Where an operand is meanwhile; chunks that are cut anew are needed by several blocks, and stay until the last."""
    if operand.chunks is not None and cuts != operand.chunks[-2:]:
        return "whole"
    return "resident" if operand.resident else "streamed"


def users_blocking(
    problem: Problem, a: Operand, b: Operand, c_chunks: Chunks | None = None, unit: tuple[int, ...] | None = None
) -> Blocking | None:
    """Blocks from the chunks of Dask operands; where k is chunked differently, the larger operand keeps its chunks.

    An operand without chunks is cut like the other along k, and elsewhere like C, if C is to have chunks, or at
    multiples of the other's largest edge; where C is written in units that are smaller, at multiples of these.
    """
    given = a.chunks or b.chunks
    if given is None:
        return None
    edge = max(1, *given[-2], *given[-1])
    down, across = (edge - edge % size if size <= edge else edge for size in (unit or (1, 1))[-2:])
    m, n = c_chunks[-2:] if c_chunks else (even_edges(problem.m, down), even_edges(problem.n, across))
    a_chunks = a.chunks or (*((n,) for n in problem.a_batch), m, given[-2])
    b_chunks = b.chunks or (*((n,) for n in problem.b_batch), given[-1], n)
    k = a_chunks[-1] if problem.m >= problem.n else b_chunks[-2]
    batch = _merged_batch(problem, a_chunks[:-2], b_chunks[:-2])
    return Blocking(a_chunks[-2], k, b_chunks[-1], batch, triangle=problem.symmetry is not None)


def _merged_batch(problem: Problem, a: Chunks, b: Chunks) -> Chunks:
    """Batch chunks of C: A's where A has the dimension, else B's."""
    ndim = len(problem.batch)
    pad_a, pad_b = ((1,),) * (ndim - len(a)) + a, ((1,),) * (ndim - len(b)) + b
    return tuple(x if sum(x) == n else y for x, y, n in zip(pad_a, pad_b, problem.batch, strict=True))


def batch_chunks(operand: Operand, blocking: Blocking) -> Chunks:
    """Chunks of an operand along its own batch dimensions."""
    own = operand.shape[:-2]
    return tuple(
        edges if sum(edges) == n else (n,)
        for n, edges in zip(own, blocking.batch[len(blocking.batch) - len(own) :], strict=True)
    )


def storage_multiples(a: Operand, b: Operand, unit: tuple[int, ...] | None = None) -> tuple[int, int, int]:
    """Block edges follow the chunks of the files, so that each chunk is read once; else the kernel's tile.

    Along m and n they follow the `unit` in which C is written, and the others too where that takes no larger blocks.
    """
    m, k_a = a.storage_chunk[-2:] if a.storage_chunk else (TILE, TILE)
    k_b, n = b.storage_chunk[-2:] if b.storage_chunk else (TILE, TILE)
    if unit is not None:
        m, n = (
            max(size, own) if max(size, own) % min(size, own) == 0 else size
            for size, own in zip(unit[-2:], (m, n), strict=True)
        )
    return m, max(k_a, k_b), n
