"""Blocks of a product from the chunks of the user's arrays and files."""

from __future__ import annotations

from distmm.api.operands import Operand
from distmm.planning.blocks import Blocking, even_edges
from distmm.planning.problem import Problem
from distmm.planning.search import TILE

__all__ = ["Chunks", "batch_chunks", "storage_multiples", "users_blocking"]

Chunks = tuple[tuple[int, ...], ...]


def users_blocking(
    problem: Problem, a: Operand, b: Operand, c_chunks: Chunks | None = None, unit: tuple[int, ...] | None = None
) -> Blocking | None:
    """Blocks from the chunks of Dask operands; where k is chunked differently, the larger operand keeps its chunks.

    An operand without chunks is cut like the other along k. Along its other axis it is cut like C, if C is to have
    chunks; else at multiples of the other operand's largest edge, or of the unit in which C is written if that is
    smaller.
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
