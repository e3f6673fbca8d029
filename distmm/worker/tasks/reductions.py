"""Reductions of C that need no C: each finished block is reduced where it was made, and only its parts travel.

A reduction is three functions of lines, which are the rows of C, or its columns::

    part = chunk(block, first)       of a block's part of some lines, which begins at element `first` of each
    part = combine([part, ...])      of parts of the same lines, in the order of blocks: a tree of fixed shape
    results = finish(part)           of whole lines

A part is an array, or a tuple of arrays, whose leading dimensions are those of the lines: ``(*batch, m)``. It is in
host memory, also where the block is in a GPU's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal, Protocol

import numpy as np

from distmm.errors import InputError
from distmm.planning.problem import Symmetry
from distmm.worker import gpu
from distmm.worker.gpu_copies import to_host
from distmm.worker.tasks import reductions_on_gpu
from distmm.worker.tasks.epilogue import Block, flipped
from distmm.worker.tasks.largest import largest, sortable
from distmm.worker.tasks.metrics import Metric, scores, value_of
from distmm.worker.tasks.rows import by_rows
from distmm.worker.worker_slots import slot_released

# Bytes of parts that are merged on a GPU at a time. An element has 12 bytes, and with copies and buffers for sorting
# some 60 bytes: together no more than `rows.WORKSPACE`.
MERGED = 1 << 27

Device = Literal["cpu", "cuda"]
Part = Any  # an array, or a tuple of arrays
Kinds = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]
Norms = tuple[Block, Block]  # squared norms of the lines, and of their elements' rows of Y


class Reduction(Protocol):
    """What is done to lines of C: the three functions above."""

    def chunk(self, block: Block, first: int, norms: Norms | None) -> Part:
        """Reduce a block's part ``(*batch, m, n)`` of some lines; a NumPy or CuPy array.

        `norms` are given where they were asked for.
        """

    def combine(self, parts: list[Part]) -> Part:
        """Reduce parts of the same lines to one part."""

    def finish(self, part: Part) -> tuple[np.ndarray, ...]:
        """Return the results for whole lines."""


@dataclass(frozen=True)
class BlockReduction:
    """The reduction of one block of C, whose first element is ``C[..., row, column]``.

    Attributes
    ----------
    reduction : Reduction
    row, column : int
    down : bool
        Whether lines are columns of C, and not rows.
    mirrored : {"symmetric", "hermitian"}, optional
        Given where the block also stands for its mirror image in a symmetric product.
    """

    reduction: Reduction
    row: int
    column: int
    down: bool = False
    mirrored: Symmetry | None = None

    def __call__(self, block: Block, norms: list[np.ndarray] | None = None) -> tuple[Part, ...]:
        """Return the part of the block's lines, and that of its mirror image's, if it stands for one.

        `norms` are squared norms of the rows that the block's rows, and its columns, are inner products of.
        """
        library = gpu.namespace(block)
        with contextlib.nullcontext() if library is np else gpu.product_lock:
            there: Norms | None = None if norms is None else (library.asarray(norms[0]), library.asarray(norms[1]))
            parts = [self._part(block, self.row, self.column, there)]
            if self.mirrored is not None:
                turned = None if there is None else there[::-1]
                parts.append(self._part(flipped(block, self.mirrored), self.column, self.row, turned))
            return tuple(parts)

    def _part(self, block: Block, row: int, column: int, norms: Norms | None) -> Part:
        if self.down:
            return self.reduction.chunk(block.swapaxes(-1, -2), row, norms)
        return self.reduction.chunk(block, column, norms)


def on_host(part: Part) -> Part:
    """Return a part with its arrays in host memory."""
    return tuple(map(on_host, part)) if isinstance(part, tuple) else to_host(part)


def merge(reduction: Reduction, made: list[Any], sides: tuple[int, ...] | None, last: bool, device: Device) -> Any:
    """Combine parts of the same lines; the `last` task of a tree returns results.

    Parameters
    ----------
    reduction : Reduction
    made : list
        Parts; or, with `sides`, the results of tasks, and for each the index of the part of these lines.
    sides : tuple of int, optional
    last : bool
    device : {"cpu", "cuda"}
        Where the worker multiplies. A GPU finds the largest elements of parts as well: the merges of 32 parts of a
        million lines, 15 elements each, take 16 cores as long as a GPU takes to multiply the blocks.
    """
    parts = made if sides is None else [parts[side] for parts, side in zip(made, sides, strict=True)]
    if len(parts) == 1:
        part = parts[0]
    elif device == "cuda" and isinstance(reduction, Largest):
        # Without a slot: a merge that kept one of the two left the GPU with one product, and idle after it.
        with slot_released("merge"):
            part = gpu.retrying(partial(_combined_on_gpu, reduction, parts), "a merge of parts of topk")
    else:
        part = reduction.combine(parts)
    return reduction.finish(part) if last else part


def _combined_on_gpu(reduction: Largest, parts: list[Part]) -> Part:
    """Combine values and indices, some lines at a time; norms of the lines stay as they are."""
    import cupy

    lines, made = parts[0][0].shape[-2], []
    nbytes = sum(each.nbytes for part in parts for each in part[:2])
    height = max(1, lines * MERGED // max(1, nbytes))
    for top in range(0, max(1, lines), height):
        # On a separate stream: behind products, 90 MB of copies held a slot for the time of two products (76 ms), in
        # which the GPU multiplied nothing.
        with gpu.working("merge"), gpu.merge_lock:
            combined = reduction.combine(
                [tuple(cupy.asarray(each[..., top : top + height, :]) for each in part[:2]) for part in parts]
            )
        made.append(on_host(combined))
    return (*(np.concatenate(each, axis=-2) for each in zip(*made, strict=True)), *parts[0][2:])


@dataclass(frozen=True)
class Largest:
    """The k largest elements of each line, and their indices; with a metric, the nearest rows of Y.

    Parts are ``(values, indices)``, and for metrics that need them the squared norms of the lines.
    """

    k: int
    dtype: np.dtype[Any]
    metric: Metric | None = None

    @property
    def kinds(self) -> Kinds:
        """Type and shape of each result, for one line."""
        return (self.dtype, (self.k,)), (np.dtype(np.int64), (self.k,))

    def chunk(self, block: Block, first: int, norms: Norms | None) -> Part:
        """Reduce a block's part of some lines."""
        k, metric = min(self.k, block.shape[-1]), self.metric
        squares = None if norms is None else norms[1]
        if (found := reductions_on_gpu.largest(block, k, metric, squares)) is not None:
            return (found[0], found[1] + first, *(() if norms is None else norms[:1]))

        def best(x: Block, at: tuple[Any, ...]) -> tuple[Block, Block]:
            x = sortable(x) if metric is None else scores(sortable(x), metric, squares)
            values, columns = largest(x, k)
            return values, columns + first

        return (*by_rows(block, best), *(() if norms is None else norms[:1]))

    def combine(self, parts: list[Part]) -> Part:
        """Reduce parts of the same lines to one part."""
        # Equal values stay in the order of their indices: parts come in the order of blocks.
        values, indices = (np.concatenate(each, axis=-1) for each in list(zip(*parts, strict=True))[:2])

        def best(x: Block, at: tuple[Any, ...]) -> tuple[Block, Block]:
            values, places = largest(x, min(self.k, x.shape[1]))
            return values, np.take_along_axis(indices[at], places, axis=1)

        return (*by_rows(values, best), *parts[0][2:])

    def finish(self, part: Part) -> tuple[np.ndarray, ...]:
        """Return values and indices; for metrics the similarities or distances."""
        values, indices, *norms = part
        if self.metric is not None:
            values = value_of(values, self.metric, norms[0] if norms else None)
        with np.errstate(over="ignore"):  # a distance that the type cannot hold is infinite
            return values.astype(self.dtype, copy=False), indices


@dataclass(frozen=True)
class Custom:
    """Three functions of lines: those of `sums`, `norms` and `histogram`, or the user's own (`distmm.reduce`)."""

    functions: tuple[Callable[[Block, int], Part], Callable[[list[Part]], Part], Callable[[Part], np.ndarray]]
    dtype: np.dtype[Any]
    shape: tuple[int, ...] = ()

    @property
    def kinds(self) -> Kinds:
        """Type and shape of the result, for one line."""
        return ((self.dtype, self.shape),)

    def chunk(self, block: Block, first: int, norms: Norms | None) -> Part:
        """Reduce a block's part of some lines."""
        return self.functions[0](block, first)

    def combine(self, parts: list[Part]) -> Part:
        """Reduce parts of the same lines to one part."""
        return self.functions[1](parts)

    def finish(self, part: Part) -> tuple[np.ndarray, ...]:
        """Return the results in their type.

        Raises
        ------
        InputError
            If the user's functions do not return a result for each line.
        """
        found = np.asarray(self.functions[2](part))
        if found.ndim <= len(self.shape) or found.shape[found.ndim - len(self.shape) :] != self.shape:
            raise InputError(
                f"the functions of this reduction return shape {found.shape}: they must return a result of shape "
                f"{self.shape} for each line of a block, as c.min(axis=-1) does for shape ()"
            )
        return (found.astype(self.dtype, copy=False),)


def sums(dtype: np.dtype[Any]) -> Custom:
    """Return the reduction to the sum of each line, in float64 or complex128 for numbers that are not integers."""
    wide = np.result_type(dtype, np.float64) if dtype.kind in "fcV" else dtype
    return Custom((partial(_summed, wide), _added, np.asarray), dtype)


def norms(dtype: np.dtype[Any]) -> Custom:
    """Return the reduction to the Euclidean norm of each line: squares are summed in float64."""
    return Custom((_squared, _added, np.sqrt), dtype)


def histogram(edges: tuple[float, ...]) -> Custom:
    """Return the reduction to the count of each line's elements in each bin, with the bins of `numpy.histogram`."""
    return Custom((partial(_counted, edges), _added, np.asarray), np.dtype(np.int64), (len(edges) - 1,))


def _added(parts: list[Part]) -> Part:
    return reduce(np.add, parts)


def _summed(wide: np.dtype[Any], block: Block, first: int) -> Part:
    return by_rows(block, lambda x, _: (sortable(x).sum(axis=1, dtype=wide),))[0]


def _squared(block: Block, first: int) -> Part:
    def squares(x: Block, at: tuple[Any, ...]) -> tuple[Block]:
        x = x.astype(np.complex128).view(np.float64) if x.dtype.kind == "c" else sortable(x).astype(np.float64)
        return ((x * x).sum(axis=1),)

    return by_rows(block, squares)[0]


def _counted(given: tuple[float, ...], block: Block, first: int) -> Part:
    library, bins = gpu.namespace(block), len(given) - 1
    edges = library.asarray(given)

    def counts(x: Block, at: tuple[Any, ...]) -> tuple[Block]:
        x = sortable(x)
        at_bin = library.searchsorted(edges, x.ravel(), side="right").reshape(x.shape) - 1
        at_bin[x == edges[-1]] = bins - 1  # the last bin has both of its edges
        inside = (at_bin >= 0) & (at_bin < bins)  # a NaN is beyond the last one
        at_bin += bins * library.arange(len(x))[:, None]
        counted = library.bincount(at_bin[inside], minlength=len(x) * bins)
        return (counted.reshape(len(x), bins).astype(np.int64, copy=False),)

    return by_rows(block, counts)[0]
