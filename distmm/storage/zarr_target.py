"""Zarr arrays that are written by whole chunks, and those in a folder, whose chunks appear when they are complete."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from abc import abstractmethod
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import zarr
from numpy.typing import NDArray

from distmm.storage import stamps
from distmm.storage.durability import fsync, published
from distmm.storage.flat import write_rows
from distmm.storage.output import Output, Region, TargetArray, Written
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
class ChunkedTarget(TargetArray):
    """A Zarr array (version 3). A block is one chunk of it, or several, so that each chunk has one writer.

    Attributes
    ----------
    chunks : tuple of int
        Shape of a chunk.
    """

    chunks: tuple[int, ...]

    @classmethod
    def reopen(cls, output: Output) -> Self:
        """Open a draft that `create` has made, to continue writing."""
        stored = ZarrMatrix.open(output.draft)
        return cls(output, stored.shape, stored.dtype, stored.chunks)

    def chunks_of(self, rows: slice, cols: slice) -> dict[str, Region]:
        """Return the name of each chunk of a block, and the part of the block that the chunk has."""
        parts = []
        for at, edge, side in zip((rows, cols), self.chunks, self.shape, strict=True):
            if at.start % edge or (at.stop % edge and at.stop != side):
                raise IndexError(f"{self.output.path}: [{rows}, {cols}] is not made of whole chunks, {self.chunks}")
            starts = range(at.start, at.stop, edge)
            parts.append([(n // edge, slice(n - at.start, min(n + edge, at.stop) - at.start)) for n in starts])
        return {f"c/{i}/{j}": (down, across) for (i, down), (j, across) in itertools.product(*parts)}

    def files(self, rows: slice, cols: slice) -> int:
        """Return the number of the block's chunks."""
        return len(self.chunks_of(rows, cols))

    def missing(self, written: Written) -> dict[tuple[int, int], str]:
        """Return the blocks with a chunk that is missing, has a wrong size, or a tag that differs from its marker."""
        need, there, lost = math.prod(self.chunks) * self.dtype.itemsize, self._there(), {}
        for unit, (region, marker) in written.items():
            names = self.chunks_of(*region)
            tags = marker.get("objects", [None] * len(names))
            bad = [name for name, tag in zip(names, tags, strict=False) if there.get(name) != (need, tag)]
            if bad or len(tags) != len(names):
                lost[unit] = next(iter(bad or names), "")
        return lost

    @abstractmethod
    def _there(self) -> dict[str, tuple[int, str | None]]:
        """Return size and tag of all chunks that exist, by name. A disk has no tags."""


@dataclass(frozen=True)
class ZarrTarget(ChunkedTarget):
    """A Zarr array in a folder.

    Attributes
    ----------
    drafts : str or None
        Folder for incomplete chunks, on the same file system. None: the parent folder of the array.
    """

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

    def _write(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        # An uncompressed chunk has its elements in C order. A chunk at the edge also has the full shape. Zarr itself
        # would copy the block, and would not write a chunk of zeros, which would then look like a lost chunk.
        height, width = self.chunks
        parts = {os.path.join(self.output.draft, name): block[at] for name, at in self.chunks_of(rows, cols).items()}
        with published(list(parts), self.drafts or os.path.dirname(self.output.draft)) as files:
            for file, part in zip(files, parts.values(), strict=True):
                if part.shape != (height, width):
                    os.ftruncate(file.fileno(), height * width * self.dtype.itemsize)
                write_rows(file, 0, width, 0, 0, part.astype(self.dtype.newbyteorder("<"), copy=False))

    def sync(self, rows: slice, cols: slice) -> None:
        """Return when the names of a block's chunks are on the disk. Their elements and their folders already are."""
        for folder in sorted({os.path.dirname(name) for name in self.chunks_of(rows, cols)}):
            fsync(os.path.join(self.output.draft, folder))

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
        """Remove the chunks of a block."""
        for name in self.chunks_of(rows, cols):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.output.draft, name))

    def keep_only(self, done: Collection[Region]) -> None:
        """Remove chunks that are not `done`, and create the folders that are missing."""
        self._make_folders()
        kept = {os.path.join(self.output.draft, name) for region in done for name in self.chunks_of(*region)}
        for folder, _, names in os.walk(os.path.join(self.output.draft, "c")):
            for path in {os.path.join(folder, name) for name in names} - kept:
                os.unlink(path)

    def description(self) -> dict[str, Any]:
        """Describe the array by the hash of its metadata."""
        with open(os.path.join(self.output.draft, "zarr.json"), "rb") as file:
            metadata = hashlib.sha256(file.read()).hexdigest()
        facts = {"shape": list(self.shape), "dtype": self.dtype.name, "chunks": list(self.chunks)}
        return {**facts, "metadata": metadata}

    def _there(self) -> dict[str, tuple[int, str | None]]:
        found: dict[str, tuple[int, str | None]] = {}
        with suppress(FileNotFoundError):  # the folder of all chunks was removed
            for name, entry in stamps.entries(os.path.join(self.output.draft, "c"), "c/"):
                found[name] = entry.stat(follow_symlinks=False).st_size, None
        return found
