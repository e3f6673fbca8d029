"""Blocks of operands that are unions of several chunks of the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from dask.core import flatten

from distmm.transfer import block_memory


@dataclass(frozen=True, eq=False)
class Union:
    """A block that is still in several chunks ``(*batch, m, k)`` of the user, nested as the lists of `numpy.block`."""

    parts: list[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the block."""
        lengths: list[int] = []
        part: Any = self.parts
        while isinstance(part, list):
            lengths.append(sum(_first(each).shape[len(lengths)] for each in part))
            part = part[0]
        return tuple(lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def chunks(self) -> list[Any]:
        """The chunks, in C order."""
        return list(flatten(self.parts))

    def joined(self) -> Any:
        """Return the block as one array, of the kind of the chunks. Copies several in CuPy's current stream."""
        first = _first(self.parts)
        if len(self.chunks) == 1:
            return first
        if hasattr(first, "__cuda_array_interface__"):
            return _concatenated(self.parts).view(first.dtype)
        whole = block_memory.blocks.new(self.shape, first.dtype)
        _fill(whole, self.parts)
        return whole


def _first(part: Any) -> Any:
    """Return the first chunk."""
    return next(iter(flatten([part])))


def _concatenated(part: Any, axis: int = 0) -> Any:
    """Join chunks on a GPU. Those of a type with a field become bytes, as CuPy does not join them as they are."""
    import cupy

    if not isinstance(part, list):
        return part.view(np.uint8) if part.dtype.names else part
    made = [_concatenated(each, axis + 1) for each in part]
    return made[0] if len(made) == 1 else cupy.concatenate(made, axis)


def _fill(whole: np.ndarray, part: Any, axis: int = 0) -> None:
    """Copy chunks to where they are in a block."""
    if not isinstance(part, list):
        whole[...] = part
        return
    start = 0
    for each in part:
        length = _first(each).shape[axis]
        _fill(whole[(*[slice(None)] * axis, slice(start, start + length))], each, axis + 1)
        start += length
