"""Zarr arrays that are written to an object store.

Objects cannot be renamed. So the chunks of C are put under their final names, ``C.zarr/c/0/0``. Until C is complete,
its metadata is stored in the job's folder, and readers find no array. Then it is put as ``C.zarr/zarr.json``. If C
replaces an older array, the ``zarr.json`` of that array is removed first, then its chunks, when the new job begins.

A put of a chunk fails if the chunk exists, so a process that was suspended replaces nothing. The marker of a block has
the tags of its chunks. Before the metadata is put, all chunks are listed and compared with these tags.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from distmm.errors import InputError
from distmm.storage.matrix import explained
from distmm.storage.object_store import OBJECTS, tag_of
from distmm.storage.output import APPEARED, Output, Region
from distmm.storage.paths import ZARR_NAME
from distmm.storage.zarr_target import ChunkedTarget, create_raw

# Largest size of a chunk in bytes, if a block can be cut into equal stripes. A put copies its chunk. With `UPLOADS`
# puts at a time, the copies take half a gigabyte in each process. Above 100 MB s3fs makes a multipart upload, which has
# another tag.
CHUNK_BYTES = 64 << 20

# Concurrent puts of a process. One connection to S3 transfers about 100 MB/s.
UPLOADS = 8

_POOL = ThreadPoolExecutor(UPLOADS, thread_name_prefix="distmm-objects")

# Equal stripes may be more than `CHUNK_BYTES` requires, by at most this factor. 16411 rows, a prime number, could only
# be cut into stripes of one row.
MOST_STRIPES = 4


class ObjectOutput(Output):
    """The names of an array in an object store. `draft` has only its metadata, until the array is complete."""

    @classmethod
    def reserve(cls, path: str, nbytes: int, overwrite: bool, draft: str | None = None) -> Self:  # noqa: ARG003
        """Check that no object has this name, or that it may be replaced. The size of a store is not limited."""
        if not overwrite and (found := OBJECTS.names(path)):
            raise InputError(
                f"{path}: exists ({found[0]} is there); give another name, or --overwrite (overwrite=True) to replace"
            )
        return cls(path, draft or f"{path}.draft", overwrite)

    def commit(self) -> str:
        """Put the metadata, which makes the chunks an array. It can be repeated after a kill."""
        metadata, final = OBJECTS.read(f"{self.draft}/zarr.json"), f"{self.path}/zarr.json"
        try:
            OBJECTS.put(final, metadata, is_new=True)
        except FileExistsError:
            if OBJECTS.read(final) != metadata:
                raise InputError(APPEARED.format(self.path)) from None
        return self.path

    def discard(self) -> None:
        """Remove the metadata."""
        OBJECTS.remove_all(self.draft, ["zarr.json"])


@dataclass(frozen=True)
class ObjectTarget(ChunkedTarget):
    """A Zarr array in an object store. A block of C is one chunk, or several stripes of rows."""

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
        OBJECTS.put(f"{output.draft}/zarr.json", made["zarr.json"].to_bytes())
        return cls(output, shape, dtype, chunks)

    def _write(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        """Put the chunks of a block. Raise FileExistsError if one of them exists."""
        little = self.dtype.newbyteorder("<")

        def put(name: str, at: Region) -> None:
            part = block[at]
            if part.shape != self.chunks:  # a chunk at the edge of the array also has the full shape
                whole = np.zeros(self.chunks, little)
                whole[: part.shape[0], : part.shape[1]] = part
                part = whole
            OBJECTS.put(self._url(name), part.astype(little, copy=False).tobytes(), is_new=True)

        _together(put, self.chunks_of(rows, cols).items())

    def written(self) -> Self:
        """Return the array itself, which reads one block at a time."""
        return self

    def __getitem__(self, region: Region) -> NDArray[Any]:
        rows, cols = region
        block = np.empty((rows.stop - rows.start, cols.stop - cols.start), self.dtype)
        little = self.dtype.newbyteorder("<")
        with explained(self.output.path, rows, cols):
            for name, at in self.chunks_of(rows, cols).items():
                part = block[at]
                chunk = np.frombuffer(OBJECTS.read(self._url(name)), little).reshape(self.chunks)
                part[...] = chunk[: part.shape[0], : part.shape[1]]
        return block

    def discard(self, rows: slice, cols: slice) -> None:
        """Remove the chunks of a block."""
        OBJECTS.remove_all(self.output.path, self.chunks_of(rows, cols))

    def sync(self, rows: slice, cols: slice) -> None:
        """Do nothing: an object is durable when its put has returned."""

    def evidence(self, rows: slice, cols: slice) -> dict[str, Any]:
        """Return the tags of a block's chunks."""
        return {"objects": _together(lambda name, _: OBJECTS.tag(self._url(name)), self.chunks_of(rows, cols).items())}

    def description(self) -> dict[str, Any]:
        """Describe the array by its metadata."""
        metadata = json.loads(OBJECTS.read(f"{self.output.draft}/zarr.json"))
        facts = {"shape": list(self.shape), "dtype": self.dtype.name, "chunks": list(self.chunks)}
        return {**facts, "metadata": metadata}

    def _url(self, name: str) -> str:
        return f"{self.output.path}/{name}"

    def _there(self) -> dict[str, tuple[int, str | None]]:
        objects = OBJECTS.everything(self.output.path)
        return {name: (facts["size"], tag_of(facts)) for name, facts in objects.items()}

    def keep_only(self, done: Collection[Region]) -> None:
        """Remove an array that is replaced, and the chunks of earlier runs, except the blocks in `done`.

        Raises
        ------
        InputError
            If an array that may not be replaced was created after the job had begun.
        """
        folder = self.output.path
        kept = {name for region in done for name in self.chunks_of(*region)}
        others = [name for name in OBJECTS.everything(folder) if name not in kept and ZARR_NAME.fullmatch(name)]
        metadata = [name for name in others if name in ("zarr.json", ".zarray")]
        if metadata and not self.output.overwrite:
            raise InputError(APPEARED.format(self.output.path))
        OBJECTS.remove_all(folder, metadata)  # from now on readers find no array
        OBJECTS.remove_all(folder, [name for name in others if name not in metadata])


def _stripe(height: int, row: int) -> int:
    """Return the number of rows of a chunk: an equal part of a block's `height`, of `CHUNK_BYTES` or less.

    `row` is the size of a row in bytes. If there are no such equal parts, a chunk is a whole block.
    """
    fewest = min(height, -(-height * row // CHUNK_BYTES))
    parts = next((n for n in range(fewest, min(height, MOST_STRIPES * fewest) + 1) if height % n == 0), 1)
    return height // parts


def _together(do: Callable[..., Any], chunks: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Call `do` for all chunks concurrently. Return, or raise, when all calls have ended."""
    futures = [_POOL.submit(do, *chunk) for chunk in chunks]
    wait(futures)
    return [future.result() for future in futures]
