"""A Zarr array that is written to an object store. It has no draft: it becomes an array with its last object.

Objects cannot be renamed. So the chunks of C are put under their final names, ``C.zarr/c/0/0``. The metadata that make
an array of them wait in the job's folder. They are put as ``C.zarr/zarr.json`` when C is complete: until then every
reader finds no array. A C that is replaced loses its ``zarr.json`` first, then its chunks, when the new job begins.

A chunk is put only where there is none, so a process that was asleep replaces nothing. The marker of a block holds the
tags of its chunks. Before C becomes an array, all chunks are listed and compared with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from zarr.storage import MemoryStore

from distmm.errors import InputError
from distmm.storage.matrix import Matrix
from distmm.storage.object_store import ObjectFolder, tag_of
from distmm.storage.output import Output, Target
from distmm.storage.zarr_folder import ZarrMatrix, create_raw

__all__ = ["ObjectDraft", "ObjectOutput", "ObjectTarget", "check_url", "is_array"]

# Bytes of a chunk, at most, if a block can be cut into equal stripes. Each is copied once while it is put: with this
# and `UPLOADS`, half a gigabyte a process. Above 100 MB s3fs makes an upload of parts of it, whose tags differ.
CHUNK_BYTES = 64 << 20

# Puts at the same time, a process. One connection to S3 carries some 100 MB/s.
UPLOADS = 8

# At most so many times as many stripes as would be enough: 16411 rows, a prime, have equal stripes of one row only.
MOST_STRIPES = 4

# Objects of a two-dimensional Zarr array of version 2 or 3, whatever its chunks are called.
ZARR_NAME = re.compile(r"zarr\.json|\.zarray|\.zattrs|(c[./])?\d+[./]\d+")

Block = tuple[int, int]


class ObjectOutput(Output):
    """The names of an array in an object store: `draft` has its metadata only, until it is complete."""

    @classmethod
    def reserve(cls, path: str, nbytes: int, overwrite: bool, draft: str | None = None) -> Self:  # noqa: ARG003
        """Check that nothing is there, or may be replaced; a store has room for all."""
        if not overwrite and (found := ObjectFolder(path).names()):
            raise InputError(
                f"{path}: exists ({found[0]} is there); give another name, or --overwrite (overwrite=True) to replace"
            )
        return cls(path, draft or f"{path}.draft", overwrite)

    def commit(self) -> str:
        """Make an array of the chunks; it can be repeated after a kill."""
        metadata = ObjectFolder(self.draft).read("zarr.json")
        final = ObjectFolder(self.path)
        try:
            final.create("zarr.json", metadata)
        except FileExistsError:
            if final.read("zarr.json") != metadata:
                raise InputError(f"{self.path}: appeared while the product was computed; it is not replaced") from None
        return self.path

    def discard(self) -> None:
        """Remove the metadata."""
        ObjectFolder(self.draft).remove(["zarr.json"])


@dataclass(frozen=True)
class ObjectTarget(Target):
    """A Zarr array (version 3) in an object store. A block of C is one chunk, or some, one below the other.

    Attributes
    ----------
    chunks, blocks : tuple of int
        Edges ``(rows, columns)``.
    """

    chunks: tuple[int, int]
    blocks: tuple[int, int]

    @classmethod
    def create(
        cls, output: Output, shape: tuple[int, int], dtype: np.dtype[Any], blocks: tuple[int, int], job: str | None
    ) -> Self:
        """Put the metadata in the place of the draft. `blocks`, in elements, are those that will be written."""
        height, width = (max(1, min(edge, side)) for edge, side in zip(blocks, shape, strict=True))
        chunks = _stripe(height, width * dtype.itemsize), width
        attributes = {"distmm_blocks": [height, width], **({} if job is None else {"distmm_job": job})}
        made: dict[str, Any] = {}
        create_raw(MemoryStore(made), shape, dtype, chunks, attributes)
        ObjectFolder(output.draft).put("zarr.json", made["zarr.json"].to_bytes())
        return cls(output, shape, dtype, chunks, (height, width))

    @classmethod
    def reopen(cls, output: Output) -> Self:
        """Go on with an array whose metadata `create` has put."""
        stored = ZarrMatrix.open(output.draft)
        assert stored.chunks is not None
        height, width = json.loads(ObjectFolder(output.draft).read("zarr.json"))["attributes"]["distmm_blocks"]
        return cls(output, stored.shape, stored.dtype, stored.chunks, (height, width))

    def _write(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        """Put the chunks of a block; raise FileExistsError if one is there."""
        folder = ObjectFolder(self.output.path)
        little, height = self.dtype.newbyteorder("<"), self.chunks[0]

        def put(name: str, at: int) -> None:
            part = block[at : at + height]
            if part.shape != self.chunks:  # a chunk at the edge of the array has the full shape too
                whole = np.zeros(self.chunks, little)
                whole[: part.shape[0], : part.shape[1]] = part
                part = whole
            folder.create(name, part.astype(little, copy=False).tobytes())

        _together(put, self._inside(rows, cols))

    def discard(self, rows: slice, cols: slice) -> None:
        """Remove the chunks of a block."""
        ObjectFolder(self.output.path).remove([name for name, _ in self._inside(rows, cols)])

    def sync(self, rows: slice, cols: slice) -> None:
        """Do nothing: what was put is there."""

    def evidence(self, rows: slice, cols: slice) -> dict[str, Any]:
        """Return the tags of a block's chunks."""
        folder = ObjectFolder(self.output.path)
        return {"objects": _together(lambda name, _: folder.tag(name), self._inside(rows, cols))}

    def description(self) -> dict[str, Any]:
        """Describe the array by its metadata."""
        metadata = json.loads(ObjectFolder(self.output.draft).read("zarr.json"))
        facts = {"shape": list(self.shape), "dtype": self.dtype.name, "chunks": list(self.chunks)}
        return {**facts, "metadata": metadata}

    def missing(self, markers: Mapping[Block, Any] | None = None) -> list[Block]:
        """Return the blocks of which a chunk is missing, has a wrong size, or another tag than its marker says."""
        there = ObjectFolder(self.output.path).everything()
        need, missing = self.chunks[0] * self.chunks[1] * self.dtype.itemsize, []
        for i, j in np.ndindex(*(-(-side // edge) for side, edge in zip(self.shape, self.blocks, strict=True))):
            found = [there.get(name) for name, _ in self._inside(*self._region(i, j))]
            tags = [tag_of(facts) for facts in found if facts is not None and facts["size"] == need]
            marker = (markers or {}).get((i, j))
            if len(tags) < len(found) or (marker is not None and marker.get("objects") != tags):
                missing.append((i, j))
        return missing

    def make_room(self, done: Collection[Block]) -> None:
        """Remove what was there before, and what earlier runs have put of blocks that are not `done`.

        Raises
        ------
        InputError
            For an array that may not be replaced: it has come since the job was begun.
        """
        folder = ObjectFolder(self.output.path)
        kept = {name for block in done for name, _ in self._inside(*self._region(*block))}
        others = [name for name in folder.everything() if name not in kept and ZARR_NAME.fullmatch(name)]
        metadata = [name for name in others if name in ("zarr.json", ".zarray")]
        if metadata and not self.output.overwrite:
            raise InputError(f"{self.output.path}: appeared while the product was computed; it is not replaced")
        folder.remove(metadata)  # from now on readers find no array
        folder.remove([name for name in others if name not in metadata])

    def _region(self, i: int, j: int) -> tuple[slice, slice]:
        at = zip((i, j), self.blocks, self.shape, strict=True)
        rows, cols = (slice(n * edge, min((n + 1) * edge, side)) for n, edge, side in at)
        return rows, cols

    def _inside(self, rows: slice, cols: slice) -> list[tuple[str, int]]:
        """Return the chunks of a block: the name of each, and its first row in the block."""
        i, j = rows.start // self.blocks[0], cols.start // self.blocks[1]
        expected = self._region(i, j)
        if (rows.start, rows.stop, cols.start, cols.stop) != tuple(n for s in expected for n in (s.start, s.stop)):
            raise IndexError(f"{self.output.path}: [{rows}, {cols}] is not one of its blocks")
        height = self.chunks[0]
        return [(f"c/{at // height}/{j}", at - rows.start) for at in range(rows.start, rows.stop, height)]


@dataclass(frozen=True)
class ObjectDraft(Matrix):
    """The chunks of an array that is not complete yet, read as the matrix that it will be."""

    @classmethod
    def open(cls, path: str, draft: str) -> Self:
        """Read shape and type from the metadata in the job's folder; the chunks are at `path`."""
        stored = ZarrMatrix.open(draft)
        return cls(path, stored.shape, stored.dtype, stored.chunks)

    def _read(self, rows: slice, cols: slice) -> NDArray[Any]:
        assert self.chunks is not None
        height, width = self.chunks
        top, left = rows.start // height, cols.start // width
        bottom, right = -(-rows.stop // height), -(-cols.stop // width)
        block = np.empty(((bottom - top) * height, (right - left) * width), self.dtype)
        folder, little = ObjectFolder(self.path), self.dtype.newbyteorder("<")
        for i, j in np.ndindex(bottom - top, right - left):
            chunk = np.frombuffer(folder.read(f"c/{top + i}/{left + j}"), little).reshape(self.chunks)
            block[i * height : (i + 1) * height, j * width : (j + 1) * width] = chunk
        inside = (
            slice(s.start - first, s.stop - first, s.step) for s, first in ((rows, top * height), (cols, left * width))
        )
        return np.ascontiguousarray(block[tuple(inside)])


def check_url(url: str, overwrite: bool) -> None:
    """Refuse an output that lies inside an array, or would replace anything but one array.

    Raises
    ------
    InputError
    """
    scheme, rest = url.split("://")
    bucket, *names = rest.split("/")
    for n in range(1, len(names)):
        above = f"{scheme}://{'/'.join([bucket, *names[:n]])}"
        if is_array(above):
            raise InputError(f"{url}: lies inside the Zarr array {above}, which it would damage; choose another place")
    if overwrite:
        other = next((name for name in ObjectFolder(url).everything() if not ZARR_NAME.fullmatch(name)), None)
        if other is not None:
            raise InputError(
                f"{url}: holds {other}, which is no part of a Zarr array; it is not replaced: choose another name, or "
                f"remove it yourself"
            )


def is_array(url: str) -> bool:
    """Whether there is a Zarr array, of version 2 or 3."""
    folder = ObjectFolder(url)
    found = folder.read_all(["zarr.json", ".zarray"])
    for error in found.values():
        if isinstance(error, Exception) and not isinstance(error, FileNotFoundError):
            raise InputError(f"{folder.url}: cannot be read: {error}")
    if isinstance(found[".zarray"], bytes):
        return True
    described = found["zarr.json"]
    return isinstance(described, bytes) and json.loads(described).get("node_type") == "array"


def _stripe(height: int, row: int) -> int:
    """Return the rows of a chunk: equal parts of a block's `height` of `CHUNK_BYTES` or less; `row` is in bytes."""
    enough = min(height, -(-height * row // CHUNK_BYTES))
    parts = next((n for n in range(enough, min(height, MOST_STRIPES * enough) + 1) if height % n == 0), 1)
    return height // parts


def _together(do: Callable[[str, int], Any], chunks: list[tuple[str, int]]) -> list[Any]:
    """Do something with all chunks at the same time; return once nothing is under way any more."""
    futures = [_pool().submit(do, *chunk) for chunk in chunks]
    wait(futures)
    return [future.result() for future in futures]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(UPLOADS, thread_name_prefix="distmm-objects")
