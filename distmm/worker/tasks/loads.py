"""Loads: blocks of operands are read into the memory of the worker's device."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from distmm.transfer import ClientArray, loaded_blocks
from distmm.worker import files_to_gpu, gpu, gpu_copies
from distmm.worker.tasks.arrivals import arrived
from distmm.worker.worker_slots import slot_released

# Loads without a slot that copy at a time. Two keep the host link busy; with more, the blocks that products wait for
# would arrive later.
_copying = threading.BoundedSemaphore(2)


def load(source: Any, index: tuple[slice, ...], device: Literal["cpu", "cuda"], noted: bool = False) -> Any:
    """Read one block of an array-like (Zarr array, HDF5 matrix, array of the client) into host or GPU memory.

    The block is checked against what the array-like says (`arrived`). With `noted`, the checksum of a block in host
    memory is noted (`distmm.transfer.loaded_blocks`).
    """
    if device == "cuda" and (_is_raw(source) or files_to_gpu.is_file(source)):
        with slot_released("load"), _copying:
            if isinstance(source, ClientArray):
                return _uploaded(source, index)
            return gpu.retrying(partial(files_to_gpu.upload, source, index), "a block that is read")
    shape = tuple(len(range(*part.indices(n))) for part, n in zip(index, source.shape, strict=True))
    block = arrived(source[index], f"a block of a {type(source).__name__}", shape, source.dtype)
    if device == "cuda":
        return to_device(block)
    if noted and not (isinstance(source, ClientArray) and source.pid == os.getpid()):  # that may be the user's memory
        loaded_blocks.note(block)
    return block


class Load(NamedTuple):
    """An array of the client, or a block of it, which the task that multiplies reads itself."""

    source: ClientArray
    device: Literal["cpu", "cuda"]
    block: tuple[slice, ...] = ()  # its indices in the last dimensions; () is the whole array

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its elements."""
        return self.source.dtype

    def __call__(self) -> Any:
        """Read it. The task keeps its slot, as the product follows."""
        index = (*(slice(None),) * (self.source.ndim - len(self.block)), *self.block)
        if self.device == "cuda" and _is_raw(self.source):
            return _uploaded(self.source, index)
        return load(self.source, index, self.device)


def _is_raw(source: Any) -> bool:
    """Whether it is an array of the client that a GPU can copy: a GPU has no other byte order."""
    return isinstance(source, ClientArray) and source.dtype.isnative


def _uploaded(source: ClientArray, index: tuple[slice, ...]) -> Any:
    part = source.part(index)
    return gpu.retrying(partial(gpu_copies.upload, part), "a block that is loaded", part.nbytes)


def to_device(block: Any) -> Any:
    """Return a CuPy copy of a NumPy block: uploaded once, then used by every product and sent between GPUs."""
    import cupy

    block = arrived(block, "a block of an operand")
    return gpu.retrying(
        partial(cupy.asarray, block.view(gpu.carrier(block.dtype))), "a block that is loaded", block.nbytes
    )
