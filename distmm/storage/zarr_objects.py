"""Zarr arrays that are written to an object store.

Objects cannot be renamed. So the chunks of C are put under their final names, ``C.zarr/c/0/0``. Until C is complete,
its metadata is stored in the job's folder, and readers find no array. Then it is put as ``C.zarr/zarr.json``. If C
replaces an older array, the ``zarr.json`` of that array is removed first, then its chunks, when the new job begins.

A put of a chunk fails if the chunk exists, so a process that was suspended replaces nothing. The marker of a block has
the tags of its chunks. Before the metadata is put, all chunks are listed and compared with these tags.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from distmm.errors import InputError
from distmm.storage.matrix import explained
from distmm.storage.object_store import ObjectFolder, tag_of
from distmm.storage.output import Block, Output, Region, TargetArray
from distmm.storage.overwriting import ZARR_NAME
from distmm.storage.zarr_folder import ZarrMatrix
from distmm.storage.zarr_target import create_raw

# Largest size of a chunk in bytes, if a block can be cut into equal stripes. A put copies its chunk. With `UPLOADS`
# puts at a time, the copies take half a gigabyte in each process. Above 100 MB s3fs makes a multipart upload, which has
# another tag.
CHUNK_BYTES = 64 << 20

# Concurrent puts of a process. One connection to S3 transfers about 100 MB/s.
UPLOADS = 8

# Equal stripes may be more than `CHUNK_BYTES` requires, by at most this factor. 16411 rows, a prime number, could only
# be cut into stripes of one row.
MOST_STRIPES = 4


APPEARED = (
    "{}: was created by another program while the product was computed, and is not replaced: move it away, and resume "
    "the job"
)


class ObjectOutput(Output):
    """The names of an array in an object store. `draft` has only its metadata, until the array is complete."""

    @classmethod
    def reserve(cls, path: str, nbytes: int, overwrite: bool, draft: str | None = None) -> Self:  # noqa: ARG003
        """Check that no object has this name, or that it may be replaced. The size of a store is not limited."""
        if not overwrite and (found := ObjectFolder(path).names()):
            raise InputError(
                f"{path}: exists ({found[0]} is there); give another name, or --overwrite (overwrite=True) to replace"
            )
        return cls(path, draft or f"{path}.draft", overwrite)

    def commit(self) -> str:
        """Put the metadata, which makes the chunks an array. It can be repeated after a kill."""
        metadata = ObjectFolder(self.draft).read("zarr.json")
        final = ObjectFolder(self.path)
        try:
            final.put("zarr.json", metadata, is_new=True)
        except FileExistsError:
            if final.read("zarr.json") != metadata:
                raise InputError(APPEARED.format(self.path)) from None
        return self.path

    def discard(self) -> None:
        """Remove the metadata."""
        ObjectFolder(self.draft).remove(["zarr.json"])


@dataclass(frozen=True)
class ObjectTarget(TargetArray):
    """A Zarr array (version 3) in an object store. A block of C is one chunk, or several stripes of rows.

    Attributes
    ----------
    chunks, blocks : tuple of int
        Shapes ``(rows, columns)`` of a chunk and of a block.
    """

    chunks: tuple[int, ...]
    blocks: tuple[int, int]

    @classmethod
    def create(
        cls, output: Output, shape: tuple[int, int], dtype: np.dtype[Any], blocks: tuple[int, ...], job: str | None
    ) -> Self:
        """Put the metadata under the name of the draft. `blocks` is the shape of a block of C, in elements."""
        height, width = (max(1, min(edge, side)) for edge, side in zip(blocks, shape, strict=True))
        chunks = _stripe(height, width * dtype.itemsize), width
        attributes = {"distmm_blocks": [height, width], **({} if job is None else {"distmm_job": job})}
        made: dict[str, Any] = {}
        create_raw(MemoryStore(made), shape, dtype, chunks, attributes)
        ObjectFolder(output.draft).put("zarr.json", made["zarr.json"].to_bytes())
        return cls(output, shape, dtype, chunks, (height, width))

    @classmethod
    def reopen(cls, output: Output) -> Self:
        """Open an array whose metadata `create` has put, to continue writing."""
        stored = ZarrMatrix.open(output.draft)
        assert stored.chunks is not None
        height, width = json.loads(ObjectFolder(output.draft).read("zarr.json"))["attributes"]["distmm_blocks"]
        return cls(output, stored.shape, stored.dtype, stored.chunks, (height, width))

    def _write(self, blocks: Sequence[Block]) -> None:
        """Put the chunks of blocks. Raise FileExistsError if one of them exists."""
        folder = ObjectFolder(self.output.path)
        little, height = self.dtype.newbyteorder("<"), self.chunks[0]

        def put(name: str, at: int, block: NDArray[Any]) -> None:
            part = block[at : at + height]
            if part.shape != self.chunks:  # a chunk at the edge of the array also has the full shape
                whole = np.zeros(self.chunks, little)
                whole[: part.shape[0], : part.shape[1]] = part
                part = whole
            folder.put(name, part.astype(little, copy=False).tobytes(), is_new=True)

        inside = (((*chunk, block) for chunk in self._inside(rows, cols)) for rows, cols, block in blocks)
        _together(put, itertools.chain.from_iterable(inside))

    def written(self) -> Self:
        """Return the array itself, which reads one block at a time."""
        return self

    def __getitem__(self, region: Region) -> NDArray[Any]:
        rows, cols = region
        height, width = rows.stop - rows.start, cols.stop - cols.start
        if not height * width:
            return np.empty((height, width), self.dtype)
        folder, little = ObjectFolder(self.output.path), self.dtype.newbyteorder("<")
        with explained(self.output.path, rows, cols):
            stripes = [np.frombuffer(folder.read(name), little) for name, _ in self._inside(rows, cols)]
            whole = np.concatenate(stripes).reshape(-1, self.chunks[1])
        return np.ascontiguousarray(whole[:height, :width], self.dtype)

    def discard(self, rows: slice, cols: slice) -> None:
        """Remove the chunks of a block."""
        ObjectFolder(self.output.path).remove([name for name, _ in self._inside(rows, cols)])

    def sync(self, regions: Collection[Region]) -> None:
        """Do nothing: an object is durable when its put has returned."""

    def evidence(self, rows: slice, cols: slice) -> dict[str, Any]:
        """Return the tags of a block's chunks."""
        folder = ObjectFolder(self.output.path)
        return {"objects": _together(lambda name, _: folder.tag(name), self._inside(rows, cols))}

    def description(self) -> dict[str, Any]:
        """Describe the array by its metadata."""
        metadata = json.loads(ObjectFolder(self.output.draft).read("zarr.json"))
        facts = {"shape": list(self.shape), "dtype": self.dtype.name, "chunks": list(self.chunks)}
        return {**facts, "metadata": metadata}

    def missing(self, markers: Mapping[tuple[int, int], Any] | None = None) -> list[tuple[int, int]]:
        """Return the blocks with a chunk that is missing, has a wrong size, or a tag that differs from its marker."""
        objects = ObjectFolder(self.output.path).everything()
        need, missing = self.chunks[0] * self.chunks[1] * self.dtype.itemsize, []
        for i, j in np.ndindex(*(-(-side // edge) for side, edge in zip(self.shape, self.blocks, strict=True))):
            found = [objects.get(name) for name, _ in self._inside(*self._region(i, j))]
            tags = [tag_of(facts) for facts in found if facts is not None and facts["size"] == need]
            marker = (markers or {}).get((i, j))
            if len(tags) < len(found) or (marker is not None and marker.get("objects") != tags):
                missing.append((i, j))
        return missing

    def keep_only(self, done: Collection[tuple[int, int]]) -> None:
        """Remove an array that is replaced, and the chunks of earlier runs, except the blocks in `done`.

        Raises
        ------
        InputError
            If an array that may not be replaced was created after the job had begun.
        """
        folder = ObjectFolder(self.output.path)
        kept = {name for block in done for name, _ in self._inside(*self._region(*block))}
        others = [name for name in folder.everything() if name not in kept and ZARR_NAME.fullmatch(name)]
        metadata = [name for name in others if name in ("zarr.json", ".zarray")]
        if metadata and not self.output.overwrite:
            raise InputError(APPEARED.format(self.output.path))
        folder.remove(metadata)  # from now on readers find no array
        folder.remove([name for name in others if name not in metadata])

    def _region(self, i: int, j: int) -> tuple[slice, slice]:
        """Return the rows and columns of a block."""
        at = zip((i, j), self.blocks, self.shape, strict=True)
        rows, cols = (slice(n * edge, min((n + 1) * edge, side)) for n, edge, side in at)
        return rows, cols

    def _inside(self, rows: slice, cols: slice) -> list[tuple[str, int]]:
        """Return the name of each chunk of a block, and the chunk's first row in the block."""
        i, j = rows.start // self.blocks[0], cols.start // self.blocks[1]
        expected = self._region(i, j)
        if (rows.start, rows.stop, cols.start, cols.stop) != tuple(n for s in expected for n in (s.start, s.stop)):
            raise IndexError(f"{self.output.path}: [{rows}, {cols}] is not one of its blocks")
        height = self.chunks[0]
        return [(f"c/{at // height}/{j}", at - rows.start) for at in range(rows.start, rows.stop, height)]


def _stripe(height: int, row: int) -> int:
    """Return the number of rows of a chunk: an equal part of a block's `height`, of `CHUNK_BYTES` or less.

    `row` is the size of a row in bytes. If there are no such equal parts, a chunk is a whole block.
    """
    fewest = min(height, -(-height * row // CHUNK_BYTES))
    parts = next((n for n in range(fewest, min(height, MOST_STRIPES * fewest) + 1) if height % n == 0), 1)
    return height // parts


def _together(do: Callable[..., Any], chunks: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Call `do` for all chunks concurrently. Return, or raise, when all calls have ended."""
    futures = [_pool().submit(do, *chunk) for chunk in chunks]
    wait(futures)
    return [future.result() for future in futures]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(UPLOADS, thread_name_prefix="distmm-objects")
