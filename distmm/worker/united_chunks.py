"""Blocks of operands that are unions of several chunks of the user."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distmm.planning.blocks import slices
from distmm.transfer import block_memory

Edges = tuple[tuple[int, ...], ...]  # of the chunks of a block, along each of its dimensions


@dataclass(frozen=True, eq=False)
class Union:
    """A block that is still in several chunks ``(*batch, m, k)`` of the user, in C order."""

    edges: Edges
    chunks: list[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the block."""
        return tuple(map(sum, self.edges))

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return sum(chunk.nbytes for chunk in self.chunks)

    def joined(self) -> Any:
        """Return the block as one array, of the kind of the chunks. Copies several in CuPy's current stream."""
        first = self.chunks[0]
        if len(self.chunks) == 1:
            return first
        if hasattr(first, "__cuda_array_interface__"):
            return _concatenated(iter(self.chunks), self.edges).view(first.dtype)
        return _filled(self.edges, self.chunks, range(len(self.chunks)))


@dataclass(frozen=True)
class Gathered:
    """How a block comes in arrays ``(elements,)``, each of which has some of its chunks, one after another.

    Attributes
    ----------
    edges : Edges
    numbers : tuple of tuple of int
        Numbers of the chunks that each array has, in C order of all chunks.
    """

    edges: Edges
    numbers: tuple[tuple[int, ...], ...]

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Return the block."""
        shapes = list(itertools.product(*self.edges))
        ends = (np.cumsum([math.prod(shapes[number]) for number in own[:-1]]) for own in self.numbers)
        chunks = [chunk for array, at in zip(arrays, ends, strict=True) for chunk in np.split(array, at)]
        return _filled(self.edges, chunks, itertools.chain(*self.numbers))


def _filled(edges: Edges, chunks: Sequence[np.ndarray], numbers: Iterable[int]) -> np.ndarray:
    """Return the array that chunks make, which have these numbers, in C order."""
    whole = block_memory.blocks.new(tuple(map(sum, edges)), chunks[0].dtype)
    places = list(itertools.product(*map(slices, edges)))
    for chunk, number in zip(chunks, numbers, strict=True):
        part = whole[places[number]]
        part[...] = chunk.reshape(part.shape)
    return whole


def _concatenated(chunks: Iterator[Any], edges: Edges, axis: int = 0) -> Any:
    """Join chunks on a GPU. Those of a type with a field become bytes, as CuPy does not join them as they are."""
    import cupy

    if axis == len(edges):
        chunk = next(chunks)
        return chunk.view(np.uint8) if chunk.dtype.names else chunk
    made = [_concatenated(chunks, edges, axis + 1) for _ in edges[axis]]
    return made[0] if len(made) == 1 else cupy.concatenate(made, axis)
