"""Operands in the formats of kernels, kept on a worker's GPU for the next product of the same block."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from distmm.worker.dask_internals import in_task
from distmm.worker.united_chunks import Union

# Seconds without a product after which prepared operands are freed. They are as large as the operands (17 GB a GPU at
# n = 65536 on two), and making them again takes milliseconds.
IDLE_SECONDS = 2.0


class Prepared:
    """Operands in a kernel's own format: made once for each block, kept while the block exists and is used often.

    A block of A takes part in every product of its row. Splitting it into float16 halves, for example, takes a few per
    cent of one product. Blocks are compared by identity: Dask keeps one object for each block on a worker. Views that
    a worker's tasks make of a whole block, such as its transpose, are compared by their memory and layout. A block in
    several chunks is compared by its chunks, and exists while all of them do.
    """

    def __init__(self) -> None:
        # In the order of their last use: the first one is freed first.
        # Each with references to the arrays that it was made from, and the number of their elements.
        self._kept: dict[tuple[object, ...], tuple[list[weakref.ref[Any]], int, Any]] = {}
        self._used = 0.0  # when, by the monotonic clock
        self._making = threading.Lock()  # products that begin at the same time use the same blocks

    def get(self, block: Any, form: object, prepare: Callable[[Any], Any], most: float = math.inf) -> Any:
        """Return ``prepare(block)``, or its earlier result for this block and `form`.

        Parameters
        ----------
        block : array or Union
        form : object
            Which form of the block it makes; hashable.
        prepare : callable
        most : int
            Keep the prepared forms of at most so many elements of blocks. This block counts, and is always kept.
        """
        chunks = block.chunks if isinstance(block, Union) else [block]
        owners = [_owner(chunk) for chunk in chunks]
        key = form, block.shape, *(_identity(*each) for each in zip(chunks, owners, strict=True))
        with self._making:
            self._used = time.monotonic()
            known, size, operand = self._kept.pop(key, ([], 0, None))
            if not known or any(ref() is not owner for ref, owner in zip(known, owners, strict=True)):
                size = sum(owner.size for owner in owners)
                self._make_room(most - size)
                operand = prepare(alias(block))
                known = [weakref.ref(owner, lambda gone: self._drop(key, gone)) for owner in owners]
            self._kept[key] = known, size, operand
        return operand

    def _make_room(self, most: float) -> None:
        """Free the least recently used forms, until the remaining blocks have at most this many elements."""
        sizes = {key: size for key, (_, size, _) in self._kept.copy().items()}  # it may lose entries at any time
        there = sum(sizes.values())
        for key, size in sizes.items():
            if there <= most:
                return
            self._kept.pop(key, None)
            there -= size

    def _drop(self, key: tuple[object, ...], gone: weakref.ref[Any]) -> None:
        # Without the lock: garbage is collected in any thread, at any time. The entry may belong to a new block by now.
        if any(ref is gone for ref in self._kept.get(key, ([],))[0]):
            self._kept.pop(key, None)

    def drop_idle(self) -> None:
        """Free all if no product has asked for a while: other work on the GPU may need the memory."""
        if self._kept and time.monotonic() - self._used > IDLE_SECONDS:
            self.clear()

    def clear(self) -> None:
        """Free all."""
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


def _owner(block: Any) -> Any:
    """Return the array that exists as long as a block. A task that transposes a block makes a new view of it.

    Blocks of a worker do not change. Elsewhere the base is an array of the caller, who may write to it.
    """
    base = getattr(block, "base", None) if in_task() else None
    if base is None or not hasattr(block.data, "ptr"):  # a block in host memory
        return block
    return base if (base.size, base.dtype) == (block.size, block.dtype) else block


def _identity(block: Any, owner: Any) -> tuple[object, ...]:
    """Return what tells a block from others as long as its owner exists."""
    return id(owner), *((block.data.ptr, block.shape, block.strides) if owner is not block else ())


def alias(block: Any) -> Any:
    """Return another array with the same memory: what is made of it does not keep the block itself alive.

    A block in several chunks is joined.
    """
    import cupy

    if isinstance(block, Union):
        block = block.joined()
    if not isinstance(block, cupy.ndarray):
        return block  # a kernel copies it to the device, and does not refer to it
    return cupy.ndarray(block.shape, block.dtype, block.data, block.strides)


prepared = Prepared()  # of this process
