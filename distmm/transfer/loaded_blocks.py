"""Checksums of blocks in host memory at the time of their load, to detect later changes.

A job compares C with sketches of A and B, which are computed from the blocks in memory. A bit that flips between the
load of a block and its sketch changes both C and the sketch, so this comparison cannot find it. So the load tasks of a
job store a checksum, and the task that makes the sketch compares it. Dask sends the checksum with the block
(`distmm.transfer.serialization`).

Blocks in GPU memory get no checksum: the memory of data-centre GPUs corrects its errors (ECC).
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from distmm.transfer.crc32c import crc32c

# Owner of the memory and CRC-32C, by address and bytes. The key is not the object: a view of a block is another object
# with the same memory.
_noted: dict[tuple[int, int], tuple[weakref.ref[np.ndarray], int]] = {}


def note(block: np.ndarray, crc: int | None = None) -> None:
    """Store the checksum of a block that was just loaded, unless its memory has gaps.

    Parameters
    ----------
    block : array
    crc : int, optional
        Checksum from the worker that loaded the block; by default it is computed from the block.
    """
    if (crc := _sum(block) if crc is None else crc) is None:
        return
    key, owner = _key(block), block
    while isinstance(owner.base, np.ndarray):
        owner = owner.base

    def forget(gone: weakref.ref[np.ndarray]) -> None:
        if _noted.get(key, (None,))[0] is gone:  # another block may be at this address now
            _noted.pop(key, None)

    _noted[key] = weakref.ref(owner, forget), crc


def noted(block: Any) -> int | None:
    """Return the stored checksum of a block; None if there is none."""
    if not isinstance(block, np.ndarray) or (found := _noted.get(_key(block))) is None:
        return None
    return found[1]


def has_changed(block: Any, now: int | None = None) -> bool:
    """Whether a block has changed since it was loaded; False if it has no stored checksum.

    `now` is its CRC-32C in the order of its memory, if it is known.
    """
    return (crc := noted(block)) is not None and (_sum(block) if now is None else now) not in (None, crc)


def _key(block: np.ndarray) -> tuple[int, int]:
    return block.ctypes.data, block.nbytes


def _sum(block: np.ndarray) -> int | None:
    """Return the CRC-32C of a block in the order of its memory; None if it is empty or has gaps."""
    whole = block if block.flags.c_contiguous else block.T
    if not whole.flags.c_contiguous or not block.size:
        return None
    return crc32c(whole.reshape(-1).view(np.uint8))
