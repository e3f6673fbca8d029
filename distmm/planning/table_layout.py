"""The bytes of a product that each worker owns, receives and sends, if its owners are a table.

`distmm.planning.grid_layout.GridLayout` has formulas for the same figures; here every block product is counted. C is
one wave, and there are no batches.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from distmm.planning.blocks import Wave
from distmm.planning.layout import Ints, Layout, Traffic, counted
from distmm.planning.owners import Owners


class Products(NamedTuple):
    """Block products by rank; of a symmetric product those of its lower triangle.

    Attributes
    ----------
    mine : array of bool ``(ranks, m, k, n)``
        Whether a rank multiplies ``A[i, p]`` by ``B[p, j]``.
    place : array of int ``(m, k, n)``
        How many panels come before p in the chain that multiplies it.
    homes : pair of arrays of int ``(m, k)``, ``(k, n)``
        Of the blocks, or of the chunks that these unite.
    """

    mine: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    place: Ints
    homes: tuple[Ints, Ints]


@lru_cache(maxsize=8)
def products(owners: Owners, m: int, k: int, n: int, triangle: bool) -> Products:
    """Return who multiplies what; kept, because schedules that differ in the panels a task ask again."""
    ranks = owners.ranks(m, k, n)
    mine = ranks == np.arange(owners.size)[:, None, None, None]
    if triangle:
        mine &= np.tri(m, dtype=bool)[:, None]
    before = np.cumsum(mine, axis=2) - 1
    place = np.take_along_axis(before, ranks[None], axis=0)[0]
    a, b = owners.homes_of_chunks(m, k, n, triangle)
    return Products(mine, place, (a, a.T if triangle else b))


class TableLayout(Layout[Owners]):
    """Bytes by rank, for a product whose schedule has `Owners`."""

    @cached_property
    def products(self) -> Products:
        """Who multiplies what."""
        b = self.blocking
        return products(self.grid, len(b.m), len(b.k), len(b.n), b.triangle)

    @cached_property
    def layers(self) -> int:
        """Most chains of a block of C."""
        return max(1, int(self._chained.sum(axis=0).max()))

    def chains(self, wave: Wave) -> Ints:
        """Chains of each rank."""
        return self._chained.sum(axis=(1, 2))

    def chains_abreast(self, wave: Wave) -> int:
        """Chains of the busiest rank."""
        return self.busiest

    def multiplied(self, wave: Wave, triangles: bool) -> float:
        """Multiply-adds of the busiest rank. Of blocks on the diagonal, a kernel may compute `triangles`."""
        (m, k, n), mine = self._edges, self.products.mine
        count = np.einsum("rikj,i,k,j->r", mine, m, k, n, dtype=np.float64, optimize=True)
        if triangles and self.blocking.triangle:
            count -= np.einsum("riki,i,k->r", mine, m.astype(np.float64) ** 2, k, dtype=np.float64) / 2
        return float(count.max())

    def first_products(self) -> float:
        """Share of the transfers of the first step that the first products wait for."""
        return 1.0

    def summed_bytes(self) -> int:
        """Bytes of the partial sums of C that are sent."""
        more = np.maximum(self._chained.sum(axis=0) - 1, 0)
        return int((more * self._areas).sum()) * self.problem.accumulator_bytes

    def received_sums(self) -> int:
        """Bytes of partial sums that the busiest rank receives: the left one of each pair in the tree of a block."""
        received = np.zeros(self.grid.size, np.int64)
        for i, j, ranks in self._summing:
            while len(ranks) > 1:
                np.add.at(received, ranks[: len(ranks) - 1 : 2], self._areas[i, j])
                ranks = ranks[::2]
        return int(received.max()) * self.problem.accumulator_bytes

    def sums_at_once(self, wave: Wave) -> Ints:
        """Bytes of partial sums that each rank may hold of others: one for each tree in which it adds."""
        adds = np.zeros_like(self._chained)
        for i, j, ranks in self._summing:
            adds[ranks[: len(ranks) - 1 : 2], i, j] = True
        return (adds * self._areas).sum(axis=(1, 2)) * self.problem.accumulator_bytes

    def c_bytes(self, wave: Wave, itemsize: int, layers: int) -> Ints:
        """Bytes of the blocks of C that each rank multiplies; with one layer, of those that it finishes."""
        made = self._chained if layers > 1 else self._made
        return (made * self._areas).sum(axis=(1, 2)) * itemsize

    def mirror_bytes(self, wave: Wave, itemsize: int) -> Ints:
        """Bytes of the mirror images of the blocks of C, by the rank of their source. Only conjugates take memory."""
        if self.problem.symmetry != "hermitian":
            return np.zeros(self.grid.size, np.int64)
        below = self._areas - np.diag(np.diag(self._areas))
        return (self._made * below).sum(axis=(1, 2)) * itemsize

    def operand_bytes(self, wave: Wave, steps: slice = slice(None)) -> Traffic:
        """Bytes of A and B that each rank receives and sends for some steps, and those at home on it."""
        mine, place, _ = self.products
        step = place // self.blocking.panels
        first, last = steps.start or 0, self.schedule.steps if steps.stop is None else steps.stop
        now = mine & (step >= first) & (step < last)
        users, held = [np.any(now, axis=3), np.any(now, axis=1)], self._held
        both = np.zeros(self.grid.size, np.int64)
        if self._alike:  # one operand, which a rank may need in two places
            as_a, as_b = self._of_chunks(users[0], 0, 1), self._of_chunks(users[1], 1, 2)
            as_b = np.swapaxes(as_b, 1, 2) if self._alike == "transposed" else as_b
            both = ((as_a & as_b) * held[0][1].sum(axis=-1)).sum(axis=(1, 2))
            users, held = [as_a | as_b], held[:1]
        figures = [counted(np.moveaxis(needs, 0, -1), *at) for needs, at in zip(users, held, strict=True)]
        return self._traffic(figures[0], figures[1] if len(figures) > 1 else np.zeros_like(figures[0]), both)

    @cached_property
    def _alike(self) -> str:
        """How A and B are one operand: "same", or "transposed"; "" if they are two."""
        return "transposed" if self.blocking.triangle else self.grid.homes.alike

    @cached_property
    def _by_chunks(self) -> bool:
        """Whether the chunks of one operand are in other blocks as A than as B."""
        m, k, n = self.blocking.m, self.blocking.k, self.blocking.n
        return bool(self.schedule.chunks and self._alike and (m != n or (self._alike == "same" and m != k)))

    @cached_property
    def _held(self) -> list[tuple[Ints | None, Ints]]:
        """Ranks that hold parts of each block of A, and of B, and the elements of the parts: as `counted` takes them.

        A part is what a rank holds of a block: where many chunks are united, these are fewer. It is a chunk if chunks
        are in one block as A and in another one as B.
        """
        chunks = self.schedule.chunks
        cuts = [np.array(edges, np.int64) for edges in self.schedule.cuts]
        found: list[tuple[Ints | None, Ints]] = []
        for axes, homes in zip(((0, 1), (1, 2)), self.products.homes, strict=True):
            area = np.outer(*(cuts[axis] for axis in axes))
            if chunks is None or self._by_chunks:
                found.append((homes[..., None], area[..., None]))
                continue
            rows, columns = (np.repeat(np.arange(len(chunks[x])), list(map(len, chunks[x]))) for x in axes)
            at_ranks = np.zeros((*(len(chunks[x]) for x in axes), self.grid.size), np.int64)
            np.add.at(at_ranks, (rows[:, None], columns, homes), area)
            found.append((None, at_ranks))
        return found

    def _of_chunks(self, users: Ints, down: int, across: int) -> Ints:
        """Return which rank reads each part ``(ranks, rows, columns)``, given which reads each block."""
        chunks = self.schedule.chunks
        if chunks is None or not self._by_chunks:
            return users
        by_rows = np.repeat(users, list(map(len, chunks[down])), axis=1)
        return np.repeat(by_rows, list(map(len, chunks[across])), axis=2)

    @cached_property
    def _areas(self) -> Ints:
        return np.outer(self._edges[0], self._edges[2])

    @cached_property
    def _chained(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Whether a rank runs a chain for a block of C ``(ranks, m, n)``."""
        return np.array(np.any(self.products.mine, axis=2))

    @cached_property
    def _made(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Whether a rank finishes a block of C ``(ranks, m, n)``: the first of its chains does."""
        made = np.zeros_like(self._chained)
        for i, j, ranks in self._summing:
            made[ranks[0], i, j] = True
        return made

    @cached_property
    def _summing(self) -> list[tuple[int, int, list[int]]]:
        """The ranks that run chains for each block (i, j) of C. The first of them makes the block."""
        count = len(self.blocking.k)
        return [(i, j, [rank for rank, _ in self.grid.chains(i, j, count)]) for _, i, j in self.blocking.c_indices()]
