"""The files of a Zarr array: which chunks exist."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from distmm.errors import InputError
from distmm.storage import stamps
from distmm.storage.object_store import OBJECTS

if TYPE_CHECKING:
    import zarr

# Most files of an array: their names are compared one by one, which takes a minute for so many.
MOST_FILES = 10**8

NUMBER = re.escape("{}")  # of a pattern of names


@dataclass(frozen=True)
class Present:
    """Which files or objects (shards, or else chunks) of an array exist. A missing one reads as the fill value.

    Attributes
    ----------
    names : str
        Pattern of the files' names, such as ``c/{}/{}``.
    counts : tuple of int
        Number of files along each dimension.
    absent : bytes
        One bit for each file, compressed. Empty if no file is missing.
    listed : bool
        Whether the files could be listed.
    """

    names: str
    counts: tuple[int, ...]
    absent: bytes
    listed: bool

    @classmethod
    def of(cls, path: str, stored: zarr.Array[Any]) -> Self:
        """List the existing files of a folder or URL."""
        return cls.among(_objects(path) if "://" in path else {inside for inside, _ in stamps.entries(path)}, stored)

    @classmethod
    def among(cls, found: Collection[str] | None, stored: zarr.Array[Any]) -> Self:
        """Look for an array's files among names. With None, for a store that cannot list them, none is expected."""
        from distmm.storage.zarr_internals import chunk_names

        names = chunk_names(stored)
        counts = tuple(-(-n // edge) for n, edge in zip(stored.shape, stored.shards or stored.chunks, strict=True))
        if math.prod(counts) > MOST_FILES:
            raise InputError(
                f"{stored.store}/{stored.path}: has {math.prod(counts):.3g} chunks, and distmm reads arrays of at most "
                f"{MOST_FILES:.3g}: write it with larger chunks, or in shards"
            )
        each = (names.format(*at) for at in itertools.product(*map(range, counts)))
        absent = np.array([found is not None and name not in found for name in each], bool)
        packed = zlib.compress(np.packbits(absent).tobytes()) if absent.any() else b""
        return cls(names, counts, packed, found is not None)

    def at(self, *index: int) -> bool:
        """Whether the file of these indices existed."""
        if not self.absent:
            return self.listed
        byte, bit = divmod(int(np.ravel_multi_index(index, self.counts)), 8)
        return not _unpacked(self.absent)[byte] << bit & 128

    def missing(self, fill: Any) -> str | None:
        """Say how many files are missing, and read as the value `fill`. None if none is, or not known."""
        if not self.absent:
            return None
        absent = int.from_bytes(_unpacked(self.absent)).bit_count()
        return f"{absent} of {math.prod(self.counts)} chunks are missing, and read as {fill}"

    def digest(self) -> str:
        """Return the name of the first missing file, and a hash of which files are missing."""
        bits = np.unpackbits(np.frombuffer(_unpacked(self.absent), np.uint8))
        first = self.names.format(*map(int, np.unravel_index(int(bits.argmax()), self.counts)))
        return f"{first} ... {hashlib.sha256(bits.tobytes()).hexdigest()[:16]}"

    def expects(self, key: str) -> bool:
        """Whether a key of the store ends with the name of a file that existed."""
        found = re.search(rf"(?:^|/){re.escape(self.names).replace(NUMBER, '([0-9]+)')}$", key)
        return found is not None and self.at(*map(int, found.groups()))


@lru_cache(maxsize=8)
def _unpacked(bits: bytes) -> bytes:
    return zlib.decompress(bits)


def _objects(url: str) -> set[str] | None:
    """Return the names of the objects of an array. None if the store cannot list them."""
    if url.startswith(("http://", "https://")):
        return None
    try:
        found = set(OBJECTS.everything(url))
    except OSError:
        return None
    return found if found & {"zarr.json", ".zarray"} else None
