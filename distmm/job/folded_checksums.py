"""One checksum for a row of blocks of A, or a column of blocks of B: the blocks' checksums, folded in ascending k."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["Order", "fold", "folded"]

# The sum so far is multiplied by this odd number, modulo 2**64, before the next checksum is added.
FOLD = np.uint64(0x9E3779B97F4A7C15)

# How the checksum of a block is computed: from sums of rows or from all elements, and column by column or not
# (`by_rows` and `columns_first` of `distmm.checking.checksum.checksum_of_input`).
Order = tuple[bool, bool]


def fold(before: np.ndarray | None, sums: Sequence[int]) -> np.ndarray:
    """Fold the checksums of the blocks of one more panel into those of the panels before."""
    new = np.array(sums, np.uint64)
    return new if before is None else before * FOLD + new


def folded(sums: Sequence[str]) -> str:
    """Fold the checksums of several columns of B, as they are in markers, to one. A single one is not changed."""
    total: np.ndarray | None = None
    for one in sums:
        total = fold(total, [int(one, 16)])
    assert total is not None
    return f"{total[0]:016x}"
