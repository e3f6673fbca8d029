"""One checksum for the blocks of A in a row, and of B in a column: those of the panels, folded in ascending k."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["Order", "fold", "folded"]

# Each checksum is multiplied by this, modulo 2**64, before the next one is added: an odd number whose bits are mixed.
FOLD = np.uint64(0x9E3779B97F4A7C15)

# How the checksum of a block is computed: whether from sums of rows, and whether column by column.
Order = tuple[bool, bool]


def fold(before: np.ndarray | None, sums: Sequence[int]) -> np.ndarray:
    """Add checksums of the blocks of one more panel to those of the panels before."""
    new = np.array(sums, np.uint64)
    return new if before is None else before * FOLD + new


def folded(sums: Sequence[str]) -> str:
    """Fold the checksums of several columns of B, as markers have them, to one; that of a single column stays."""
    total: np.ndarray | None = None
    for one in sums:
        total = fold(total, [int(one, 16)])
    assert total is not None
    return f"{total[0]:016x}"
