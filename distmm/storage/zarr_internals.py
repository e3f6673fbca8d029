"""All uses of Zarr's private interface: wrapped codecs and stores, names of chunks, the data type bfloat16.

Written for Zarr 3.1.6 and 3.4.2. If another version differs, `tests/distmm/storage/test_zarr_internals.py` fails
first. distmm then warns, and continues without these features: Zarr decompresses chunks without a bound on memory,
bfloat16 arrays are not supported, and a wrapped array is not recognised as the same array under another name.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import ml_dtypes
import numcodecs.abc
import numpy as np
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import ShardingCodec
from zarr.core.sync import sync
from zarr.storage import LocalStore, StorePath, WrapperStore

from distmm.storage.regular_files import check_regular
from distmm.storage.unpacking import PACKED, unpacked

NO_TYPES = ""
try:
    from zarr.core.dtype import data_type_registry
    from zarr.core.dtype.npy.float import BaseFloat

    _home: Any = zarr.errors if hasattr(zarr.errors, "DataTypeValidationError") else zarr.core.dtype  # in Zarr 3.1
    DataTypeValidationError = _home.DataTypeValidationError
except (ImportError, AttributeError) as error:
    NO_TYPES, BaseFloat = str(error), object  # type: ignore[assignment, misc]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def open_zarr(path: str) -> Any:
    """Open an array or a group for reading. In a local one, only regular files are read.

    The consolidated metadata of a local group are not used: they may be older than those of its arrays.
    """
    if "://" in path:
        return zarr.open(path, mode="r")
    return zarr.open(_RegularFiles(path, read_only=True), mode="r", use_consolidated=False)


def store_of(array: Any) -> Any:
    """Return the store of an array, without its wrappers."""
    store: Any = array.store
    while isinstance(store, WrapperStore) and hasattr(store, "_store"):
        store = store._store
    return store


def dictionary_of(store: Any) -> Any:
    """Return the dictionary of a memory store, which its read-only views share. Other stores are returned unchanged."""
    return getattr(store, "_store_dict", store)


def chunk_names(array: Any) -> str:
    """Return the pattern of the names of an array's chunks, or of its shards, such as ``c/{}/{}``."""
    return str(array.metadata.encode_chunk_key((0,) * array.ndim)).replace("0", "{}")


def keys_of(array: Any) -> set[str] | None:
    """Return the names of an array's metadata and chunks in its store. None if the store cannot list them."""
    store, prefix = array.store, f"{array.path}/" if array.path else ""
    if not store.supports_listing or "http" in getattr(getattr(store_of(array), "fs", None), "protocol", ()):
        return None

    async def listed() -> set[str]:
        return {key.removeprefix(prefix) async for key in store.list_prefix(prefix)}

    try:
        return sync(listed())
    except OSError:
        return None


def opened_again(array: Any) -> Any:
    """Open an array in its store again, in whatever mode the store is."""
    return zarr.Array.open(StorePath(array.store, array.path))


def bounded(array: Any, expects: Callable[[str], bool]) -> Any:
    """Return the same array, which refuses to decompress more than the size of a chunk, or to lack a chunk.

    `expects` takes a key of the store. A missing chunk whose key it expects is an error, and not the fill value.
    """
    try:
        metadata = array.metadata
        if metadata.zarr_format == 2:
            size = math.prod(array.chunks) * array.dtype.itemsize
            metadata = replace(
                metadata,
                compressor=metadata.compressor and _BoundedV2(metadata.compressor, size),
                filters=metadata.filters and tuple(_BoundedV2(one, size) for one in metadata.filters),
            )
        else:
            metadata = replace(metadata, codecs=_wrapped(metadata.codecs))
        place = StorePath(_Whole(array.store, expects), array.path)
        return zarr.Array(zarr.AsyncArray(metadata, place, array.async_array.config))
    except (AttributeError, TypeError, ValueError) as error:
        _warn(error, "chunks are unpacked without a bound on memory, and lost chunks read as the fill value")
        return array


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
    """A codec of Zarr version 3, for reading, with a bound on decompressed data."""

    codec: BytesBytesCodec
    config: dict[str, Any]

    is_fixed_size = False

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        size = math.prod(chunk_spec.shape) * chunk_spec.dtype.item_size
        data = await asyncio.to_thread(unpacked, self.config, chunk_bytes.as_numpy_array(), size)
        return chunk_spec.prototype.buffer.from_bytes(data)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Return the result of the wrapped codec."""
        return self.codec.compute_encoded_size(input_byte_length, chunk_spec)

    def to_dict(self) -> Any:
        """Return the description of the wrapped codec."""
        return self.codec.to_dict()


class _BoundedV2(numcodecs.abc.Codec):  # type: ignore[misc]
    """A compressor or a filter of Zarr version 2, for reading, with a bound on decompressed data."""

    codec_id = "distmm.bounded"

    def __init__(self, codec: Any, size: int) -> None:
        self.codec, self.size = codec, size

    def encode(self, buf: Any) -> Any:
        """Raise NotImplementedError: the array was opened for reading."""
        raise NotImplementedError("this array was opened for reading")

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decompress a chunk."""
        if self.codec.codec_id not in PACKED:
            return self.codec.decode(buf, out)
        return unpacked(self.codec.get_config(), buf, self.size)

    def get_config(self) -> Any:
        """Return the configuration of the wrapped codec."""
        return self.codec.get_config()


class _Whole(WrapperStore[Any]):
    """A store in which some keys have to exist."""

    def __init__(self, store: Any, expects: Callable[[str], bool]) -> None:
        super().__init__(store)
        self._expects = expects

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        """Read a value. Raise FileNotFoundError if it is missing and expected."""
        found = await super().get(key, *arguments, **options)
        if found is None and self._expects(key):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return found


class _RegularFiles(LocalStore):
    """The store of a folder. It reads only regular files."""

    def get_sync(self, key: str, **options: Any) -> Any:
        """Read a file. Zarr 3.1.6 added this method; earlier versions only call `get`."""
        self._check(key)
        return super().get_sync(key, **options)

    async def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        """Read a file."""
        self._check(key)
        return await super().get(key, *arguments, **options)

    def _check(self, key: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):  # Zarr handles missing chunks
            check_regular(self.root / key)


@dataclass(frozen=True)
class BFloat16(BaseFloat):  # type: ignore[type-arg]
    """Zarr's data type for bfloat16 of ml_dtypes: two bytes, little-endian."""

    dtype_cls = type(BFLOAT16)
    _zarr_v3_name: ClassVar[str] = "bfloat16"
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()
    endianness: Any = "little"

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return int(BFLOAT16.itemsize)

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """Return this type for a NumPy dtype."""
        if dtype != BFLOAT16:
            raise DataTypeValidationError(f"{dtype} is not bfloat16")
        return cls()

    def to_native_dtype(self) -> Any:
        """Return the NumPy dtype."""
        return BFLOAT16


def register_bfloat16() -> None:
    """Register the data type "bfloat16" of the Zarr extensions with Zarr. A second call does nothing."""
    if NO_TYPES:
        _warn(NO_TYPES, "bfloat16 arrays can be neither read nor written")
    elif BFloat16._zarr_v3_name not in data_type_registry.contents:
        data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)


def _warn(what: object, outcome: str) -> None:
    warnings.warn(
        f"Zarr {zarr.__version__} differs from the versions that distmm supports ({what}): {outcome}; install a "
        f"version of Zarr that distmm was tested with",
        RuntimeWarning,
        stacklevel=3,
    )
