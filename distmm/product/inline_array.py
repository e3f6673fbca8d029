"""Arrays of this process inside the graph: each block is a view, which is read when the graph is sent or run.

`dask.array.from_array` would copy a NumPy array at the call. Workers read large arrays from the client's memory when
the product is computed. Arrays inside the graph are small, or on a cluster whose workers cannot read that memory. They
must be read at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import dask.array as da
import numpy as np

from distmm.graph.dask_tasks import one_per_block
from distmm.worker import gpu_copies
from distmm.worker.tasks.arrivals import arrived
from distmm.worker.tasks.loads import to_device


@dataclass(frozen=True)
class _Part:
    """A view of a part of an array. Its elements are pickled when the graph is sent."""

    name: str
    array: Any = field(repr=False)

    def __dask_tokenize__(self) -> str:
        return self.name  # not of the elements, which may change

    def __reduce__(self) -> tuple[Any, ...]:
        return _Part, (self.name, gpu_copies.to_host(self.array))  # the scheduler, which unpickles it, may have no GPU


def _loaded(part: _Part, device: Literal["cpu", "cuda"]) -> Any:
    """Return a block on the device. Runs on workers."""
    return to_device(part.array) if device == "cuda" else arrived(part.array, "a block of an operand")


def inline_array(
    array: Any, chunks: tuple[tuple[int, ...], ...], device: Literal["cpu", "cuda"], name: str, meta: Any
) -> da.Array:
    """Return an array of this process as a Dask array with this name. Tasks load its blocks to `device`."""
    # A view of a `numpy.memmap` would be pickled as a memmap.
    plain = np.asarray(array) if isinstance(array, np.ndarray) else array
    indices = np.ndindex(*map(len, chunks))
    parts = {
        index: _Part(f"{name}-{index}", plain[where])
        for index, where in zip(indices, da.core.slices_from_chunks(chunks), strict=True)
    }
    blocks = one_per_block(name, partial(_loaded, device=device), parts)
    return da.Array(blocks, name, chunks, meta=meta)
