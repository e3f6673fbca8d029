"""Operands that are memory maps: workers map the file again, because a pickled `numpy.memmap` is a copy of the data."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from distmm.errors import InputError


def is_mapped(source: Any) -> bool:
    """Whether `source` is a memory map of a whole array whose file other processes can map.

    A copy-on-write map (mode "c") may have changes that the file lacks, and a file without a name can be opened by this
    process only. The result is False for both, and such maps are treated as arrays in memory.
    """
    whole = isinstance(source, np.memmap) and isinstance(source.base, mmap.mmap) and source.filename is not None
    return whole and source.mode != "c" and _has_its_name(source)


def _has_its_name(source: np.memmap) -> bool:
    """Whether the mapped file still has its name."""
    assert source.filename is not None
    address = source.ctypes.data
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, _, _, _, *names = line.rstrip("\n").split(maxsplit=5)
            low, high = (int(end, 16) for end in span.split("-"))
            if low <= address < high and names:
                both = names[0], source.filename
                return all(map(os.path.exists, both)) and os.path.samefile(*both)  # of a deleted file, none is there
    return True


@dataclass(frozen=True)
class MappedFile:
    """A file that workers map to read blocks, after a check that it is still the file of the call.

    Attributes
    ----------
    filename, offset, shape, dtype, order
        As of `numpy.memmap`.
    identity : tuple of int
        Inode, bytes and time of the last change of the file, at the call.
    """

    filename: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype
    order: Literal["C", "F"]
    identity: tuple[int, int, int]

    @classmethod
    def behind(cls, source: np.memmap) -> MappedFile:
        """Return the file behind a memory map for which `is_mapped` holds.

        Raises
        ------
        InputError
            If the file no longer exists.
        """
        assert source.filename is not None
        filename = os.path.abspath(source.filename)
        order: Literal["C", "F"] = "C" if source.flags.c_contiguous else "F"
        try:
            identity = _identity(os.stat(filename))
        except OSError as error:
            raise InputError(
                f"{filename}: {error.strerror}; the operand that was mapped from it is gone: restore "
                f"the file, or map another one"
            ) from error
        return cls(filename, source.offset, source.shape, source.dtype, order, identity)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read a block.

        Raises
        ------
        InputError
            If the file was replaced or removed.
        """
        try:
            with open(self.filename, "rb") as file:
                self._check(_identity(os.fstat(file.fileno())))
                whole = np.memmap(file, self.dtype, "r", self.offset, self.shape, self.order)
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{self.filename} cannot be mapped again, to read an operand: {error}; all workers "
                f"must be able to read it"
            ) from error
        return np.array(whole[index], order="K", subok=False)

    def _check(self, now: tuple[int, int, int]) -> None:
        # A file that was changed in place has the same inode, and is still the operand. A copy on another machine has
        # another inode, but the same size and time of change.
        if now[0] != self.identity[0] and now[1:] != self.identity[1:]:
            raise InputError(
                f"{self.filename} is another file than at the call (inode {self.identity[0]}, {self.identity[1]} "
                f"bytes; now {now[0]}, {now[1]} bytes): it was replaced before the product was computed; map it again, "
                "with numpy.load or numpy.memmap, and call again. Copies on other machines need the same time of "
                "change (cp --preserve=timestamps)"
            )


def _identity(facts: os.stat_result) -> tuple[int, int, int]:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
