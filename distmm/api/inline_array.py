"""Arrays of this process that travel with the graph, block by block, as they are when it is sent or run.

`dask.array.from_array` copies NumPy arrays at the call, while workers read large ones where they lie, when the product
is computed. Here all are read then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import dask.array as da
import numpy as np

from distmm.graph import layer
from distmm.worker import tasks

__all__ = ["travelling"]


@dataclass(frozen=True)
class _Part:
    """A view of a part of an array: pickled with the elements that it has then."""

    name: str
    array: np.ndarray = field(repr=False)

    def __dask_tokenize__(self) -> str:
        return self.name  # not of the elements, which may change

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.array[index]


def travelling(
    array: np.ndarray, chunks: tuple[tuple[int, ...], ...], device: Literal["cpu", "cuda"], name: str
) -> da.Array:
    """Return an array of this process as a Dask array called `name`, its blocks on the device where they are used."""
    plain = np.asarray(array)  # a view of a memory map would be pickled as a map
    everything = (slice(None),) * array.ndim
    indices = np.ndindex(*map(len, chunks))
    parts = {
        index: _Part(f"{name}-{index}", plain[where])
        for index, where in zip(indices, da.core.slices_from_chunks(chunks), strict=True)
    }
    blocks = layer.calls(name, partial(tasks.load, index=everything, device=device), parts)
    return da.Array(blocks, name, chunks, meta=np.empty((0,) * array.ndim, array.dtype))
