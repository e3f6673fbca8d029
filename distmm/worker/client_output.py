"""Stores of finished blocks into an array of the client, which tasks run from host memory and from GPU memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from distmm.transfer import ClientArray
from distmm.worker import gpu_copies
from distmm.worker.tasks.loads import to_device
from distmm.worker.worker_slots import slot_released

# Stores without a slot that copy at a time: two keep the host link busy.
_copying = threading.BoundedSemaphore(2)


@dataclass(frozen=True)
class ClientOutput:
    """The client's array as an ``out`` that tasks assign blocks to; with a lease, only while it lasts."""

    array: ClientArray

    def __dask_tokenize__(self) -> Any:
        return self.array.__dask_tokenize__()

    def __setitem__(self, index: tuple[slice, ...], block: Any) -> None:
        if self.array.on_gpu or hasattr(block, "__cuda_array_interface__"):
            with slot_released("store"), _copying:
                self.write(index, block)
        else:
            self.write(index, block)

    def write(self, index: tuple[slice, ...], block: Any) -> None:
        """Write a block, and keep the task's slot: a task that releases it goes on in a thread that ends with it."""
        on_gpu = hasattr(block, "__cuda_array_interface__")
        if self.array.on_gpu and not on_gpu:
            block, on_gpu = to_device(block), True
        if not on_gpu or not self.array.dtype.isnative:  # a GPU has no other byte order
            self.array[index] = gpu_copies.to_host(block) if on_gpu else block
            return
        part = self.array.part(index)
        with part.writing():
            gpu_copies.download(part, block)
