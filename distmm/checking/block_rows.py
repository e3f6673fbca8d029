"""One pass over a matrix: one task reads each block and finds all that a check asks of it. Rows of blocks are joined.

With a task for each question, the scheduler has more tasks for each block, and workers keep the block for longer.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from dask.system import CPU_COUNT

from distmm.checking import thin_products
from distmm.checking.sampled_elements import lines
from distmm.checking.thin_products import Sums
from distmm.worker.blas_threads import shared_by
from distmm.worker.tasks.arrivals import arrived

# Parts that a task joins: they are small.
GROUP = 16

Positions = np.ndarray | slice


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
    rows, columns : array of int or slice, optional
        The elements in these rows and columns, which are ascending, are sampled.
    """

    name: str
    work: np.dtype[Any]
    vectors: int
    largest: np.dtype[Any] | None = None
    rows: Positions | None = None
    columns: Positions | None = None

    def over(self, matrix: da.Array, panel: Any, by: np.ndarray | None = None) -> da.Array:
        """Return a lazy array with the `Part` of each row of blocks.

        Parameters
        ----------
        matrix : dask.array.Array
        panel : array
            NumPy's, or Dask's with the chunks of the matrix's columns along its rows, and one chunk along its columns.
        by : array of int, optional
            Exponents of the weights of the columns.
        """
        height, width = ((edges,) for edges in matrix.chunks)
        panels = panel if isinstance(panel, da.Array) else da.from_array(panel, (*width, -1), name=False)
        rows = da.from_array(_marked(self.rows, matrix.shape[0]), height, name=False)
        columns = da.from_array(_marked(self.columns, matrix.shape[1]), width, name=False)
        weights = (None, None) if by is None else (da.from_array(by, width, name=False), "j")
        found = da.blockwise(
            self.of_block, "ij", matrix, "ij", panels, "jv", rows, "i", columns, "j", *weights, dtype=object,
            expected=matrix.dtype, name=f"distmm-block-{uuid.uuid4().hex}", meta=np.empty((0, 0), object),
            adjust_chunks={"i": 1, "j": 1}, align_arrays=False, concatenate=True,
        )  # fmt: skip
        return da.reduction(
            found, _same, _joined, axis=1, combine=_joined, concatenate=False, split_every=GROUP, dtype=object,
            meta=np.empty(0, object), name="distmm-block-rows",
        )  # fmt: skip

    def of_block(
        self, block: Any, panel: np.ndarray, rows: np.ndarray, columns: np.ndarray, by: np.ndarray | None,
        expected: np.dtype[Any],
    ) -> np.ndarray:  # fmt: skip
        """Return what is found in a block, as an array of one element. Runs on workers.

        `rows` and `columns` say which ones are sampled. The block's array says that its type is `expected`.
        """
        block = arrived(block, f"a block of {self.name}", (len(rows), len(columns)), expected)
        weights, sizes = None if by is None else by[None], panel[:, self.vectors :].real
        with shared_by(CPU_COUNT):  # the products of pieces are too small for several threads each
            sums = thin_products.times(block, panel[:, : self.vectors], self.work, weights, sizes)
            largest = np.empty(0) if self.largest is None else thin_products.largest(block, self.largest)
        return _alone(Part(sums, largest, _sampled(block, np.flatnonzero(rows), np.flatnonzero(columns))), True)


def _marked(at: Positions | None, size: int) -> np.ndarray:
    """Return for each of `size` lines whether it is one of those at `at`."""
    marked = np.zeros(size, bool)
    if at is not None:
        marked[at] = True
    return marked


def _sampled(block: Any, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the elements of a block in some rows and columns."""
    if not rows.size or not columns.size:
        return np.empty((len(rows), len(columns)), block.dtype)
    return lines(block, rows, columns) if len(rows) <= len(columns) else lines(block.T, columns, rows).T


def _alone(part: Part, keepdims: bool) -> np.ndarray:
    """Return a part as an array of one element."""
    found = np.empty((1, 1) if keepdims else 1, object)
    found.fill(part)
    return found


def _same(found: np.ndarray, axis: Any, keepdims: bool) -> np.ndarray:
    """Return what is found in a block as it is: for Dask's reductions."""
    return found


def _joined(found: list[np.ndarray], axis: Any, keepdims: bool) -> np.ndarray:
    """Join what is found in blocks that lie side by side."""
    sums, largest, sampled = zip(*(part.item() for part in found), strict=True)
    part = Part(thin_products.summed(sums), np.concatenate(largest), np.concatenate(sampled, axis=1))
    return _alone(part, keepdims)


def whole(parts: np.ndarray) -> Part:
    """Return what is found in a matrix, from the parts of all its rows of blocks."""
    sums, largest, sampled = zip(*parts, strict=True)
    stacked = Sums(*(np.concatenate(each) for each in zip(*sums, strict=True)))
    return Part(stacked, np.maximum.reduce(largest), np.concatenate(sampled))
