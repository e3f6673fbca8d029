"""One pass over a matrix: a task reads a block, or neighbours in a row of small ones, and finds all that a check asks.

Rows of blocks are joined. With a task for each question, the scheduler has more tasks for each block, and workers keep
the block for longer.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph
from dask.system import CPU_COUNT

from distmm.checking import thin_products
from distmm.checking.sampled_elements import lines
from distmm.checking.thin_products import Sums
from distmm.graph.dask_tasks import List, Task, TaskRef, tree
from distmm.planning.blocks import slices, united
from distmm.worker.blas_threads import shared_by
from distmm.worker.tasks.arrivals import Form, arrived_block

Edges = tuple[int, ...]

# Parts that a task joins: they are small.
GROUP = 16

# Bytes up to which a task reads several blocks of a row: checking them, and sending them from another worker, takes
# less time than a task for each.
UNITED_BYTES = 2**22


class Part(NamedTuple):
    """What is found in a block, or in blocks of one row: in host memory.

    Attributes
    ----------
    sums : Sums
        Their rows times the vectors.
    largest : array of shape (n,)
        The largest absolute value of each column. Empty if nobody asked for it.
    sampled : array of shape (r, c)
        The elements in the sampled rows and columns.
    """

    sums: Sums
    largest: np.ndarray
    sampled: np.ndarray


@dataclass(frozen=True)
class Sampled:
    """Positions of sampled rows and of sampled columns, ascending; None: all of them."""

    rows: np.ndarray | None = None
    columns: np.ndarray | None = None

    def of(self, block: Any) -> np.ndarray:
        """Return the sampled elements of a block, whose positions these are."""
        if self.rows is None:
            assert self.columns is not None
            return Sampled(self.columns).of(block.T).T
        if not self.rows.size:
            return np.empty((0, block.shape[1] if self.columns is None else len(self.columns)), block.dtype)
        return lines(block, self.rows, self.columns)

    def within(self, rows: slice, columns: slice) -> Sampled:
        """Return the positions that are in a block, counted from its first row and column."""
        return Sampled(_within(self.rows, rows), _within(self.columns, columns))


def _within(at: np.ndarray | None, part: slice) -> np.ndarray | None:
    return None if at is None else at[(part.start <= at) & (at < part.stop)] - part.start


@dataclass(frozen=True)
class Pass:
    """What a pass over a matrix computes.

    Attributes
    ----------
    name : str
        Name of the matrix in messages.
    work : dtype
        Of the sums.
    vectors : int
        The columns of the panel that the matrix is multiplied by; its absolute values are multiplied by the others.
    largest : dtype, optional
        In which the largest absolute values of columns are looked for.
    sampled : Sampled, optional
    """

    name: str
    work: np.dtype[Any]
    vectors: int
    largest: np.dtype[Any] | None = None
    sampled: Sampled | None = None

    def of_blocks(
        self, edges: tuple[Edges, Edges], dtype: np.dtype[Any], form: Form, sampled: Sampled | None,
        blocks: list[Any], panel: np.ndarray, by: np.ndarray | None,
    ) -> Part:  # fmt: skip
        """Return what is found in neighbours with these edges, which arrive in this form. Runs on workers."""
        block = arrived_block(blocks, f"a block of {self.name}", edges, dtype, form).joined()
        weights, sizes = None if by is None else by[None], panel[:, self.vectors :].real
        with shared_by(CPU_COUNT):  # the products of pieces are too small for several threads each
            sums = thin_products.times(block, panel[:, : self.vectors], self.work, weights, sizes)
            largest = np.empty(0) if self.largest is None else thin_products.largest(block, self.largest)
        return Part(sums, largest, np.empty((0, 0)) if sampled is None else sampled.of(block))

    def over(self, matrix: da.Array, panel: Any, by: np.ndarray | None = None, form: Form = "matrix") -> da.Array:
        """Return a lazy array with the `Part` of each row of blocks.

        Parameters
        ----------
        matrix : dask.array.Array
        panel : array
            NumPy's, or Dask's: a row for each column of the matrix.
        by : array of int, optional
            Exponents of the weights of the columns.
        form : {"matrix", "transpose"}
            With "transpose", the pass is over the transpose of `matrix`.
        """
        down, across = matrix.chunks if form == "matrix" else matrix.chunks[::-1]
        together = max(1, UNITED_BYTES // max(1, max(down) * max(across) * matrix.dtype.itemsize))
        groups = united(across, math.ceil(len(across) / together))
        columns = (tuple(map(sum, groups)),)
        own = (*columns, -1)
        panels = panel.rechunk(own) if isinstance(panel, da.Array) else da.from_array(panel, own, name=False)
        weights = None if by is None else da.from_array(by, columns, name=False)
        read = [each for each in (matrix, panels, weights) if each is not None]
        name = f"distmm-block-rows-{uuid.uuid4().hex}"
        tasks = self._tasks(name, form, down, groups, *read)
        graph = HighLevelGraph.from_collections(name, {task.key: task for task in tasks}, read)
        return da.Array(graph, name, ((1,) * len(down),), meta=np.empty(0, object))

    def _tasks(
        self, name: str, form: Form, down: Edges, groups: tuple[Edges, ...], matrix: da.Array, panel: da.Array,
        weights: da.Array | None = None,
    ) -> Iterator[Task]:  # fmt: skip
        ends, of_groups = (0, *accumulate(map(len, groups))), slices(tuple(map(sum, groups)))
        for i, rows in enumerate(slices(down)):
            keys: list[Any] = []
            for j, (group, columns) in enumerate(zip(groups, of_groups, strict=True)):
                sampled = None if self.sampled is None else self.sampled.within(rows, columns)
                find = partial(self.of_blocks, ((down[i],), group), matrix.dtype, form, sampled)
                places = ((i, at) if form == "matrix" else (at, i) for at in range(ends[j], ends[j + 1]))
                blocks = List(*(TaskRef((matrix.name, *place)) for place in places))
                by = None if weights is None else TaskRef((weights.name, j))
                keys.append((f"{name}-block", i, j))
                yield Task(keys[-1], find, blocks, TaskRef((panel.name, j, 0)), by)
            for own, parts, _ in tree((name, i), keys, GROUP, (f"{name}-part", i)):
                yield Task(own, _as_array if own == (name, i) else _joined, parts)


def _joined(parts: list[Part]) -> Part:
    """Return what is found in blocks that lie side by side."""
    sums, largest, sampled = zip(*parts, strict=True)
    return Part(thin_products.summed(sums), np.concatenate(largest), np.concatenate(sampled, axis=1))


def _as_array(parts: list[Part]) -> np.ndarray:
    """Return the joined parts as an array of one element."""
    found = np.empty(1, object)
    found[0] = _joined(parts)
    return found


def whole(parts: np.ndarray) -> Part:
    """Return what is found in a matrix, from the parts of all its rows of blocks."""
    sums, largest, sampled = zip(*parts, strict=True)
    stacked = Sums(*(np.concatenate(each) for each in zip(*sums, strict=True)))
    return Part(stacked, np.maximum.reduce(largest), np.concatenate(sampled))
