"""The elements of a block of C that reach a threshold, or the pairs of rows that are near enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from distmm.worker import gpu
from distmm.worker.tasks import reductions_on_gpu
from distmm.worker.tasks.largest import sortable
from distmm.worker.tasks.metrics import Metric, least_scores, value_of, weighed
from distmm.worker.tasks.rows import Block, pieces

Picked = tuple[int, Any, Any, Any]  # number of elements; their rows, columns and values, or None if they are too many


@dataclass(frozen=True)
class Threshold:
    """The elements of a block that are at least `least`: how many, and their rows, columns and values.

    Attributes
    ----------
    least : number
        Of the similarity, where there is a metric; of "euclidean" the greatest distance.
    most : int
        If a block has more, only their number is returned: it would not have the memory for them.
    most_of_row : float
        The same for a row of blocks.
    metric : {"inner", "cosine", "euclidean"}, optional
        The inner product is the element itself.
    dtype : dtype, optional
        Type of the values, if there is a metric; by default that of the block.
    """

    least: float
    most: int
    most_of_row: float = math.inf
    metric: Metric | None = None
    dtype: np.dtype[Any] | None = None

    def chunk(self, block: Block, first: int, norms: tuple[Block, Block] | None) -> Picked:
        """Find these elements in a block ``(m, n)``; rows are numbered from the block's first one."""
        if norms is None and (found := reductions_on_gpu.above(block, self.least, self.most)) is not None:
            count, row, column, values = found
            return count, row, None if column is None else column + first, values
        library, count, kept = gpu.namespace(block), 0, []
        for (rows,) in pieces(block):
            with np.errstate(over="ignore", invalid="ignore"):  # a threshold beyond the elements' type is infinite
                if norms is None:
                    places, values = library.flatnonzero(sortable(block[rows]) >= self.least), None
                else:
                    places, values = self._near(block[rows], norms[0][rows], norms[1])
            count += len(places)
            if count <= self.most:
                row, column = places // block.shape[1], places % block.shape[1]
                values = block[rows][row, column] if values is None else values
                kept.append((row + rows.start, column + first, values))
        if count > self.most:
            return count, None, None, None
        return (count, *(library.concatenate(each) for each in zip(*kept, strict=True)))

    def _near(self, products: Block, of_rows: Block, of_columns: Block) -> tuple[Block, Block]:
        """Return places and values of what is near enough, given inner products and squared norms.

        Few elements reach the score of their row's least value, and values are computed of these alone.
        """
        assert self.metric is not None
        library = gpu.namespace(products)
        scores = weighed(sortable(products), self.metric, of_columns)
        dtype = self.dtype or scores.dtype
        least = least_scores(self.least, self.metric, of_rows, scores.dtype, dtype)
        places = library.flatnonzero(scores >= least[:, None])
        row = places // scores.shape[1]
        values = value_of(scores.ravel()[places][:, None], self.metric, of_rows[row])[:, 0].astype(dtype, copy=False)
        near = values <= self.least if self.metric == "euclidean" else values >= self.least
        return places[near], values[near]

    def combine(self, parts: list[Picked]) -> Picked:
        """Put parts of the same lines together; only their number, if a line of blocks has too many."""
        counts, *arrays = zip(*parts, strict=True)
        if sum(counts) > self.most_of_row or any(row is None for row in arrays[0]):
            return sum(counts), None, None, None
        return (sum(counts), *map(np.concatenate, arrays))

    def finish(self, part: Picked) -> tuple[np.ndarray, ...]:
        """Return rows, columns and values in the order of rows, and within a row of columns."""
        _, row, column, values = part
        order = np.argsort(row, kind="stable")
        return row[order], column[order], values[order]
