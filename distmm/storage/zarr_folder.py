"""Zarr arrays of versions 2 and 3: folders, members of groups, and URLs that fsspec supports."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import zarr
from numpy.typing import NDArray

from distmm.errors import InputError
from distmm.storage import READS, stamps
from distmm.storage.flat import read_into
from distmm.storage.matrix import Matrix, check_dtype, check_shape, only_matrix, stripes
from distmm.storage.object_store import check_access, is_url
from distmm.storage.regular_files import check_regular
from distmm.storage.zarr_chunks import Present
from distmm.storage.zarr_internals import bounded, chunk_names, open_zarr, register_bfloat16
from distmm.transfer import block_memory

register_bfloat16()


@dataclass(frozen=True)
class ZarrMatrix(Matrix):
    """One Zarr array, sharded or not.

    Attributes
    ----------
    metadata : str
        SHA-256 of its metadata.
    plain : str or None
        Pattern of the chunks' names, such as ``c/{}/{}``, if chunks are plain: uncompressed elements in C order.
    fill : scalar
        Value of the elements of missing chunks.
    facts : str or None
        Hash of inode, size and times of the file with the metadata. None for a URL.
    present : Present
        Which of its files existed when it was opened.
    """

    chunks: tuple[int, ...]
    metadata: str = field(kw_only=True)
    plain: str | None = field(kw_only=True)
    fill: Any = field(kw_only=True, repr=False, compare=False)
    facts: str | None = field(kw_only=True, repr=False, compare=False)
    present: Present = field(kw_only=True, repr=False)

    @classmethod
    def open(cls, path: str, any_shape: bool = False) -> Self:
        """Open an array, or the only matrix of a group, and check its metadata. `any_shape` allows stacks and vectors.

        Raises
        ------
        InputError
            For missing or damaged metadata, several matrices, and codecs that are not trusted.
        """
        try:
            facts = _facts(path)  # before the metadata is read: a file that replaces it later has other facts
            stored = open_zarr(path)
            members = _arrays(stored) if isinstance(stored, zarr.Group) else {}
        except Exception as error:  # Zarr raises a dozen types of errors for damaged metadata
            if is_url(path):
                check_access(path)
            if isinstance(error, PermissionError):
                raise InputError(f"{path}: you may not read it: {error}") from error
            why = f"{type(error).__name__}: {error}; its metadata are damaged: write or copy the array again"
            if isinstance(error, FileNotFoundError):
                why = (
                    f"it has no zarr.json, .zarray or .zgroup: the metadata are lost, or it is another folder; {READS}"
                )
            raise InputError(f"{path}: not a readable Zarr array: {why}") from error
        if isinstance(stored, zarr.Group):
            name = only_matrix(path, {name: array.shape for name, array in members.items()}, "Zarr group", "/")
            return cls.open(f"{path.rstrip('/')}/{name}")
        shape, chunks = tuple(stored.shape), tuple(stored.chunks)
        if not any_shape:
            check_shape(path, shape)
        if len(chunks) != len(shape) or min(chunks) < 1:
            raise InputError(
                f"{path}: its metadata is damaged: chunks {chunks} for shape {shape}; write the array again"
            )
        check_codecs(path, stored.metadata.to_dict())
        dtype, digest = check_dtype(path, stored.dtype), metadata_hash(stored)
        present = Present.of(path, stored)
        return cls(
            path, shape, dtype, chunks, metadata=digest, plain=_plain(path, stored),
            fill=0 if stored.fill_value is None else stored.fill_value, facts=facts, present=present,
        )  # fmt: skip

    def fingerprint(self) -> dict[str, Any]:
        """Return the hash of the metadata, and which chunks are missing, too."""
        missing = f"{self.missing()}: {self.present.digest()}" if self.present.absent else None
        return {**super().fingerprint(), "metadata": self.metadata, "missing": missing}

    def stamp(self) -> str:
        """Return a hash of the inodes, sizes and times of the files, or of the tags of the objects."""
        return stamps.stamp_of(self.path)

    def missing(self) -> str | None:
        """Say how many chunks (or shards) were missing when the array was opened. None if none was, or not known."""
        return self.present.missing(self.fill)

    def pieces(self, rows: slice, cols: slice, most: int) -> list[tuple[slice, slice]] | None:
        """Cut a region at the edges of plain chunks. Larger chunks are cut into ranges of rows."""
        if self.plain is None:
            return None
        inside = [
            [slice(top, bottom, 1) for _, top, bottom in self._cut(axis, s)] for axis, s in enumerate((rows, cols))
        ]
        return [part for i, j in itertools.product(*inside) for part in stripes(i, j, self.dtype.itemsize, most)]

    def _read(self, *region: slice) -> NDArray[Any]:
        if self.plain is not None and all(s.step == 1 for s in region):
            rows, cols = region
            block = block_memory.blocks.new((rows.stop - rows.start, cols.stop - cols.start), self.dtype)
            self._fill(rows, cols, block)
            return block
        return np.asarray(bounded(open_zarr(self.path), self.present.expects)[region], dtype=self.dtype)

    def _fill(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        """Read plain chunks directly into the block. 8 MB take 1.6 ms of CPU time; Zarr, which copies, takes 5 ms."""
        assert self.plain is not None
        height, width = self.chunks
        for (i, top, bottom), (j, left, right) in itertools.product(self._cut(0, rows), self._cut(1, cols)):
            part = block[top - rows.start : bottom - rows.start, left - cols.start : right - cols.start]
            name = os.path.join(self.path, self.plain.format(i, j))
            try:
                check_regular(name)
                file = open(name, "rb", buffering=0)  # noqa: SIM115
            except FileNotFoundError:
                if self.present.at(i, j):
                    raise
                part[...] = self.fill  # the chunk was never written
                continue
            with file:
                need, have = height * width * self.dtype.itemsize, os.fstat(file.fileno()).st_size
                if have != need:
                    raise ValueError(f"chunk {self.plain.format(i, j)} has {have} bytes, not {need}")
                read_into(file, 0, width, top - i * height, left - j * width, part)

    def _check(self) -> None:
        # A missing chunk reads as the fill value, and so do all chunks if the mount is lost during the read. The data
        # are valid only if the array's metadata still exists and is unchanged. A stat takes 10 us. To read the metadata
        # takes 1 to 3 ms, and is needed only if the file has changed, or is a copy on another machine.
        if self.facts is not None and _facts(self.path) == self.facts:
            return
        if metadata_hash(open_zarr(self.path)) != self.metadata:
            raise OSError("the array has been replaced since it was opened")

    def _cut(self, axis: int, part: slice) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each chunk that intersects a range of rows or columns, and the intersection."""
        edge = self.chunks[axis]
        for i in range(part.start // edge, -(-part.stop // edge)):
            yield i, max(part.start, i * edge), min(part.stop, (i + 1) * edge)


def _arrays(group: zarr.Group) -> dict[str, zarr.Array[Any]]:
    """Return the arrays of a group by name; those of the groups in it if it has none itself."""
    mine = dict(group.arrays())
    return mine or {name: one for name, one in group.members(max_depth=None) if isinstance(one, zarr.Array)}


def _plain(path: str, stored: zarr.Array[Any]) -> str | None:
    """Return the pattern of the chunks' names if chunks are uncompressed native elements in C order. Else None."""
    described: dict[str, Any] = dict(stored.metadata.to_dict())
    if described["zarr_format"] == 2:
        packed = described["filters"] or described["compressor"] or described["order"] != "C"
    else:
        first, *others = described["codecs"]
        order = first.get("configuration", {}).get("endian", "little")
        packed = others or first["name"] != "bytes" or order != "little"
    if "://" in path or stored.ndim != 2 or packed or sys.byteorder != "little" or not stored.dtype.isnative:
        return None
    return chunk_names(stored)


def _facts(path: str) -> str | None:
    """Return a hash of inode, size and times of the file with an array's metadata. None if there is none."""
    for name in ("zarr.json", ".zarray"):
        with suppress(OSError):
            return stamps.of_files([(name, os.stat(os.path.join(path, name)))])
    return None


def metadata_hash(stored: zarr.Array[Any]) -> str:
    """Return a hash of the metadata of an array."""
    described = json.dumps(stored.metadata.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(described.encode()).hexdigest()


# Trusted codecs of chunks. They only decode numbers. Other codecs run code from the data (pickle), are looked up by
# name among all installed packages, or decompress to any length (zfpy).
CODECS = {
    "adler32", "astype", "bitround", "blosc", "bytes", "bz2", "crc32", "crc32c", "delta", "fixedscaleoffset",
    "fletcher32", "gzip", "lz4", "lzma", "quantize", "sharding_indexed", "shuffle", "transpose", "zlib", "zstd",
}  # fmt: skip

# Keys of a codec's configuration for a type of elements. A text of a million characters is such a type, too.
TYPES = ("dtype", "astype", "encode_dtype", "decode_dtype")


def check_codecs(path: str, metadata: dict[str, Any]) -> None:
    """Refuse an array whose chunks need a codec that is not trusted."""
    if metadata["zarr_format"] == 2:
        codecs = [*(metadata.get("filters") or ()), *filter(None, [metadata.get("compressor")])]
    else:
        codecs = list(metadata["codecs"])
    while codecs:
        codec = codecs.pop()
        name = str(codec.get("id") or codec.get("name")).removeprefix("numcodecs.")
        if name not in CODECS:
            raise InputError(
                f"{path}: its chunks are packed with {name!r}, which is not a trusted codec; write the array again "
                f"with one of {', '.join(sorted(CODECS))}"
            )
        configuration = codec.get("configuration") or codec
        for key in TYPES:
            if (of := configuration.get(key)) is not None:
                _check_codec_type(f"{path}: the {key} of its codec {name}", of)
        codecs += [*configuration.get("codecs", ()), *configuration.get("index_codecs", ())]


def _check_codec_type(what: str, name: Any) -> None:
    try:
        check_dtype(what, name)
    except TypeError as error:
        raise InputError(f"{what}, {name!r}, is not a type of elements; write the array again") from error
