"""Matrices that are plain bytes at an offset of a file: raw binary, ``.npy``, and contiguous HDF5 datasets.

Many processes write to one such file. Each writes its own blocks, so that no two processes write the same byte.

A part of a file cannot be renamed. So a process that writes a block locks the block's first byte, and then checks that
the file still has its name. The lock belongs to the open file. The system releases it when the process dies, and keeps
it while the process is suspended. If a file is still locked after `ENDING_SECONDS`, a job that takes it over continues
with a copy.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmm import units
from distmm.errors import InputError
from distmm.storage.durability import fsync, write_all
from distmm.storage.matrix import FileMatrix, check_dtype, stripes
from distmm.storage.output import TargetArray
from distmm.storage.regular_files import check_regular
from distmm.transfer import block_memory

# Seconds to wait for a block that another process is writing.
ENDING_SECONDS = 60.0
PAUSE_SECONDS = 0.1

# Error codes of file systems without locks of byte ranges.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

# Buffers that one system call fills (IOV_MAX of Linux and macOS).
MOST_BUFFERS = 1024

EXAMPLE = "A.bin:1000x500:float32, with :F at the end for Fortran order"


@dataclass(frozen=True)
class FlatMatrix(FileMatrix):
    """Elements at an offset of a file.

    Attributes
    ----------
    file : str
    offset : int
        First byte of the elements.
    stored : numpy.dtype
        Type of the elements, in the byte order of the file.
    """

    offset: int = field(kw_only=True)
    stored: np.dtype[Any] = field(kw_only=True)

    def pieces(self, rows: slice, cols: slice, most: int) -> list[tuple[slice, slice]] | None:
        """Cut a region into ranges of rows, if the file is in C order and in native byte order."""
        plain = not self.columns_first and self.stored == self.dtype
        return stripes(rows, cols, self.dtype.itemsize, most) if plain else None

    def _read(self, *region: slice) -> NDArray[Any]:
        rows, cols = region
        if self.columns_first:
            return self._lines(cols, rows, self.shape[0]).T.astype(self.dtype, copy=False)
        return self._lines(rows, cols, self.shape[1]).astype(self.dtype, copy=False)

    def _fill(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        with self._opened() as file:
            read_into(file, self.offset, self.shape[1], rows.start, cols.start, block)

    def _lines(self, lines: slice, inside: slice, width: int) -> NDArray[Any]:
        """Read parts of the file's lines, which have `width` elements.

        It uses reads, and not a memory map. For an unreadable page, a read raises OSError, while a map causes a SIGBUS,
        which kills the worker.
        """
        numbers = range(lines.start, lines.stop, lines.step)
        block = block_memory.blocks.new((len(numbers), inside.stop - inside.start), self.stored)
        with self._opened() as file:
            if numbers.step == 1:
                read_into(file, self.offset, width, numbers.start, inside.start, block)
            else:
                for i, number in enumerate(numbers):
                    read_into(file, self.offset, width, number, inside.start, block[i : i + 1])
        return block if inside.step == 1 else block[:, :: inside.step].copy()

    def _opened(self) -> FileIO:
        check_regular(self.file)
        return open(self.file, "rb", buffering=0)


def open_raw(file: str, description: str) -> FlatMatrix:
    """Open a file without a header, and check that its length is that of its description.

    Parameters
    ----------
    file : str
    description : str
        ``ROWSxCOLUMNS:TYPE``, followed by ``:F`` for Fortran order.

    Returns
    -------
    FlatMatrix
        Its path has the name of the file, the shape, the type and the order.

    Raises
    ------
    InputError
        For a wrong length, an unknown type, or a path that is not a regular file.
    """
    sides, name, *rest = description.split(":")
    path = f"{file}:{description}"
    rows, columns = map(int, sides.split("x"))
    try:
        stored = np.dtype(name)
        dtype = check_dtype(path, stored)
    except TypeError as error:
        raise InputError(f"{path}: {name!r} is not a type of elements; write it as {EXAMPLE}") from error
    try:
        check_regular(file)
    except OSError as error:
        raise InputError(f"{path}: {error}") from error
    need, have = rows * columns * dtype.itemsize, os.path.getsize(file)
    if need != have:
        raise InputError(
            f"{path}: {rows} x {columns} elements of {dtype} are {need} bytes, and the file has {have}; give its "
            f"shape and type as {EXAMPLE}"
        )
    first = rest == ["F"]
    return FlatMatrix(path, (rows, columns), dtype, None, file=file, offset=0, stored=stored, columns_first=first)


def read_into(file: FileIO, offset: int, width: int, row: int, column: int, block: NDArray[Any]) -> None:
    """Fill a block from a matrix in C order in a file.

    Parameters
    ----------
    file : FileIO
    offset : int
        First byte of the matrix in the file.
    width : int
        Columns of the matrix.
    row, column : int
        First row and column of the block in the matrix.
    block : array
        Its rows are contiguous. If its rows are adjacent in the file but not in memory, one system call reads a
        thousand rows.
    """
    start, line = offset + (row * width + column) * block.itemsize, width * block.itemsize
    if block.shape[1] < width:
        for i, one in enumerate(block.view(np.uint8)):
            _scatter(file, start + i * line, [one])
    elif block.flags.c_contiguous:
        _scatter(file, start, [block.reshape(-1).view(np.uint8)])
    else:
        _scatter(file, start, list(block.view(np.uint8)))


def _scatter(file: FileIO, start: int, lines: list[Any]) -> None:
    """Fill the lines one after another with the bytes of a file from `start` on."""
    first = 0
    while first < len(lines):
        count = os.preadv(file.fileno(), lines[first : first + MOST_BUFFERS], start)
        if not count:
            raise EOFError(f"the file ends at byte {start}")
        start += count
        while first < len(lines) and count >= lines[first].nbytes:
            count -= lines[first].nbytes
            first += 1
        if count:  # a call may read fewer bytes than requested
            lines[first] = lines[first][count:]


def write_rows(file: FileIO, offset: int, width: int, row: int, column: int, block: NDArray[Any]) -> None:
    """Write a block into a matrix in C order in a file. The parameters are those of `read_into`.

    It uses writes, and not a memory map, so that a full disk raises OSError.
    """
    block = np.ascontiguousarray(block)
    for i, line in enumerate([block] if block.shape[1] == width else block):
        write_all(file, line.reshape(-1).view(np.uint8), offset + ((row + i) * width + column) * block.itemsize)


@dataclass(frozen=True)
class FlatTarget(TargetArray):
    """A matrix in C order, which begins at byte `offset` of the draft."""

    offset: int

    @contextmanager
    def writing(self, rows: slice, cols: slice) -> Iterator[None]:
        """Lock a block against other processes until it is written and has its marker."""
        with open(self.output.draft, "r+b", buffering=0) as file:
            first = self.offset + (rows.start * self.shape[1] + cols.start) * self.dtype.itemsize
            if not _locks(file, first, 1):
                raise InputError(
                    f"{self.output.draft}: the block at row {rows.start} and column {cols.start} is still locked, "
                    f"after {ENDING_SECONDS:.0f} s, by a worker that the scheduler has lost; end that process, and "
                    f"resume the job"
                )
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(self.output.draft)):
                raise FileNotFoundError(errno.ENOENT, "the draft was replaced", self.output.draft)
            yield

    def detach(self) -> None:
        """Continue with a copy of the file if a process of an earlier run still has a block locked."""
        with open(self.output.draft, "r+b", buffering=0) as file:
            if _locks(file, 0, 0):
                return
        copy, need = f"{self.output.draft}.copy", units.size(os.path.getsize(self.output.draft))
        try:
            shutil.copyfile(self.output.draft, copy)
            fsync(copy)
            os.replace(copy, self.output.draft)
        except OSError as error:
            with suppress(FileNotFoundError):
                os.unlink(copy)
            if error.errno != errno.ENOSPC:
                raise
            raise InputError(
                f"{self.output.draft}: a process of an earlier run still has a block of this file locked, and there "
                f"is no space for a copy to continue with: end that process, or free {need}"
            ) from error
        fsync(os.path.dirname(self.output.draft))

    def _write(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        with open(self.output.draft, "r+b", buffering=0) as file:
            write_rows(file, self.offset, self.shape[1], rows.start, cols.start, block)

    def description(self) -> dict[str, Any]:
        """Describe the file by its size, and by the hash of its header."""
        with open(self.output.draft, "rb") as file:
            head = hashlib.sha256(file.read(self.offset)).hexdigest()
        facts = {"shape": list(self.shape), "dtype": self.dtype.name, "offset": self.offset}
        return {**facts, "bytes": os.path.getsize(self.output.draft), "head": head}

    def sync(self, rows: slice, cols: slice) -> None:
        """Return when all written data are on the disk."""
        fsync(self.output.draft)


def _locks(file: FileIO, first: int, length: int) -> bool:
    """Lock `length` bytes of a file (0: all) until it is closed. Return False if another process keeps its lock."""
    wanted = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, first, length, 0)
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, wanted)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return True
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_SECONDS)
        else:
            return True
