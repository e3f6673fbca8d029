"""A reduced product on the disk: files of finished block rows, and the Zarr group into which they are joined.

A *block row* is the reduction of one row of blocks. A worker writes each of its arrays to a separate file, such as
``ID/rows/3.values``, without a header. The marker of the block row has the number of lines and a CRC-32C for each
array. When all block rows are finished, their arrays are concatenated in the order of rows into a Zarr group.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from distmm.checking.checksum import checksum
from distmm.errors import InputError
from distmm.job.folder import Folder, Json
from distmm.job.json_forms import ROW, wrong
from distmm.job.reduction import Arrays, Reduction
from distmm.storage import fsync
from distmm.storage.durability import fsync_tree, published, remove

__all__ = ["InDraft", "InResult", "RowFolder", "assemble", "sum_of", "whole_chunks"]

# Bytes of a chunk of the result: large enough for the full rate of a disk, small enough to read some rows.
CHUNK = 16 << 20


def sum_of(sums: dict[str, int]) -> int:
    """Return one checksum for the checksums of a block row's arrays."""
    return checksum(np.array(list(sums.values()), "<u4"))


@dataclass(frozen=True)
class RowFolder:
    """The folder that workers write block rows to. It has the role of a `Target` in jobs that reduce C.

    Attributes
    ----------
    path : str
    reduction : Reduction
    dtype : numpy.dtype
        Type of the product.
    """

    path: str
    reduction: Reduction
    dtype: np.dtype[Any]

    @property
    def arrays(self) -> Arrays:
        """Type, and shape of one line, of each array, by name."""
        return self.reduction.arrays(self.dtype)

    def file(self, i: int, name: str) -> str:
        """Return the path of one array of a block row."""
        return os.path.join(self.path, f"{i}.{name}")

    def write(self, i: int, arrays: dict[str, np.ndarray]) -> dict[str, int]:
        """Write a block row, sync it, and return the checksums of its arrays."""
        for name, values in arrays.items():
            with published(self.file(i, name), self.path) as file:
                _write_all(file, values)
        fsync(self.path)
        return {name: checksum(values) for name, values in arrays.items()}

    def read(self, marker: Json, name: str) -> np.ndarray:
        """Read one array of a block row.

        Raises
        ------
        InputError
            If it is missing, or is not as it was written.
        """
        dtype, shape = self.arrays[name]
        path = self.file(marker["i"], name)
        try:
            values = np.fromfile(path, dtype.newbyteorder("<"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error}") from error
        if values.size != marker["count"] * int(np.prod(shape)) or checksum(values) != marker["sums"].get(name):
            raise InputError(f"{path}: is not what was written; call again to compute its block row again")
        return values.reshape(-1, *shape)

    def description(self) -> Json:
        """Describe the folder, as JSON, by facts that do not change while block rows are written."""
        return {"arrays": {name: [dtype.str, *shape] for name, (dtype, shape) in self.arrays.items()}}

    def missing(self, markers: Mapping[tuple[int, int], Any] | None = None) -> list[tuple[int, int]]:
        """Return no chunks: missing block rows are found when they are read."""
        return []

    def detach(self) -> None:
        """Do nothing: an incomplete block row has no name."""

    def make_room(self, done: Collection[tuple[int, int]]) -> None:
        """Remove drafts, and all block rows except those in `done`."""
        kept = {f"{i}.{name}" for i, _ in done for name in self.arrays}
        for name in set(os.listdir(self.path)) - kept:
            os.unlink(os.path.join(self.path, name))


def _write_all(file: Any, values: np.ndarray) -> None:
    """Write an array. A single call may write fewer bytes than requested."""
    left = memoryview(values.reshape(-1).view(np.uint8).data)
    while left:
        left = left[file.write(left) :]


@dataclass(frozen=True)
class InDraft:
    """Compares block rows of an unfinished job with their markers. Runs on workers."""

    rows: RowFolder

    def __call__(self, marker: Json) -> str | None:
        """Return what is wrong with one block row. None if it is as it was written."""
        try:
            if (bad := next(wrong(marker, ROW), None)) is not None:
                return f"its marker is damaged: {bad}"
            for name in self.rows.arrays:
                self.rows.read(marker, name)
        except InputError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class InResult:
    """Compares the block rows of a finished result with the markers in its certificate. Runs on workers.

    Attributes
    ----------
    path : str
    offsets : dict
        First line of each block row in the result.
    total : int
        Number of lines of all block rows.
    """

    path: str
    offsets: dict[int, int]
    total: int

    @classmethod
    def of(cls, path: str, content: Json) -> InResult:
        """Return the comparison for the result at `path`. `content` has the certificate's markers.

        Raises
        ------
        InputError
            If a marker is damaged.
        """
        markers = sorted(content["done"], key=lambda marker: marker["i"])
        bad = next(wrong(markers, [ROW], "done."), None)
        if bad is not None:
            raise InputError(f"the certificate of {path} is damaged, or of another version: {bad}")
        ends = np.cumsum([marker["count"] for marker in markers]).tolist()
        offsets = {marker["i"]: end - marker["count"] for marker, end in zip(markers, ends, strict=True)}
        return cls(path, offsets, ends[-1])

    def lines(self, marker: Json, name: str) -> np.ndarray:
        """Read one array of a block row.

        Raises
        ------
        InputError
            If it cannot be read, or the array has another number of lines than all block rows.
        """
        first = self.offsets[marker["i"]]
        try:
            array: Any = zarr.open_group(self.path, mode="r")[name]
            if array.shape[0] != self.total:
                raise InputError(f"{self.path}/{name}: has {array.shape[0]} lines, not {self.total}")
            return np.asarray(array[first : first + marker["count"]])
        except InputError:
            raise
        except Exception as error:  # Zarr raises a dozen types of errors for damaged metadata
            raise InputError(f"{self.path}/{name}: cannot be read: {type(error).__name__}: {error}") from error

    def __call__(self, marker: Json) -> str | None:
        """Return what is wrong with one block row. None if it is as it was written."""
        for name, expected in marker["sums"].items():
            try:
                found = checksum(self.lines(marker, name))
            except InputError as error:
                return str(error)
            if found != expected:
                return f"the checksum of its {name} is {found:08x}, and was {expected:08x} when it was written"
        return None


def assemble(folder: Folder, rows: RowFolder, markers: list[Json], facts: Json) -> None:
    """Join all block rows to the result, under its draft name, and sync it.

    Parameters
    ----------
    folder : Folder
    rows : RowFolder
    markers : list of dict
        The markers of all block rows.
    facts : dict
        Value of the group's attribute ``distmm``.

    Raises
    ------
    InputError
        If a block row is not as it was written.
    """
    if os.path.lexists(folder.draft):  # a leftover of a run that ended in this function
        remove(folder.draft)
    markers = sorted(markers, key=lambda marker: marker["i"])
    total = sum(marker["count"] for marker in markers)
    group = zarr.create_group(folder.draft, attributes={"distmm": facts})
    for name, (dtype, shape) in rows.arrays.items():
        lines = max(1, min(total, CHUNK // (dtype.itemsize * max(1, int(np.prod(shape))))))
        array = group.create_array(
            name,
            shape=(total, *shape),
            chunks=(lines, *shape),
            dtype=dtype,
            compressors=None,
            config={"write_empty_chunks": True},  # else Zarr omits chunks of zeros, which would look like lost ones
        )
        first = 0
        for part in whole_chunks((rows.read(marker, name) for marker in markers), lines):
            array[first : first + len(part)] = part
            first += len(part)
    fsync_tree(folder.draft)
    fsync(folder.work)


def whole_chunks(pieces: Iterator[np.ndarray], lines: int) -> Iterator[np.ndarray]:
    """Join arrays so that the length of each but the last is a multiple of `lines`. No chunk is then written twice."""
    waiting: list[np.ndarray] = []
    for piece in pieces:
        waiting.append(piece)
        length = sum(map(len, waiting))
        if length >= lines:
            whole, full = np.concatenate(waiting), length - length % lines
            yield whole[:full]
            waiting = [whole[full:]]
    if waiting and sum(map(len, waiting)):
        yield np.concatenate(waiting)
