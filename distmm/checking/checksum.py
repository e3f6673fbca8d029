"""CRC-32C of blocks. It is computed without Python's lock, and on a GPU if the block is there."""

from __future__ import annotations

from typing import Any

import numpy as np

from distmm.transfer.crc32c import crc32c
from distmm.transfer.row_sums import PIECE, pieces, row_sums
from distmm.worker import gpu


def checksum(block: np.ndarray) -> int:
    """Return the CRC-32C of the elements in C order."""
    return crc32c(np.ascontiguousarray(block).reshape(-1).view(np.uint8))


def checksum_of_input(block: Any, by_rows: bool = False, columns_first: bool = False) -> int:
    """Return the CRC-32C of a block of A or B, without copying the whole block. Its memory may be in any order.

    With `by_rows`, it is the CRC-32C of 8 bytes for each row (`row_sums`) instead of all elements. A GPU computes these
    in its own memory. All blocks of a job on GPUs use this form, also blocks in host memory. With `columns_first`, the
    elements are read column by column: 15 GB/s for blocks in Fortran order, and row by row 1 GB/s.
    """
    block = block.T if columns_first else block
    if not block.size:
        return 0
    if gpu.namespace(block) is not np:
        return checksum(gpu.completed(lambda: np.asarray(row_sums(block).get()), "the checksum of a block"))
    if by_rows:
        return checksum(row_sums(block))
    crc = 0
    for _, rows in pieces(block, block.nbytes if block.flags.c_contiguous else PIECE):
        crc = crc32c(rows.reshape(-1).view(np.uint8), crc)
    return crc
