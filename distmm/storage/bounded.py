"""Zarr arrays opened so that no chunk can take more memory than a chunk has, and no pipe is waited for.

A few megabytes of gzip can stand for a thousand times as much. Zarr's codecs unpack all of it before they compare it
with the chunk; those here stop at twice a chunk. Zarr says nothing of how codecs are wrapped: seen with 3.1.6.
"""

from __future__ import annotations

import asyncio
import bz2
import lzma
import math
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numcodecs
import numcodecs.abc
import numpy as np
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import ShardingCodec
from zarr.storage import LocalStore

from distmm.storage.regular_files import check_regular

__all__ = ["bounded", "open_zarr"]

# Bytes that a packed chunk may have beyond twice its elements: checksums, and headers of other formats.
SLACK = 1 << 16

# Formats that do not say how long their content is, and what unpacks them bit by bit, given the codec's configuration.
STREAMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gzip": lambda _: zlib.decompressobj(31),
    "zlib": lambda _: zlib.decompressobj(),
    "bz2": lambda _: bz2.BZ2Decompressor(),
    "lzma": lambda config: lzma.LZMADecompressor(config.get("format", lzma.FORMAT_XZ), filters=config.get("filters")),
}

# Formats whose header says it, and where: the first byte and the number of bytes.
HEADERS = {"blosc": (4, 4), "lz4": (0, 4)}

PACKED = {*STREAMS, *HEADERS, "zstd"}


def open_zarr(path: str) -> Any:
    """Open an array or a group for reading; of a local one, only regular files are read."""
    return zarr.open(path if "://" in path else _RegularFiles(path, read_only=True), mode="r")


def bounded(array: Any) -> Any:
    """Return the same array with codecs that refuse to unpack more than a chunk can have."""
    metadata = array.metadata
    if metadata.zarr_format == 2:
        size = math.prod(array.chunks) * array.dtype.itemsize
        compressor = metadata.compressor and _BoundedV2(metadata.compressor, size)
        metadata = replace(metadata, compressor=compressor)
    else:
        metadata = replace(metadata, codecs=_wrapped(metadata.codecs))
    opened = array.async_array
    return zarr.Array(zarr.AsyncArray(metadata, opened.store_path, opened.config))


def unpacked(config: dict[str, Any], data: Any, size: int) -> Any:
    """Unpack one chunk.

    Parameters
    ----------
    config : dict
        Of numcodecs, with the codec's name as ``id``.
    data : bytes-like
    size : int
        Bytes of the chunk's elements.

    Raises
    ------
    ValueError
        For data that would be more than twice as long.
    """
    name, most = config["id"], 2 * size + SLACK
    if name in STREAMS:
        return _streamed(config, bytes(data), most)
    declared = _declared(name, bytes(data[:18]))
    if declared is None:  # zstd without its length: it has to fit exactly
        return numcodecs.get_codec(config).decode(data, out=np.empty(size, np.uint8))
    if declared > most:
        raise ValueError(_excess(name, declared, most))
    return numcodecs.get_codec(config).decode(data)


def _streamed(config: dict[str, Any], data: bytes, most: int) -> bytes:
    parts: list[bytes] = []
    length = 0
    while data:
        stream = STREAMS[config["id"]](config)
        parts.append(stream.decompress(data, most + 1 - length))
        length += len(parts[-1])
        if length > most:
            raise ValueError(_excess(config["id"], length, most))
        if not stream.eof:
            raise ValueError(f"the {config['id']} data end too early")
        data = stream.unused_data.lstrip(b"\0") if config["id"] != "zlib" else b""
    return b"".join(parts)


def _declared(name: str, head: bytes) -> int | None:
    """Read the length of the content from a header (of zstd: RFC 8878, 3.1.1.1); None where it does not say."""
    if name != "zstd":
        first, count = HEADERS[name]
        return int.from_bytes(head[first : first + count], "little")
    flags = head[4] if len(head) > 4 else 0
    single = flags >> 5 & 1
    at = 5 + (1 - single) + (0, 1, 2, 4)[flags & 3]
    width = (single, 2, 4, 8)[flags >> 6]
    return int.from_bytes(head[at : at + width], "little") + 256 * (width == 2) if width else None


def _excess(name: str, length: int, most: int) -> str:
    return f"the {name} data unpack to {length} bytes or more, and a chunk has {most} at most"


def _wrapped(codecs: Any) -> tuple[Any, ...]:
    return tuple(map(_wrap, codecs))


def _wrap(codec: Any) -> Any:
    if isinstance(codec, ShardingCodec):
        return replace(codec, codecs=_wrapped(codec.codecs), index_codecs=_wrapped(codec.index_codecs))
    described = codec.to_dict()
    name = described["name"].removeprefix("numcodecs.")
    return _Bounded(codec, {**described.get("configuration", {}), "id": name}) if name in PACKED else codec


@dataclass(frozen=True)
class _Bounded(BytesBytesCodec):
    """A codec of version 3, for reading."""

    codec: BytesBytesCodec
    config: dict[str, Any]

    is_fixed_size = False

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        size = math.prod(chunk_spec.shape) * chunk_spec.dtype.item_size
        data = await asyncio.to_thread(unpacked, self.config, chunk_bytes.as_numpy_array(), size)
        return chunk_spec.prototype.buffer.from_bytes(data)

    async def _encode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        raise NotImplementedError("this array was opened for reading")

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Ask the codec."""
        return self.codec.compute_encoded_size(input_byte_length, chunk_spec)

    def to_dict(self) -> Any:
        """Describe the codec."""
        return self.codec.to_dict()


class _BoundedV2(numcodecs.abc.Codec):  # type: ignore[misc]
    """A compressor of version 2, for reading."""

    codec_id = "distmm.bounded"

    def __init__(self, codec: Any, size: int) -> None:
        self.codec, self.size = codec, size

    def encode(self, buf: Any) -> Any:
        """Refuse: the array was opened for reading."""
        raise NotImplementedError("this array was opened for reading")

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Unpack a chunk."""
        if self.codec.codec_id not in PACKED:
            return self.codec.decode(buf, out)
        return unpacked(self.codec.get_config(), buf, self.size)

    def get_config(self) -> Any:
        """Describe the codec."""
        return self.codec.get_config()


class _RegularFiles(LocalStore):
    """A folder of which only regular files are read."""

    def get_sync(self, key: str, **options: Any) -> Any:
        """Read a file."""
        self._check(key)
        return super().get_sync(key, **options)

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        """Read a file."""
        self._check(key)
        return await super().get(key, *arguments, **options)

    def _check(self, key: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):  # a chunk may be missing, and Zarr knows what that means
            check_regular(self.root / key)
