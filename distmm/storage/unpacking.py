"""Packed chunks, unpacked into no more memory than a chunk may take.

A few megabytes of gzip can stand for a thousand times as much. Libraries unpack all of it before they compare it with
the chunk. `unpacked` stops at twice a chunk, or refuses by the length that a header declares.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any

import numcodecs
import numpy as np

__all__ = ["PACKED", "SLACK", "unpacked"]

# Bytes that a packed chunk may have beyond twice its elements: checksums, and headers of other formats.
SLACK = 1 << 16

# Bytes of memory that lzma may take for its dictionary; its strongest preset needs 65 MiB.
MOST_DICTIONARY = 1 << 27

# Formats that do not say how long their content is, and what unpacks them in parts, given numcodecs' configuration.
STREAMS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gzip": lambda _: zlib.decompressobj(31),
    "zlib": lambda _: zlib.decompressobj(),
    "bz2": lambda _: bz2.BZ2Decompressor(),
    "lzma": lambda config: _lzma(config.get("format", lzma.FORMAT_XZ), config.get("filters")),
}

# Formats whose header says it, and where: the first byte and the number of bytes.
HEADERS = {"blosc": (4, 4), "lz4": (0, 4)}

PACKED = {*STREAMS, *HEADERS, "zstd"}


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


def _lzma(form: int, filters: Any) -> lzma.LZMADecompressor:
    """Return a decompressor whose dictionary is bounded: its size is what the data say, up to 4 GB."""
    if form != lzma.FORMAT_RAW:
        return lzma.LZMADecompressor(form, memlimit=MOST_DICTIONARY)
    if max((int(one.get("dict_size", 0)) for one in filters or ()), default=0) > MOST_DICTIONARY:
        raise ValueError(f"the lzma filters ask for a dictionary of more than {MOST_DICTIONARY} bytes")
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
