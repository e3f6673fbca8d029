"""Index arithmetic of a blocked product: the edges of its blocks, the steps of its chains, and the waves of C.

A product ``C = A @ B`` with A ``(*batch, m, k)`` and B ``(*batch, k, n)`` is cut into blocks ``A[i, p]``, ``B[p, j]``
and ``C[i, j]``. A *panel* is one p: a column of A blocks and the row of B blocks that meet it. A *step* is one task
of the chain that makes ``C[i, j]``; it takes one or several consecutive panels.

A symmetric product, ``A @ A.T`` or ``A @ A.conj().T``, has chains only for the blocks of its lower triangle, diagonal
included: ``i >= j``. The other blocks are transposes of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, islice, product
from typing import TYPE_CHECKING

from distmm.errors import InputError

if TYPE_CHECKING:
    from distmm.planning.problem import Problem


def even_edges(size: int, edge: int) -> tuple[int, ...]:
    """Cut `size` into blocks of `edge`, the last one ragged; a size of 0 is one empty block."""
    if size == 0:
        return (0,)
    full, rest = divmod(size, edge)
    return (edge,) * full + ((rest,) if rest else ())


def united(edges: tuple[int, ...], count: int) -> tuple[tuple[int, ...], ...]:
    """Join neighbouring chunks of these edges to at most `count` blocks; return the edges of the chunks of each."""
    return tuple(edges[at.start : at.stop] for at in ranges(len(edges), count))


def are_even(edges: tuple[int, ...]) -> bool:
    """Whether all blocks have one length, except that the last one may be shorter, as `even_edges` cuts them."""
    return len(set(edges[:-1])) < 2 and edges[-1] <= edges[0]


def ranges(count: int, parts: int, multiple: int = 1) -> tuple[range, ...]:
    """Cut ``range(count)`` into at most `parts` ranges of one length, a multiple of `multiple`, the last one ragged."""
    length = math.ceil(math.ceil(count / parts) / multiple) * multiple
    return tuple(range(start, min(start + length, count)) for start in range(0, count, length))


@lru_cache(maxsize=256)
def slices(edges: tuple[int, ...]) -> tuple[slice, ...]:
    """Index range of every block. The task of each block asks for them."""
    ends = list(accumulate(edges))
    return tuple(slice(end - edge, end) for edge, end in zip(edges, ends, strict=True))


@dataclass(frozen=True)
class Wave:
    """A rectangle of C blocks that are computed at the same time: all of them fit into the workers' memory.

    Attributes
    ----------
    index : int
        Position in the order of waves.
    batches : range
        Of the batch blocks, counted in row-major order.
    rows, columns : range
        Of the blocks of C.
    triangle : bool
        Only the blocks with ``i >= j``; rows and columns are the same.
    """

    index: int
    batches: range
    rows: range
    columns: range
    triangle: bool = False

    @property
    def c_blocks(self) -> int:
        """Number of blocks of C that are multiplied."""
        rows, columns = len(self.rows), len(self.columns)
        return len(self.batches) * (rows * (rows + 1) // 2 if self.triangle else rows * columns)


@dataclass(frozen=True)
class Blocking:
    """Block edges of a product along m, k and n and along each batch dimension, and how many panels one task takes.

    With `triangle`, only the blocks of C with ``i >= j`` are multiplied.
    """

    m: tuple[int, ...]
    k: tuple[int, ...]
    n: tuple[int, ...]
    batch: tuple[tuple[int, ...], ...] = field(default=())
    panels: int = 1
    triangle: bool = False

    def __post_init__(self) -> None:
        if self.triangle and self.m != self.n:
            raise InputError(
                f"blocks of {max(self.m)} x {max(self.n)}: a symmetric product is cut alike along m and n, so that "
                "each block has its mirror image"
            )

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """Edges of the blocks along (batch), m, k and n."""
        return *self.batch, self.m, self.k, self.n

    @property
    def c_blocks(self) -> int:
        """Number of blocks of C."""
        return len(self.m) * len(self.n) * math.prod(map(len, self.batch))

    @cached_property
    def whole(self) -> Wave:
        """All of C as one wave."""
        return self.waves((1, 1, 1), (1, 1))[0]

    @cached_property
    def c_elements(self) -> int:
        """Number of elements of the blocks of C that are multiplied."""
        m, n = sum(self.m), sum(self.n)
        area = (m * m + sum(edge * edge for edge in self.m)) // 2 if self.triangle else m * n
        return area * math.prod(map(sum, self.batch))

    def multiplied(self, triangles: bool) -> float:
        """Return the number of elements of C that are multiplied, if of blocks on the diagonal `triangles` only are."""
        halves = sum(edge * edge for edge in self.m) / 2 if triangles and self.triangle else 0
        return self.c_elements - halves * math.prod(map(sum, self.batch))

    @cached_property
    def largest(self) -> tuple[int, int, int]:
        """Edges (m, k, n) of the largest block."""
        return max(self.m), max(self.k), max(self.n)

    @property
    def loads(self) -> int:
        """Number of blocks of A and B; for a symmetric product only those of A."""
        lines = len(self.m) + (0 if self.triangle else len(self.n))
        return lines * len(self.k) * math.prod(map(len, self.batch))

    def parts(self, layers: int = 1) -> tuple[tuple[range, ...], ...]:
        """Panels of each step of a chain, in ascending k, for each of at most `layers` parts of k."""
        parts = ranges(len(self.k), layers, self.panels)
        return tuple(tuple(range(p, min(p + self.panels, part.stop)) for p in part[:: self.panels]) for part in parts)

    def part_panels(self, layers: int) -> int:
        """Count the panels of the first part of k, and of the others but the last, which may have fewer."""
        return len(ranges(len(self.k), layers, self.panels)[0])

    def mirrored(self, wave: Wave) -> int:
        """Count the blocks of C that are transposes of a wave's blocks."""
        diagonal = len(wave.batches) * len(wave.rows) if wave.triangle else 0
        return wave.c_blocks - diagonal if self.triangle else 0

    def waves(self, parts: tuple[int, int, int], multiple: tuple[int, int]) -> tuple[Wave, ...]:
        """Cut C into at most `parts` (batch blocks, block rows, block columns) waves, at multiples of the grid's edges.

        Row-major: consecutive waves read the same rows of A. Batches are cut along their first dimension. A triangle is
        cut in the same way along both sides: into triangles on the diagonal, and rectangles below it.
        """
        batches, rows, columns = self._cuts(parts, multiple)
        areas = self._below(rows) if self.triangle else product(rows, columns)
        return tuple(
            Wave(index, at, down, across, self.triangle and down == across)
            for index, (at, (down, across)) in enumerate(product(batches, areas))
        )

    def kinds_of_waves(self, parts: tuple[int, int, int], multiple: tuple[int, int]) -> tuple[tuple[Wave, int], ...]:
        """Return one wave of each kind, and how many waves are of that kind: their blocks have the same edges.

        The waves are not numbered: each has the index 0.
        """
        batches, rows, columns = self._cuts(parts, multiple)
        if self.triangle:
            areas = _kinds_below(rows, self.m)
        else:
            both = product(_kinds(rows, self.m), _kinds(columns, self.n))
            areas = [(down, across, high * wide) for (down, high), (across, wide) in both]
        along, inner = self.batch[0] if self.batch else (), math.prod(map(len, self.batch[1:]))
        return tuple(
            (Wave(0, at, down, across, self.triangle and down == across), matrices * count)
            for (at, matrices), (down, across, count) in product(_kinds(batches, along, inner), areas)
        )

    @staticmethod
    def _below(rows: tuple[range, ...]) -> Iterator[tuple[range, range]]:
        """Pairs of ranges of block rows and block columns on the diagonal and below it."""
        return ((down, across) for at, down in enumerate(rows) for across in rows[: at + 1])

    def _cuts(self, parts: tuple[int, int, int], multiple: tuple[int, int]) -> tuple[tuple[range, ...], ...]:
        """Ranges of batch blocks, of block rows, and of block columns."""
        batches = ranges(math.prod(map(len, self.batch)), parts[0], math.prod(map(len, self.batch[1:])))
        if self.triangle:
            cuts = ranges(len(self.m), max(parts[1:]), math.lcm(*multiple))
            return batches, cuts, cuts
        return batches, ranges(len(self.m), parts[1], multiple[0]), ranges(len(self.n), parts[2], multiple[1])

    def wave_batches(self, wave: Wave) -> tuple[range, ...]:
        """Batch blocks of a wave along each batch dimension."""
        inner = math.prod(map(len, self.batch[1:]))
        first = range(wave.batches.start // inner, wave.batches.stop // inner)
        return (first, *(range(len(edges)) for edges in self.batch[1:])) if self.batch else ()

    def regions(self, wave: Wave) -> tuple[tuple[slice, ...], ...]:
        """Index ranges in C of a wave's blocks, and of their mirror images where these are not the same ranges."""
        there = self.region(wave)
        *batch, rows, columns = there
        return (there, (*batch, columns, rows)) if self.triangle and not wave.triangle else (there,)

    def region(self, wave: Wave) -> tuple[slice, ...]:
        """Index ranges in C of a wave's blocks."""
        blocks = [*self.wave_batches(wave), wave.rows, wave.columns]
        cuts = [slices(edges) for edges in (*self.batch, self.m, self.n)]
        return tuple(slice(cut[at.start].start, cut[at.stop - 1].stop) for cut, at in zip(cuts, blocks, strict=True))

    def c_indices(self, wave: Wave | None = None) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Every block of C that is multiplied, or of one wave of it, as ``(batch index, i, j)``, in row-major order."""
        wave = self.whole if wave is None else wave
        every = product(*(range(len(edges)) for edges in self.batch))
        batches = islice(every, wave.batches.start, wave.batches.stop)
        return ((b, i, j) for b in batches for i in wave.rows for j in wave.columns if i >= j or not wave.triangle)


def _kinds(cuts: tuple[range, ...], edges: tuple[int, ...], length: int = 1) -> list[tuple[range, int]]:
    """Return the first range of each kind, and how many are of that kind: their blocks have the same edges.

    Each edge belongs to `length` consecutive blocks.
    """
    found: dict[tuple[int, ...], list[range]] = {}
    for at in cuts:
        found.setdefault(edges[at.start // length : at.stop // length], []).append(at)
    return [(same[0], len(same)) for same in found.values()]


def _kinds_below(cuts: tuple[range, ...], edges: tuple[int, ...]) -> list[tuple[range, range, int]]:
    """Return the first pair of ranges of each kind on the diagonal and below it, and how many are of that kind."""
    found: dict[tuple[object, object], tuple[range, range, int]] = {}
    above: dict[object, tuple[range, int]] = {}  # the first range of each kind, and how many, in the rows above
    for down in cuts:
        kind = edges[down.start : down.stop]
        for other, (across, count) in [*above.items(), (None, (down, 1))]:  # None: on the diagonal
            row, column, before = found.get((kind, other), (down, across, 0))
            found[kind, other] = row, column, before + count
        first, count = above.get(kind, (down, 0))
        above[kind] = first, count + 1
    return list(found.values())


def cut(problem: Problem, edges: Sequence[int], panels: int = 1) -> Blocking:
    """Cut a product into even blocks of the edges (m, k, n), after those of the batch dimensions, whole by default."""
    *batch, m, k, n = edges
    batch = batch or [max(1, size) for size in problem.batch]
    sizes = (*problem.batch, problem.m, problem.k, problem.n)
    *along, down, deep, across = map(even_edges, sizes, (*batch, m, k, n))
    return Blocking(down, deep, across, tuple(along), panels, problem.symmetry is not None)
