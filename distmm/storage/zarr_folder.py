"""Zarr arrays, version 2 and 3: folders, members of groups, and URLs that fsspec knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import zarr
from numpy.typing import NDArray

from distmm.errors import InputError
from distmm.storage.matrix import Matrix, check_dtype, check_shape, only_matrix
from distmm.storage.output import Output, Target

__all__ = ["ZarrMatrix", "ZarrTarget"]


@dataclass(frozen=True)
class ZarrMatrix(Matrix):
    """One Zarr array."""

    @classmethod
    def open(cls, path: str) -> Self:
        """Check the metadata; a group that holds exactly one matrix stands for that matrix."""
        try:
            stored = zarr.open(path, mode="r")
            members = dict(stored.arrays()) if isinstance(stored, zarr.Group) else {}
        except Exception as error:  # damaged metadata surfaces as any of a dozen kinds
            raise InputError(
                f"{path}: not a readable Zarr array: {type(error).__name__}: {error}; its metadata (zarr.json, or "
                f".zarray) is missing or damaged: write or copy the array again"
            ) from error
        if isinstance(stored, zarr.Group):
            name = only_matrix(path, {name: array.shape for name, array in members.items()}, "Zarr group", "/")
            path, stored = f"{path.rstrip('/')}/{name}", members[name]
        shape, chunks = check_shape(path, stored.shape), tuple(stored.chunks)
        if len(chunks) != 2 or min(chunks) < 1:
            raise InputError(
                f"{path}: its metadata are damaged: chunks {chunks} for shape {shape}; write the array again"
            )
        _check_codecs(path, stored.metadata.to_dict())
        return cls(path, shape, check_dtype(path, stored.dtype), (chunks[0], chunks[1]))

    def _read(self, rows: slice, cols: slice) -> NDArray[Any]:
        return np.asarray(zarr.open_array(self.path, mode="r")[rows, cols], dtype=self.dtype)


# What chunks may be packed with: codecs that only decode numbers. Others run code that the data choose (pickle), or
# would be looked up by name in whatever is installed.
CODECS = {
    "adler32", "astype", "bitround", "blosc", "bytes", "bz2", "crc32", "crc32c", "delta", "fixedscaleoffset",
    "fletcher32", "gzip", "lz4", "lzma", "quantize", "sharding_indexed", "shuffle", "transpose", "zfpy", "zlib", "zstd",
}  # fmt: skip


def _check_codecs(path: str, metadata: dict[str, Any]) -> None:
    """Refuse an array whose chunks ask for a codec that is not known to be harmless."""
    if metadata["zarr_format"] == 2:
        codecs = [*(metadata.get("filters") or ()), *filter(None, [metadata.get("compressor")])]
    else:
        codecs = list(metadata["codecs"])
    while codecs:
        codec = codecs.pop()
        name = str(codec.get("id") or codec.get("name")).removeprefix("numcodecs.")
        if name not in CODECS:
            raise InputError(
                f"{path}: its chunks are packed with {name!r}, which is not among the codecs that are trusted "
                f"({', '.join(sorted(CODECS))}); write the array again with one of them"
            )
        configuration = codec.get("configuration") or {}
        codecs += [*configuration.get("codecs", ()), *configuration.get("index_codecs", ())]


@dataclass(frozen=True)
class ZarrTarget(Target):
    """A Zarr array (version 3) whose chunks are C's blocks, so that each chunk has one writer."""

    @staticmethod
    def check_replaceable(path: str) -> None:
        """Refuse to delete a folder that is anything but one Zarr array."""
        try:
            zarr.open_array(path, mode="r")
        except Exception as error:
            raise InputError(
                f"{path}: is a folder, but not a Zarr array ({error}), and is not replaced; choose another name, or "
                f"remove it yourself"
            ) from error

    @classmethod
    def create(cls, output: Output, shape: tuple[int, int], dtype: np.dtype[Any], chunks: tuple[int, int]) -> Self:
        """Write the metadata; chunks are in elements."""
        zarr.create_array(
            output.draft,
            shape=shape,
            chunks=(max(1, min(chunks[0], shape[0])), max(1, min(chunks[1], shape[1]))),
            dtype=dtype,
            compressors=None,  # the mantissas of a product do not compress: raw chunks go at the speed of the disk
        )
        return cls(output, shape, dtype)

    def _write(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        zarr.open_array(self.output.draft, mode="r+")[rows, cols] = block
