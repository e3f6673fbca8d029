"""Blocks of operands that are unions of several chunks of the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from distmm.transfer import block_memory


@dataclass(frozen=True, eq=False)
class Union:
    """A block that is still in several chunks ``(*batch, m, k)`` of the user, row by row."""

    rows: list[list[Any]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the block."""
        first = self.rows[0]
        return *first[0].shape[:-2], sum(line[0].shape[-2] for line in self.rows), sum(x.shape[-1] for x in first)

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def chunks(self) -> list[Any]:
        """The chunks, row by row."""
        return [chunk for line in self.rows for chunk in line]

    def joined(self) -> Any:
        """Return the block as one array, of the kind of the chunks. Copies several in CuPy's current stream."""
        first = self.rows[0][0]
        if len(self.rows) == len(self.rows[0]) == 1:
            return first
        if hasattr(first, "__cuda_array_interface__"):
            import cupy

            def along(axis: int, parts: list[Any]) -> Any:
                return parts[0] if len(parts) == 1 else cupy.concatenate(parts, axis)

            # as bytes if the type has a field: CuPy does not join such arrays
            rows = [[x.view(np.uint8) if x.dtype.names else x for x in line] for line in self.rows]
            return along(-2, [along(-1, line) for line in rows]).view(first.dtype)
        whole, top = block_memory.blocks.new(self.shape, first.dtype), 0
        for line in self.rows:
            height = line[0].shape[-2]
            np.concatenate(line, -1, out=whole[..., top : top + height, :])
            top += height
        return whole
