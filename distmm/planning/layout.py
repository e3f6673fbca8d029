"""What plans ask of a product's blocks by rank: how many bytes each rank owns, receives and sends.

`distmm.planning.grid_layout` answers with formulas for grids, `distmm.planning.table_layout` by counting for tables.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar, cast

import numpy as np

from distmm.planning.blocks import Blocking, Wave
from distmm.planning.owners import Grid, Owners
from distmm.planning.problem import Problem
from distmm.planning.schedule import Schedule

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Traffic(NamedTuple):
    """Bytes of A and B by rank, for some steps of a wave.

    Attributes
    ----------
    received, sent : arrays of int
    homes : pair of arrays of int
        Bytes of A, and of B, whose home is the rank. A symmetric product has no B.
    both : array of int
        Bytes of a symmetric product's A that a rank needs both as A and as its transpose.
    """

    received: Ints
    sent: Ints
    homes: tuple[Ints, Ints]
    both: Ints


Ranks = TypeVar("Ranks", Grid, Owners)


@dataclass(frozen=True)
class Layout(Generic[Ranks]):
    """A product and its schedule, whose owners are a grid or a table."""

    problem: Problem
    schedule: Schedule

    @property
    def blocking(self) -> Blocking:
        """Edges of the blocks."""
        return self.schedule.blocking

    @property
    def grid(self) -> Ranks:
        """Owners of the blocks."""
        return cast(Ranks, self.schedule.grid)

    @cached_property
    def _edges(self) -> tuple[Ints, Ints, Ints]:
        """Edges of the blocks along m, k and n."""
        m, k, n = (np.array(edges, np.int64) for edges in (self.blocking.m, self.blocking.k, self.blocking.n))
        return m, k, n

    def _traffic(self, a: Ints, b: Ints, both: Ints) -> Traffic:
        """Return bytes, given elements of A and of B as by `counted`, and those that ranks need in both places."""
        a, b, both = (figures * self.problem.dtype.itemsize for figures in (a, b, both))
        received, sent, _ = a + b
        return Traffic(received, sent, (a[2], b[2]), both)

    def windows(self, length: int, resident: bool = True) -> Iterator[slice]:
        """Ranges of `length` steps that may need the most memory."""
        return (slice(s, s + length) for s in range(max(1, self.schedule.steps - length + 1)))

    def gathered_bytes(self, wave: Wave) -> Ints:
        """Most bytes by rank of small chunks that workers of CPU clusters copy for others: of all at home there."""
        held = np.zeros(self.grid.size, np.int64)
        if gathers := self.schedule.gathers(self.problem, "cpu"):
            for steps in self.windows(self.schedule.lookahead):
                traffic = self.operand_bytes(wave, steps)
                if traffic.received.any():
                    held = np.maximum(held, sum(traffic.homes[of == "B"] for of in gathers))
        return held

    @abstractmethod
    def operand_bytes(self, wave: Wave, steps: slice = slice(None)) -> Traffic:
        """Bytes of A and B that each rank receives and sends for some steps, and those at home on it."""

    @abstractmethod
    def chains(self, wave: Wave) -> Ints:
        """Chains of each rank, for the blocks of C of a wave."""

    @cached_property
    def busiest(self) -> int:
        """Chains of the busiest rank."""
        return int(self.chains(self.blocking.whole).max())


def counted(needs: Ints, homes: Ints | None, held: Ints) -> Ints:
    """Elements of an operand that each rank receives, sends, and has at home if any rank needs them: ``(3, ranks)``.

    A *part* of the operand is what the same ranks need. A block comes from its home once to each rank that needs it.

    Parameters
    ----------
    needs : array of int or bool ``(*parts, ranks)``
        Whether a rank needs a part.
    homes : array of int ``(*parts, along)``, optional
        Ranks at which the blocks of a part are. By default `along` counts the ranks.
    held : array of int ``(*parts, along)``
        Elements that are there.
    """
    own = held * (needs if homes is None else np.take_along_axis(needs, homes, axis=-1))
    figures = np.zeros((3, needs.shape[-1]), np.int64)
    figures[0] = np.tensordot(held.sum(axis=-1), needs, 2)
    sent, read = held * needs.sum(axis=-1, keepdims=True) - own, held * needs.any(axis=-1, keepdims=True)
    for figure, elements in zip(figures, (-own, sent, read), strict=True):
        if homes is None:
            figure += elements.sum(axis=tuple(range(elements.ndim - 1)))
        else:  # in float64, which is exact below 2**53; `np.add.at` takes ten times as long
            figure += np.bincount(homes.ravel(), elements.ravel(), len(figure)).astype(np.int64)
    return figures
