"""A reduced product on the disk: files of finished block rows, and the Zarr group that they become in the end.

A *block row* is what a reduction leaves of one row of blocks. A worker writes each of its arrays to a file of its own,
``ID/rows/3.values``, elements only. The marker of the block row has the number of its lines and a CRC-32C for each
array. When all block rows are there, their arrays are put one after another into a Zarr group, in the order of rows.
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

# Bytes of a chunk of the result: large enough for a disk's rate, small enough for a selection.
CHUNK = 16 << 20


def sum_of(sums: dict[str, int]) -> int:
    """One checksum for those of a block row's arrays."""
    return checksum(np.array(list(sums.values()), "<u4"))


@dataclass(frozen=True)
class RowFolder:
    """Where workers write block rows; stands in a job's writer where a product has its `Target`.

    Attributes
    ----------
    path : str
    reduction : Reduction
    dtype : numpy.dtype
        Of the product.
    """

    path: str
    reduction: Reduction
    dtype: np.dtype[Any]

    @property
    def arrays(self) -> Arrays:
        """Names of the arrays, with type and shape of one line."""
        return self.reduction.arrays(self.dtype)

    def file(self, i: int, name: str) -> str:
        """Path of one array of a block row."""
        return os.path.join(self.path, f"{i}.{name}")

    def write(self, i: int, arrays: dict[str, np.ndarray]) -> dict[str, int]:
        """Write a block row, bring it to the disk, and return the checksums of its arrays."""
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
            If it is not what was written.
        """
        dtype, shape = self.arrays[name]
        path = self.file(marker["i"], name)
        try:
            values = np.fromfile(path, dtype.newbyteorder("<"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error}") from error
        if values.size != marker["count"] * int(np.prod(shape)) or checksum(values) != marker["sums"].get(name):
            raise InputError(f"{path}: is not what was written; call again: its block row is made anew")
        return values.reshape(-1, *shape)

    def description(self) -> Json:
        """Describe, as JSON, what does not change while block rows are written."""
        return {"arrays": {name: [dtype.str, *shape] for name, (dtype, shape) in self.arrays.items()}}

    def missing(self, markers: Mapping[tuple[int, int], Any] | None = None) -> list[tuple[int, int]]:
        """Return no chunks: that block rows are there is seen when they are read."""
        return []

    def detach(self) -> None:
        """Do nothing: a block row that is not whole has no name."""

    def make_room(self, done: Collection[tuple[int, int]]) -> None:
        """Remove block rows that are not `done`, and drafts."""
        kept = {f"{i}.{name}" for i, _ in done for name in self.arrays}
        for name in set(os.listdir(self.path)) - kept:
            os.unlink(os.path.join(self.path, name))


def _write_all(file: Any, values: np.ndarray) -> None:
    left = memoryview(values.reshape(-1).view(np.uint8).data)
    while left:
        left = left[file.write(left) :]


@dataclass(frozen=True)
class InDraft:
    """Compares block rows of an unfinished job with their markers. Runs on workers."""

    rows: RowFolder

    def __call__(self, marker: Json) -> str | None:
        """Return what is wrong with one block row; None if nothing is."""
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
        Lines of all block rows.
    """

    path: str
    offsets: dict[int, int]
    total: int

    @classmethod
    def of(cls, path: str, content: Json) -> InResult:
        """Return the check of a result at `path` by its certificate."""
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
            If it cannot be read, or the array has other lines than the block rows.
        """
        first = self.offsets[marker["i"]]
        try:
            array: Any = zarr.open_group(self.path, mode="r")[name]
            if array.shape[0] != self.total:
                raise InputError(f"{self.path}/{name}: has {array.shape[0]} lines, not {self.total}")
            return np.asarray(array[first : first + marker["count"]])
        except InputError:
            raise
        except Exception as error:  # damaged metadata surface as any of a dozen kinds
            raise InputError(f"{self.path}/{name}: cannot be read: {type(error).__name__}: {error}") from error

    def __call__(self, marker: Json) -> str | None:
        """Return what is wrong with one block row; None if nothing is."""
        for name, expected in marker["sums"].items():
            try:
                found = checksum(self.lines(marker, name))
            except InputError as error:
                return str(error)
            if found != expected:
                return f"the checksum of its {name} is {found:08x}, and was {expected:08x} when it was written"
        return None


def assemble(folder: Folder, rows: RowFolder, markers: list[Json], facts: Json) -> None:
    """Make the result at its draft name from all block rows, and bring it to the disk.

    Parameters
    ----------
    folder : Folder
    rows : RowFolder
    markers : list of dict
        Of all block rows.
    facts : dict
        What the group's attribute ``distmm`` says.

    Raises
    ------
    InputError
        If a block row is not what was written.
    """
    if os.path.lexists(folder.draft):  # of a run that ended in the middle of this
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
            config={"write_empty_chunks": True},  # a chunk of zeros that is left out would look like a lost one
        )
        first = 0
        for part in whole_chunks((rows.read(marker, name) for marker in markers), lines):
            array[first : first + len(part)] = part
            first += len(part)
    fsync_tree(folder.draft)
    fsync(folder.work)


def whole_chunks(pieces: Iterator[np.ndarray], lines: int) -> Iterator[np.ndarray]:
    """Put arrays together so that each but the last is a multiple of `lines` long: no chunk is written twice."""
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
