"""The files of a Zarr array: which chunks exist, and whether any has changed."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import zarr

from distmm.storage.zarr_internals import chunk_names

__all__ = ["Present", "files", "stamp_of_objects"]


@dataclass(frozen=True)
class Present:
    """Which files (shards, or else chunks) of a local array exist. A missing file reads as the fill value.

    Attributes
    ----------
    names : str
        Pattern of the files' names, such as ``c/{}/{}``.
    edges : tuple of int
        Rows and columns of a file.
    wide : int
        Number of files in a row.
    absent : bytes
        One bit for each file, compressed. Empty if no file is missing.
    """

    names: str
    edges: tuple[int, int]
    wide: int
    absent: bytes

    @classmethod
    def of(cls, path: str, stored: zarr.Array[Any]) -> Self:
        """List the existing files. Object stores are not listed: all of their files count as missing."""
        edges = stored.shards or stored.chunks
        names = chunk_names(stored)
        high, wide = (-(-n // edge) for n, edge in zip(stored.shape, edges, strict=True))
        found = set() if "://" in path else {inside for inside, _ in _entries(path)}
        absent = np.array([names.format(*at) not in found for at in itertools.product(range(high), range(wide))], bool)
        packed = zlib.compress(np.packbits(absent).tobytes()) if absent.any() else b""
        return cls(names, (edges[0], edges[1]), wide, packed)

    def at(self, i: int, j: int) -> bool:
        """Whether the file of these indices existed."""
        if not self.absent:
            return True
        byte, bit = divmod(i * self.wide + j, 8)
        return not _unpacked(self.absent)[byte] << bit & 128

    def absences(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the number of missing files, and the number of all files of an array of this shape."""
        high, wide = (-(-n // edge) for n, edge in zip(shape, self.edges, strict=True))
        absent = int.from_bytes(_unpacked(self.absent)).bit_count() if self.absent else 0
        return absent, high * wide

    def check(self, path: str, rows: slice, cols: slice) -> None:
        """Raise FileNotFoundError if a file of a region existed and is now missing."""
        sides = (range(s.start // edge, -(-s.stop // edge)) for s, edge in zip((rows, cols), self.edges, strict=True))
        for i, j in itertools.product(*sides):
            if self.at(i, j):
                os.stat(os.path.join(path, self.names.format(i, j)))


@lru_cache(maxsize=8)
def _unpacked(bits: bytes) -> bytes:
    return zlib.decompress(bits)


def files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all files of a folder and its subfolders, sorted by name."""
    for inside, entry in _entries(folder):
        with suppress(FileNotFoundError):  # removed in the meantime, or a dangling link
            yield inside, entry.stat()


def _entries(folder: str, inside: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the same files without their sizes. Each size costs a round trip on a network file system."""
    with os.scandir(folder) as found:
        for entry in sorted(found, key=lambda entry: entry.name):
            if entry.is_dir():
                yield from _entries(entry.path, f"{inside}{entry.name}/")
            else:
                yield f"{inside}{entry.name}", entry


def stamp_of_objects(url: str) -> str:
    """Return a hash of the tags of objects, or else of their sizes and times."""
    import fsspec

    store, folder = fsspec.url_to_fs(url)
    found = store.find(folder, detail=True)
    facts = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created")
    described = [[name, *(str(found[name].get(fact)) for fact in facts)] for name in sorted(found)]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()
