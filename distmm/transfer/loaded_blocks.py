"""Checksums that blocks in host memory had when they were loaded: they tell whether a block has changed since.

A job compares C with sketches that are made of the blocks in memory. A bit that flips between the load of a block and
its sketch changes both, and they agree. So the loads of a job note a checksum, and the task that makes the sketch
compares it. The checksum is sent with the block (`distmm.transfer.serialization`).

Blocks in GPU memory are not noted: that memory corrects its errors itself (ECC) in the GPUs of data centres.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from distmm.transfer.crc32c import crc32c

__all__ = ["has_changed", "note", "noted"]

# By address and bytes: the CRC-32C, and the owner of the memory. A view of a block is another object in its memory.
_noted: dict[tuple[int, int], tuple[weakref.ref[np.ndarray], int]] = {}


def note(block: np.ndarray, crc: int | None = None) -> None:
    """Note the checksum of a block that has just been loaded, unless its memory has gaps.

    Parameters
    ----------
    block : array
    crc : int, optional
        The checksum that was noted where the block was loaded; by default that of the block as it is now.
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
    """Return the checksum that was noted for a block; None if there is none."""
    if not isinstance(block, np.ndarray) or (found := _noted.get(_key(block))) is None:
        return None
    return found[1]


def has_changed(block: Any) -> bool:
    """Whether a block has changed since it was loaded; False if that is not known."""
    return (crc := noted(block)) is not None and _sum(block) not in (None, crc)


def _key(block: np.ndarray) -> tuple[int, int]:
    return block.ctypes.data, block.nbytes


def _sum(block: np.ndarray) -> int | None:
    """CRC-32C of a block in the order of its memory; None if the memory has gaps, or if it is empty."""
    whole = block if block.flags.c_contiguous else block.T
    if not whole.flags.c_contiguous or not block.size:
        return None
    return crc32c(whole.reshape(-1).view(np.uint8))
