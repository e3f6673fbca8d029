"""Blocks of a product that follow the chunks of the user's arrays and files."""

from __future__ import annotations

from distmm.planning.blocks import Blocking, even_edges
from distmm.planning.problem import Problem
from distmm.planning.search import TILE
from distmm.product.operand import Operand

Chunks = tuple[tuple[int, ...], ...]


def users_blocking(
    problem: Problem, a: Operand, b: Operand, c_chunks: Chunks | None = None, unit: tuple[int, ...] | None = None
) -> Blocking | None:
    """Return the blocks that follow the chunks of Dask operands. None if no operand has chunks.

    If the operands have different chunks along k, the larger operand keeps its chunks. An operand without chunks gets
    the other operand's chunks along k. Along its other axis it gets the chunks of C, if those are given. Otherwise its
    edge there is the other operand's largest edge, rounded down to a multiple of the unit in which C is written.
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
    """Return the batch chunks of C: A's in the dimensions that A has with their full length, else B's."""
    ndim = len(problem.batch)
    pad_a, pad_b = ((1,),) * (ndim - len(a)) + a, ((1,),) * (ndim - len(b)) + b
    return tuple(x if sum(x) == n else y for x, y, n in zip(pad_a, pad_b, problem.batch, strict=True))


def storage_multiples(a: Operand, b: Operand, unit: tuple[int, ...] | None = None) -> tuple[int, int, int]:
    """Return the numbers that block edges (m, k, n) should be multiples of.

    These are the chunks of the files, so that each chunk is read once, or else the kernel's tile. With a `unit`, in
    which C is written, they are the unit along m and n, or the file's chunk if that is a multiple of the unit.
    """
    m, k_a = a.storage_chunk[-2:] if a.storage_chunk else (TILE, TILE)
    k_b, n = b.storage_chunk[-2:] if b.storage_chunk else (TILE, TILE)
    if unit is not None:
        m, n = (
            max(size, own) if max(size, own) % min(size, own) == 0 else size
            for size, own in zip(unit[-2:], (m, n), strict=True)
        )
    return m, max(k_a, k_b), n
