"""Reduce blocks some rows at a time, in the memory where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from distmm.worker import gpu

Block = Any  # a NumPy or CuPy array

# Elements that are reduced at a time. On CPUs they stay in the second-level cache from the first pass to the last. On
# GPUs each piece costs some ten launches.
PIECE = {"numpy": 1 << 18, "cupy": 1 << 24}

# Bytes of a GPU's memory that a reduction takes beside the block: where all elements of a piece are candidates, their
# indices, their order and the buffers of two sorts are some 60 bytes each.
WORKSPACE = 64 * PIECE["cupy"]


def by_rows(block: Block, make: Callable[[Block, tuple[Any, ...]], tuple[Block, ...]]) -> tuple[Block, ...]:
    """Reduce the rows of a block ``(*batch, m, n)`` in pieces, and put the results together.

    Parameters
    ----------
    block : array
    make : callable
        Given some rows ``(r, n)`` of one matrix, contiguous, and their index in the block; returns arrays ``(r, ...)``.

    Returns
    -------
    tuple of arrays ``(*batch, m, ...)``
    """
    library = gpu.namespace(block)
    made = [make(_contiguous(library, block[index]), index) for index in pieces(block)]
    return tuple(_joined(library, each, block.shape[:-1]) for each in zip(*made, strict=True))


def pieces(block: Block) -> Iterator[tuple[Any, ...]]:
    """Yield the index of each piece of rows of a block: at least one piece, even if there are no elements."""
    *batch, m, n = block.shape
    height = max(1, PIECE[gpu.namespace(block).__name__] // max(1, n))
    for index in np.ndindex(*batch):
        for top in range(0, max(1, m), height):
            yield *index, slice(top, min(m, top + height))


def _contiguous(library: Any, x: Block) -> Block:
    """Return rows in C order. Columns of a block are transposed in the cache, which takes half of the time."""
    turned = library is np and x.strides[0] < x.strides[1]
    return library.ascontiguousarray(np.ascontiguousarray(x.T).T if turned else x)


def _joined(library: Any, pieces: tuple[Block, ...], lines: tuple[int, ...]) -> Block:
    whole = pieces[0] if len(pieces) == 1 else library.concatenate(pieces)
    return whole.reshape(*lines, *whole.shape[1:])
