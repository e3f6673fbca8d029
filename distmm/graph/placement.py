"""Where and when a task of a product runs. Pure: the scheduler's state machine reads it, and knows nothing of Dask.

A placement is an argument of the task itself. Dask's annotations would be the usual way to say it, but array
optimisation drops them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distmm.planning.grid import Grid

__all__ = ["Chain", "Key", "Placement"]

Key = tuple[Any, ...]  # name of an array, and the indices of one of its blocks
Chain = tuple[tuple[int, ...], int, int]  # batch index, i, j


@dataclass(frozen=True)
class Placement:
    """The product, block of C and step that a task belongs to.

    Attributes
    ----------
    product : str
        Name of C as a Dask array.
    grid : Grid
        Says which rank owns which block.
    batch, i, j
        Indices of the block of C.
    step : int
        Step of the chain that makes this block.
    order : int
        Number of the step in the whole product: steps are numbered through all waves, in the order of waves.
    layer : int
        Layer of the grid, if k is split.
    run : str
        Products with the same `run` share the memory of their workers: each wave of a job is a product of its own.
    """

    product: str
    grid: Grid
    batch: tuple[int, ...]
    i: int
    j: int
    step: int
    order: int
    layer: int = 0
    run: str = ""

    @property
    def chain(self) -> Chain:
        """Indices of the block of C."""
        return self.batch, self.i, self.j

    @property
    def rank(self) -> int:
        """Rank that owns this block of C, on its layer."""
        return self.grid.owner(self.i, self.j, self.batch, self.layer)

    def home(self, operand: Key) -> int:
        """Rank at which a block of A or B lives that the task reads."""
        _, *batch, row, column = operand
        return self.grid.owner(row, column, tuple(batch), self.layer)

    def owners(self) -> set[int]:
        """Ranks that run a chain for this block of C: one rank on each layer."""
        return {self.grid.owner(self.i, self.j, self.batch, layer) for layer in range(self.grid.layers)}
