"""Arrays of this process inside the graph: each block is a view, which is read when the graph is sent or run.

`dask.array.from_array` would copy a NumPy array at the call. Workers read large arrays from the client's memory when
the product is computed. Arrays inside the graph are small, or on a cluster whose workers cannot read that memory. They
must be read at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import dask.array as da
import numpy as np

from distmm.graph.dask_tasks import one_per_block
from distmm.worker import tasks


@dataclass(frozen=True)
class _Part:
    """A view of a part of an array. Its elements are pickled when the graph is sent."""

    name: str
    array: np.ndarray = field(repr=False)

    def __dask_tokenize__(self) -> str:
        return self.name  # not of the elements, which may change

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of its elements."""
        return self.array.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.array[index]


def inline_array(
    array: np.ndarray, chunks: tuple[tuple[int, ...], ...], device: Literal["cpu", "cuda"], name: str
) -> da.Array:
    """Return an array of this process as a Dask array with this name. Tasks load its blocks to `device`."""
    plain = np.asarray(array)  # a view of a `numpy.memmap` would be pickled as a memmap
    everything = (slice(None),) * array.ndim
    indices = np.ndindex(*map(len, chunks))
    parts = {
        index: _Part(f"{name}-{index}", plain[where])
        for index, where in zip(indices, da.core.slices_from_chunks(chunks), strict=True)
    }
    blocks = one_per_block(name, partial(tasks.load, index=everything, device=device), parts)
    return da.Array(blocks, name, chunks, meta=np.empty((0,) * array.ndim, array.dtype))
