"""Where and when a task of a product runs. Pure: the scheduler's state machine reads it, and knows nothing of Dask.

A placement is an argument of the task itself. Dask's annotations would be the usual way to say it, but array
optimisation drops them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Key = tuple[Any, ...]  # name of an array, and the indices of one of its blocks
Chain = tuple[tuple[int, ...], int, int]  # batch index, i, j


@dataclass(frozen=True)
class Placement:
    """The product, block of C and step that a task belongs to.

    Attributes
    ----------
    product : str
        Name of C as a Dask array.
    batch, i, j
        Indices of the block of C.
    step : int
        Step of the chain that makes this block.
    order : int
        Number of the step in the whole product: steps are numbered through all waves, in the order of waves.
    rank : int
        Rank that runs the task.
    owners : tuple of int
        Ranks that run a chain for this block of C: several if k is split.
    homes : tuple of int
        Rank at which each block is that the task reads, in the order of `ProductTask.operands`.
    run : str
        Products with the same `run` share the memory of their workers: each wave of a job is a product of its own.
    """

    product: str
    batch: tuple[int, ...]
    i: int
    j: int
    step: int
    order: int
    rank: int = 0
    owners: tuple[int, ...] = ()
    homes: tuple[int, ...] = ()
    run: str = ""

    @property
    def chain(self) -> Chain:
        """Indices of the block of C."""
        return self.batch, self.i, self.j
