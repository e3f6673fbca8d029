"""``.npy`` files: read through a memory map, written block by block at their place in the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from distmm.errors import InputError
from distmm.storage.matrix import Matrix, check_dtype, check_shape
from distmm.storage.output import Output, Target

__all__ = ["NpyMatrix", "NpyTarget"]


@dataclass(frozen=True)
class NpyMatrix(Matrix):
    """A ``.npy`` file, in C or Fortran order."""

    @classmethod
    def open(cls, path: str) -> Self:
        """Check the header, and that the file is as long as it says."""
        try:
            stored = _map(path)
        except (ValueError, OSError, EOFError) as error:
            raise InputError(
                f"{path}: not a readable .npy file: {error}; write it with numpy.save (no pickled objects), or copy it "
                f"again"
            ) from error
        return cls(path, check_shape(path, stored.shape), check_dtype(path, stored.dtype), None)

    def _read(self, rows: slice, cols: slice) -> NDArray[Any]:
        # A copy, in the order of the file: a view of the map would be read at some later time, by someone else.
        return np.array(_map(self.path)[rows, cols], dtype=self.dtype, order="K", subok=False)


def _map(path: str) -> NDArray[Any]:
    # Unlike numpy.load, this neither unpickles nor takes a zip for an archive of arrays.
    return np.lib.format.open_memmap(path, mode="r")


@dataclass(frozen=True)
class NpyTarget(Target):
    """A ``.npy`` file in C order that many processes fill, each its own blocks."""

    offset: int  # bytes of the header

    @classmethod
    def create(cls, output: Output, shape: tuple[int, int], dtype: np.dtype[Any]) -> Self:
        """Write the header and set the file's length; nothing else is written yet."""
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        with open(output.draft, "xb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            offset = file.tell()
            file.truncate(offset + shape[0] * shape[1] * dtype.itemsize)
        return cls(output, shape, dtype, offset)

    def _write(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        # Plain writes, not a map: a full disk is an OSError here, where a map would kill the worker by SIGBUS.
        block = np.ascontiguousarray(block, dtype=self.dtype)
        width = self.shape[1]
        lines = [block] if block.shape[1] == width else list(block)
        with open(self.output.draft, "r+b") as file:
            for i, line in enumerate(lines):
                file.seek(self.offset + ((rows.start + i) * width + cols.start) * self.dtype.itemsize)
                file.write(line.data)
