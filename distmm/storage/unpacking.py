"""Decompression of chunks with a bound on memory.

A few megabytes of gzip can decompress to a thousand times as much. Libraries decompress all of it before they compare
its length with that of a chunk. `unpacked` stops at twice the size of a chunk, or refuses by the length in a header.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any

import numcodecs
import numpy as np

# Bytes that a chunk may have beyond twice the size of its elements: checksums, and headers of other formats.
SLACK = 1 << 16

# Largest dictionary of lzma in bytes. Its strongest preset needs 65 MiB.
MOST_DICTIONARY = 1 << 27

# Formats without a decompressed length, and functions from numcodecs' configuration to an incremental decompressor.
STREAMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gzip": lambda _: zlib.decompressobj(31),
    "zlib": lambda _: zlib.decompressobj(),
    "bz2": lambda _: bz2.BZ2Decompressor(),
    "lzma": lambda config: _lzma(config.get("format", lzma.FORMAT_XZ), config.get("filters")),
}

# Formats with the decompressed length in a header: its first byte, and its number of bytes.
HEADERS = {"blosc": (4, 4), "lz4": (0, 4)}

PACKED = {*STREAMS, *HEADERS, "zstd"}


def unpacked(config: dict[str, Any], data: Any, size: int) -> Any:
    """Decompress one chunk.

    Parameters
    ----------
    config : dict
        numcodecs' configuration of the codec, with its name as ``id``.
    data : bytes-like
    size : int
        Bytes of the chunk's elements.

    Returns
    -------
    bytes-like

    Raises
    ------
    ValueError
        For data that would decompress to more than twice `size`, and for truncated data.
    """
    name, most = config["id"], 2 * size + SLACK
    if name in STREAMS:
        return _streamed(config, bytes(data), most)
    declared = _declared(name, bytes(data[:18]))
    if declared is None:  # zstd without a length: it is decompressed into a buffer of exactly this size
        return numcodecs.get_codec(config).decode(data, out=np.empty(size, np.uint8))
    if declared > most:
        raise ValueError(_excess(name, declared, most))
    return numcodecs.get_codec(config).decode(data)


def _lzma(form: int, filters: Any) -> lzma.LZMADecompressor:
    """Return a decompressor with a bounded dictionary. The data set the dictionary's size, which may be 4 GB."""
    if form != lzma.FORMAT_RAW:
        return lzma.LZMADecompressor(form, memlimit=MOST_DICTIONARY)
    if max((int(one.get("dict_size", 0)) for one in filters or ()), default=0) > MOST_DICTIONARY:
        raise ValueError(f"the lzma filters need a dictionary of more than {MOST_DICTIONARY} bytes")
    return lzma.LZMADecompressor(form, filters=filters)


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
            raise ValueError(f"the {config['id']} data are truncated")
        data = stream.unused_data.lstrip(b"\0") if config["id"] != "zlib" else b""
    return b"".join(parts)


def _declared(name: str, head: bytes) -> int | None:
    """Return the decompressed length in a header (of zstd: RFC 8878, 3.1.1.1). None if the header has none."""
    if name != "zstd":
        first, count = HEADERS[name]
        return int.from_bytes(head[first : first + count], "little")
    flags = head[4] if len(head) > 4 else 0
    single = flags >> 5 & 1
    at = 5 + (1 - single) + (0, 1, 2, 4)[flags & 3]
    width = (single, 2, 4, 8)[flags >> 6]
    return int.from_bytes(head[at : at + width], "little") + 256 * (width == 2) if width else None


def _excess(name: str, length: int, most: int) -> str:
    return f"the {name} data decompress to {length} bytes or more, and a chunk may have at most {most}"
