"""The elements of a product above a threshold, collected wave by wave, and the limits on them.

Workers select elements from each finished block, and this process collects them. If too many elements of a block are
selected, the task returns their number instead of the elements, and the call ends with an error that has the counts so
far. This bounds the memory of the workers, which compute at most two waves at a time, and of this process.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import dask
import numpy as np
import psutil

from distmm.errors import DoesNotFitError, InputError
from distmm.graph import consumers
from distmm.planning.blocks import slices
from distmm.planning.plan import Plan
from distmm.planning.problem import accumulator_dtype
from distmm.product.choices import Choices
from distmm.product.product import Gemm
from distmm.product.reduced_product import reduced_chains
from distmm.product.reduction_limits import (
    bytes_of_entry,
    bytes_widened,
    check_metric,
    check_ordered,
    check_threshold,
    most_of_block,
)
from distmm.product.scalars import plain
from distmm.product.sinks import receive
from distmm.worker.tasks.metrics import Metric
from distmm.worker.tasks.threshold import Threshold

# Bytes that may always be kept of a small block. The plan reserves memory for the kept elements of two waves.
ALWAYS = 1 << 20

# Share of this process's free memory that the result may take by default. Sorting it takes twice as much for a while.
MOST = 1 / 4


class Entries(NamedTuple):
    """The elements of a product that were kept, sorted by row, then by column.

    SciPy's form is ``scipy.sparse.coo_array((values, (rows, columns)), shape=shape)``.

    Parameters
    ----------
    rows, columns : numpy.ndarray of int64, of shape (count,)
    values : numpy.ndarray of shape (count,)
    shape : tuple of int
        Of the product.
    """

    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    shape: tuple[int, int]


def above(t: float, product: Gemm, choices: Choices, metric: Metric | None, most: int | None, lower: bool) -> Entries:
    """Compute a product, and return its elements that are at least `t`, or the distances of at most `t`.

    With `lower`, only those on and below the diagonal. The arguments and errors are those of `distmm.threshold`.
    """
    check_ordered(product.dtype, "threshold")
    if len(product.shape) != 2:
        raise InputError(f"the product has shape {product.shape}: threshold takes one product of matrices")
    check_threshold(t, most, metric)
    dtype = product.dtype
    if metric is not None:
        check_metric(metric, product.a, product.b)
        dtype = accumulator_dtype(dtype)
    each = bytes_of_entry(dtype)
    limit = int(psutil.virtual_memory().available * MOST) // each if most is None else int(most)

    def of_block(plan: Plan) -> int:
        """Largest number of elements that are kept of a block."""
        return min(limit, most_of_block(plan, dtype, ALWAYS))

    def of_waves(plan: Plan) -> int:
        """Largest number of bytes that are kept of two waves, which may run at the same time."""
        kept = 2 * max(wave.c_blocks for wave in plan.waves) * of_block(plan) * each
        return kept + (0 if metric is None else bytes_widened(plan))

    made = product.plan_reduced(choices, of_waves)
    collected = _Collected(product, made, limit, lower=lower)
    reduction = Threshold(plain(t), of_block(made), metric=metric, dtype=dtype)
    chains = reduced_chains(product, made, reduction, choices.client, by_wave=True)
    graphs = ((chains.graph(wave), wave) for wave in made.waves)
    waves = (consumers.parts_of_blocks(chains.name, graph, made, wave) for graph, wave in graphs)
    if choices.client is None:
        for parts in waves:
            for at, part in zip(parts, dask.compute(*parts.values()), strict=True):
                collected.add(at, part)
    else:
        keyed = ((list(parts.values()), {part.key: at for at, part in parts.items()}) for parts in waves)
        receive(keyed, collected.add, choices.client, math.inf)
    return collected.result()


class _Collected:
    """The elements that have been kept so far."""

    def __init__(self, product: Gemm, plan: Plan, most: int, lower: bool) -> None:
        self.product, self.most, self.count, self.seen = product, most, 0, 0
        self.mirrored, self.lower = product.symmetry is not None and not lower, lower
        self.rows, self.columns = slices(plan.blocking.m), slices(plan.blocking.n)
        self.parts: list[tuple[np.ndarray, ...]] = []  # rows, columns and values of each block

    def add(self, at: tuple[Any, ...], part: tuple[int, Any, Any, Any]) -> None:
        """Add the kept elements of one block.

        Raises
        ------
        DoesNotFitError
            If the elements kept so far, or those of this block, exceed their limit.
        """
        i, j = at
        rows, columns = self.rows[i], self.columns[j]
        size = (rows.stop - rows.start) * (columns.stop - columns.start)
        count, row, column, values = part
        times = 2 if self.mirrored and i != j else 1
        self.seen += size * times
        self.count += count * times
        if row is None or self.count > self.most:
            whole = math.prod(self.product.shape)
            why = f"and at most {self.most:,} fit"
            if self.count <= self.most:
                why = f"and those of one block, {count:,} of {size:,}, would take more than a quarter of its memory"
            raise DoesNotFitError(
                f"the threshold keeps {self.count:,} of the {self.seen:,} elements seen so far, of {whole:,}, {why}: "
                "choose a stricter threshold, or compute all elements with distmm.matmul and out="
            )
        row += rows.start
        if self.lower and i == j:  # a block on the diagonal has both elements of each pair
            lower = column <= row
            row, column, values = row[lower], column[lower], values[lower]
        self.parts.append((row, column, values))
        if self.mirrored and i != j:
            self.parts.append((column, row, values))

    def result(self) -> Entries:
        """Return all kept elements, sorted by row, then by column."""
        rows, columns, values = (np.concatenate(each) for each in zip(*self.parts, strict=True))
        self.parts.clear()
        order = np.lexsort((columns, rows))
        m, n = self.product.shape
        return Entries(rows[order], columns[order], values[order], (m, n))
