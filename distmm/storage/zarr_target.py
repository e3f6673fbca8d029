"""Zarr arrays that are written to a folder: chunks are C's blocks, and appear when they are complete."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import zarr

from distmm.storage.durability import fsync, published
from distmm.storage.flat import write_rows
from distmm.storage.output import Block, Output, Region, TargetArray
from distmm.storage.zarr_folder import ZarrMatrix


def create_raw(
    store: Any, shape: tuple[int, int], dtype: np.dtype[Any], chunks: tuple[int, int], attributes: dict[str, Any] | None
) -> None:
    """Write the metadata of an array for a product.

    Its chunks are not compressed. The mantissas of a product are incompressible, and raw chunks are written at the
    speed of the disk.
    """
    zarr.create_array(store, shape=shape, chunks=chunks, dtype=dtype, attributes=attributes, compressors=None)


@dataclass(frozen=True)
class ZarrTarget(TargetArray):
    """A Zarr array (version 3) whose chunks are C's blocks, so that each chunk has one writer.

    Attributes
    ----------
    chunks : tuple of int
    drafts : str or None
        Folder for incomplete chunks, on the same file system. None: the parent folder of the array.
    """

    chunks: tuple[int, ...]
    drafts: str | None = None

    @classmethod
    def create(
        cls, output: Output, shape: tuple[int, int], dtype: np.dtype[Any], chunks: tuple[int, ...], job: str | None
    ) -> Self:
        """Write the metadata. `chunks` is in elements.

        The id of a job becomes an attribute. Metadata and fingerprint then differ from those of any earlier C.
        """
        chunks = max(1, min(chunks[0], shape[0])), max(1, min(chunks[1], shape[1]))
        create_raw(output.draft, shape, dtype, chunks, None if job is None else {"distmm_job": job})
        target = cls(output, shape, dtype, chunks)
        target._make_folders()
        return target

    @classmethod
    def reopen(cls, output: Output) -> Self:
        """Open a draft that `create` has made, to continue writing."""
        stored = ZarrMatrix.open(output.draft)
        assert stored.chunks is not None
        return cls(output, stored.shape, stored.dtype, stored.chunks)

    def _write(self, blocks: Sequence[Block]) -> None:
        # An uncompressed chunk has its elements in C order. A chunk at the edge also has the full shape. Zarr itself
        # would copy the block, and would not write a chunk of zeros, which would then look like a lost chunk.
        height, width = self.chunks
        paths = [self._file(rows, cols) for rows, cols, _ in blocks]
        with published(paths, self.drafts or os.path.dirname(self.output.draft)) as files:
            for file, (_, _, block) in zip(files, blocks, strict=True):
                if block.shape != (height, width):
                    os.ftruncate(file.fileno(), height * width * self.dtype.itemsize)
                write_rows(file, 0, width, 0, 0, block.astype(self.dtype.newbyteorder("<"), copy=False))

    def _file(self, rows: slice, cols: slice) -> str:
        """Return the path of the chunk of a block."""
        whole = range(rows.start, rows.stop), range(cols.start, cols.stop)
        if any(
            at.start % edge or (len(at) < edge and at.stop != n) or len(at) > edge
            for at, edge, n in zip(whole, self.chunks, self.shape, strict=True)
        ):
            height, width = self.chunks
            raise IndexError(f"{self.output.path}: [{rows}, {cols}] is not one of its chunks, {height} x {width}")
        row, column = rows.start // self.chunks[0], cols.start // self.chunks[1]
        return os.path.join(self.output.draft, "c", str(row), str(column))

    def sync(self, regions: Collection[Region]) -> None:
        """Return when the names of written chunks are on the disk. Their elements and their folders already are."""
        folders = {
            os.path.dirname(self._file(rows, cols))
            for rows, cols in regions
            if rows.start < rows.stop and cols.start < cols.stop
        }
        for folder in sorted(folders):
            fsync(folder)

    def _make_folders(self) -> None:
        """Create the folders of the chunks, and sync their names.

        Workers create none: they would have to sync the folders above for each chunk.
        """
        chunks = os.path.join(self.output.draft, "c")
        folders = (os.path.join(chunks, str(i)) for i in range(-(-self.shape[0] // self.chunks[0])))
        for folder in (chunks, *folders):  # not the draft: if its mount is lost, C must not be written below it
            with suppress(FileExistsError):
                os.mkdir(folder)
        fsync(chunks)
        fsync(self.output.draft)

    def discard(self, rows: slice, cols: slice) -> None:
        """Remove the chunk of a block."""
        with suppress(FileNotFoundError):
            os.unlink(self._file(rows, cols))

    def keep_only(self, done: Collection[tuple[int, int]]) -> None:
        """Remove chunks that are not `done`, and create the folders that are missing."""
        chunks = os.path.join(self.output.draft, "c")
        self._make_folders()
        kept = {os.path.join(chunks, str(i), str(j)) for i, j in done}
        for folder, _, names in os.walk(chunks):
            for path in {os.path.join(folder, name) for name in names} - kept:
                os.unlink(path)

    def description(self) -> dict[str, Any]:
        """Describe the array by the hash of its metadata."""
        with open(os.path.join(self.output.draft, "zarr.json"), "rb") as file:
            metadata = hashlib.sha256(file.read()).hexdigest()
        facts = {"shape": list(self.shape), "dtype": self.dtype.name, "chunks": list(self.chunks)}
        return {**facts, "metadata": metadata}

    def missing(self, markers: Mapping[tuple[int, int], Any] | None = None) -> list[tuple[int, int]]:
        """Return the chunks whose file is missing or has a wrong size."""
        need, missing = self.chunks[0] * self.chunks[1] * self.dtype.itemsize, []
        rows, columns = (range(-(-side // edge)) for side, edge in zip(self.shape, self.chunks, strict=True))
        for i in rows:
            found = {}
            with suppress(FileNotFoundError), os.scandir(os.path.join(self.output.draft, "c", str(i))) as entries:
                found = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
            missing += [(i, j) for j in columns if found.get(str(j)) != need]
        return missing
