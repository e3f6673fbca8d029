"""Matrices that are plain bytes at an offset of a file: raw binary, and what ``.npy`` and HDF5 files hold.

Many processes write to one such file. Each writes its own blocks, so that no two write the same byte.

Parts of a file have no names that could be changed. So whoever writes a block locks the block's first byte, and then
looks whether the file still has its name. The lock belongs to the open file: the system gives it up when the process
dies, and keeps it while the process is suspended. A job that takes over a file which is locked after `ENDING_SECONDS`
goes on with a copy.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import struct
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from typing import Any, BinaryIO, Literal, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from distmm.errors import InputError
from distmm.storage.durability import fsync
from distmm.storage.matrix import Matrix, check_dtype, modified, stamp_of, stripes
from distmm.storage.output import Target
from distmm.storage.regular_files import check_regular

__all__ = ["FlatMatrix", "FlatTarget", "RawMatrix", "read_into", "read_rows", "split", "write_rows"]

# Seconds that a block which another process is writing gets to be written.
ENDING_SECONDS = 60.0
PAUSE_SECONDS = 0.1

# What file systems without locks of byte ranges say.
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

# Buffers that one system call fills (IOV_MAX of Linux and macOS).
MOST_BUFFERS = 1024

EXAMPLE = "A.bin:1000x500:float32, with :F at the end for columns first"


def split(path: str) -> tuple[str, str] | None:
    """Split ``file:ROWSxCOLUMNS:TYPE[:F]`` into file and description; None for any other path."""
    found = re.fullmatch(r"(.+?):(\d+x\d+:[^:]*(?::[CF])?)", path)
    return None if found is None else (found[1], found[2])


class FlatMatrix(Matrix):
    """Elements at an offset of a file, in C or Fortran order."""

    @abstractmethod
    def _stored(self) -> np.memmap[Any, Any]:
        """Map the file."""

    @property
    def columns_first(self) -> bool:
        """Whether the file is in Fortran order."""
        return not self._stored().flags.c_contiguous

    def pieces(self, rows: slice, cols: slice, most: int) -> list[tuple[slice, slice]] | None:
        """Cut a region into ranges of rows, if these are contiguous in the file."""
        stored = self._stored()
        plain = stored.flags.c_contiguous and stored.dtype == self.dtype
        return stripes(rows, cols, self.dtype.itemsize, most) if plain else None

    def _read(self, rows: slice, cols: slice) -> NDArray[Any]:
        return read_rows(self._stored(), rows, cols).astype(self.dtype, copy=False)

    def _fill(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        stored = self._stored()
        assert stored.filename is not None
        with open(stored.filename, "rb", buffering=0) as file:
            read_into(file, stored.offset, stored.shape[1], rows.start, cols.start, block)


@dataclass(frozen=True)
class RawMatrix(FlatMatrix):
    """A file of nothing but elements; ``path`` names the file, the shape, the type and the order."""

    file: str = field(kw_only=True)
    order: Literal["C", "F"] = field(kw_only=True)

    @classmethod
    def open(cls, file: str, description: str) -> Self:
        """Check that the file is as long as its description says."""
        sides, name, *rest = description.split(":")
        path = f"{file}:{description}"
        rows, columns = map(int, sides.split("x"))
        try:
            dtype = check_dtype(path, ml_dtypes.bfloat16 if name == "bfloat16" else name)
        except TypeError as error:
            raise InputError(f"{path}: {name!r} is no type of elements; write it as {EXAMPLE}") from error
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
        return cls(path, (rows, columns), dtype, None, file=file, order="F" if rest == ["F"] else "C")

    def fingerprint(self) -> dict[str, Any]:
        """Return size and time of the file too."""
        return {**super().fingerprint(), **modified(self.file)}

    def stamp(self) -> str:
        """Hash what the file system says of the file."""
        return stamp_of([(self.file, os.stat(self.file))])

    def _stored(self) -> np.memmap[Any, Any]:
        check_regular(self.file)
        return np.memmap(self.file, self.dtype, "r", 0, self.shape, self.order)


def read_rows(stored: np.memmap[Any, Any], rows: slice, cols: slice) -> NDArray[Any]:
    """Read a block of a mapped file, in the order of the file.

    It uses plain reads, not the memory map: an unreadable page is an OSError here, and would be a SIGBUS there, which
    kills the worker.
    """
    if not stored.flags.c_contiguous:
        return read_rows(stored.T, cols, rows).T
    lines = range(rows.start, rows.stop, rows.step)
    block = np.empty((len(lines), cols.stop - cols.start), stored.dtype)
    assert stored.filename is not None
    with open(stored.filename, "rb", buffering=0) as file:
        if lines.step == 1:
            read_into(file, stored.offset, stored.shape[1], lines.start, cols.start, block)
        else:
            for i, row in enumerate(lines):
                read_into(file, stored.offset, stored.shape[1], row, cols.start, block[i : i + 1])
    return block if cols.step == 1 else block[:, :: cols.step].copy()


def read_into(file: FileIO, offset: int, width: int, row: int, column: int, block: NDArray[Any]) -> None:
    """Fill a block, whose rows are contiguous, from a matrix of `width` columns in C order at byte `offset` of a file.

    Rows that are adjacent in the file but not in memory are read with one system call for a thousand rows.
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
    """Fill one line after another with the bytes of a file from `start` on."""
    first = 0
    while first < len(lines):
        count = os.preadv(file.fileno(), lines[first : first + MOST_BUFFERS], start)
        if not count:
            raise EOFError(f"the file ends at byte {start}")
        start += count
        while first < len(lines) and count >= lines[first].nbytes:
            count -= lines[first].nbytes
            first += 1
        if count:  # a call may read less than it was asked for
            lines[first] = lines[first][count:]


def write_rows(file: BinaryIO, offset: int, width: int, row: int, column: int, block: NDArray[Any]) -> None:
    """Write a block into a matrix of `width` columns, in C order, that begins at byte `offset` of a file.

    It uses plain writes, not a memory map, so that a full disk is an OSError.
    """
    block = np.ascontiguousarray(block)
    for i, line in enumerate([block] if block.shape[1] == width else block):
        file.seek(offset + ((row + i) * width + column) * block.itemsize)
        file.write(line.reshape(-1).view(np.uint8).data)


@dataclass(frozen=True)
class FlatTarget(Target):
    """A matrix in C order from byte `offset` on of the draft."""

    offset: int

    @contextmanager
    def writing(self, rows: slice, cols: slice) -> Iterator[None]:
        """Keep a block from all others, until it is written and has its marker."""
        first = self.offset + (rows.start * self.shape[1] + cols.start) * self.dtype.itemsize
        with open(self.output.draft, "r+b", buffering=0) as file:
            if not _locks(file, first, 1):
                raise InputError(
                    f"{self.output.draft}: the block at rows {rows.start} and columns {cols.start} is being written by "
                    f"a worker that was held to be lost, and has stopped in the middle of it"
                )
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(self.output.draft)):
                raise FileNotFoundError(errno.ENOENT, "the draft was replaced", self.output.draft)
            yield

    def detach(self) -> None:
        """Go on with a copy, if a process that has not ended is in the middle of writing a block."""
        with open(self.output.draft, "r+b", buffering=0) as file:
            if _locks(file, 0, 0):
                return
        copy = f"{self.output.draft}.copy"
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
                f"{self.output.draft}: a process of an earlier run has stopped in the middle of writing a block, and "
                f"there is no room for a copy to go on with: end that process, or free {self.nbytes / 1e9:.3g} GB"
            ) from error
        fsync(os.path.dirname(self.output.draft))

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def _write(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        with open(self.output.draft, "r+b") as file:
            write_rows(file, self.offset, self.shape[1], rows.start, cols.start, block)

    def description(self) -> dict[str, Any]:
        """Describe the file by its size, and by the hash of what stands before the elements."""
        with open(self.output.draft, "rb") as file:
            head = hashlib.sha256(file.read(self.offset)).hexdigest()
        facts = {"shape": list(self.shape), "dtype": self.dtype.name, "offset": self.offset}
        return {**facts, "bytes": os.path.getsize(self.output.draft), "head": head}

    def sync(self, rows: slice, cols: slice) -> None:
        """Return once what was written is on the disk."""
        fsync(self.output.draft)


def _locks(file: FileIO, first: int, length: int) -> bool:
    """Lock some bytes of a file until it is closed, all for a `length` of 0; False if another one does not let go."""
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
