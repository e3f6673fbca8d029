"""A compressed chunk takes no more memory than its array's chunks may have, however much it would unpack to."""

from __future__ import annotations

import lzma
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import zarr

from distmm.checking.checksum import checksum
from distmm.errors import InputError
from distmm.storage import open_matrix
from distmm.storage.unpacking import unpacked
from tests.distmm.storage.samples import DTYPES, sample
from tests.tables import later


def bomb(codec: str, length: int) -> bytes:
    """A few kilobytes that unpack to `length` bytes; that of zstd does not say its length."""
    if codec != "zstd":
        return bytes(numcodecs.get_codec({"id": codec}).encode(bytes(length)))
    blocks = [min(1 << 17, length - at) for at in range(0, length, 1 << 17)]
    runs = [(2 | size << 3 | (n == len(blocks) - 1)).to_bytes(3, "little") + b"\0" for n, size in enumerate(blocks)]
    return bytes.fromhex("28b52ffd 0038") + b"".join(runs)


def peak_of(read: Callable[[], object]) -> int:
    """Peak memory in bytes until the bad chunk is refused."""
    tracemalloc.start()
    with pytest.raises(InputError, match=r"decompress to \d+ bytes or more|Destination buffer is too small"):
        read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


OF_3 = {"gzip": zarr.codecs.GzipCodec, "zstd": zarr.codecs.ZstdCodec, "blosc": zarr.codecs.BloscCodec}


@pytest.mark.parametrize(
    ("codec", "version"),
    later([(name, 2) for name in (*OF_3, "zlib", "bz2", "lzma", "lz4")] + [(name, 3) for name in OF_3], first=5),
)
def test_a_chunk_unpacks_to_no_more_than_a_chunk(codec: str, version: int, tmp_path: Path) -> None:
    values = sample()
    compressor = OF_3[codec]() if version == 3 else numcodecs.get_codec({"id": codec})
    path = tmp_path / "A.zarr"
    zarr.create_array(path, data=values, chunks=(13, 9), zarr_format=version, compressors=compressor)
    matrix, chunk = open_matrix(path), path / ("c/0/0" if version == 3 else "0.0")
    np.testing.assert_array_equal(matrix[...], values)
    if codec == "zstd":  # some writers leave out the length of the content
        chunk.write_bytes(bomb("zstd", values.nbytes))
        assert not matrix[...].any()
    chunk.write_bytes(bomb(codec, 1 << 26))
    assert peak_of(lambda: matrix[...]) < 1 << 25  # the dictionary of lzma takes 8 MiB


def test_chunks_inside_shards_are_bounded_too(tmp_path: Path) -> None:
    values = np.zeros((64, 64))
    gzip = zarr.codecs.GzipCodec()
    zarr.create_array(tmp_path / "A.zarr", data=values + 1, chunks=(64, 64), shards=(64, 64), compressors=gzip)
    matrix, shard = open_matrix(tmp_path / "A.zarr"), tmp_path / "A.zarr" / "c" / "0" / "0"
    np.testing.assert_array_equal(matrix[...], values + 1)
    inner = bomb("gzip", 1 << 26)
    index = np.array([0, len(inner)], "<u8").tobytes()
    shard.write_bytes(inner + index + checksum(np.frombuffer(index, "u1")).to_bytes(4, "little"))
    with pytest.raises(InputError, match="the gzip data decompress to"):
        matrix[...]


FILTERS: list[dict[str, Any]] = [
    {"compression": "gzip"},
    {"compression": "gzip", "shuffle": True, "fletcher32": True},
    {"shuffle": True},
    {"fletcher32": True},
    {"compression": "lzf", "shuffle": True},
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_hdf5_chunks_are_unpacked_as_hdf5_does(filters: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    values = sample(dtype=dtype)
    with h5py.File(tmp_path / "A.h5", "w") as file:
        filling = None if values.dtype.kind == "c" else 1
        made = file.create_dataset("A", values.shape, values.dtype, chunks=(4, 5), fillvalue=filling, **filters)
        made[:9] = values[:9]  # the last row of chunks is never written
        expected = made[...]
    matrix = open_matrix(tmp_path / "A.h5")
    for key in (np.s_[...], np.s_[2:11, 3:6], np.s_[5:6, 4:5], np.s_[1::3, ::4], np.s_[::-2, -1]):
        np.testing.assert_array_equal(matrix[key], expected[key])


def test_hdf5_integers_in_scale_and_offset_are_read(tmp_path: Path) -> None:
    values = sample(dtype="int64")
    with h5py.File(tmp_path / "A.h5", "w") as file:
        file.create_dataset("A", data=values, chunks=(4, 5), scaleoffset=0, shuffle=True)
    np.testing.assert_array_equal(open_matrix(tmp_path / "A.h5")[2:11], values[2:11])


@pytest.mark.parametrize("filters", FILTERS[:2])
def test_an_hdf5_chunk_of_gzip_unpacks_to_no_more_than_a_chunk(filters: dict[str, Any], tmp_path: Path) -> None:
    with h5py.File(tmp_path / "A.h5", "w") as file:
        made = file.create_dataset("A", (64, 64), "f8", chunks=(64, 64), **filters)
        packed = zlib.compress(bytes(1 << 26))
        made.id.write_direct_chunk((0, 0), packed, 4 if "fletcher32" in filters else 0)  # without its checksum
    assert peak_of(lambda: open_matrix(tmp_path / "A.h5")[...]) < 1 << 25


def test_an_hdf5_chunk_of_lzf_is_no_longer_than_a_plain_one(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "A.h5", "w") as file:
        made = file.create_dataset("A", (64, 64), "f8", chunks=(64, 64), compression="lzf")
        made.id.write_direct_chunk((0, 0), bytes(1 << 20))
    with pytest.raises(InputError, match="takes 1048576 bytes, and a chunk may have at most 131072"):
        open_matrix(tmp_path / "A.h5")[...]


def test_a_damaged_hdf5_chunk_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "A.h5", "w") as file:
        made = file.create_dataset("A", data=sample((64, 64)), chunks=(64, 64), fletcher32=True)
        packed = bytearray(made.id.read_direct_chunk((0, 0))[1])
        packed[5] ^= 1
        made.id.write_direct_chunk((0, 0), bytes(packed))
    with pytest.raises(InputError, match="cannot read"):
        open_matrix(tmp_path / "A.h5")[...]


def test_hdf5_filters_that_are_not_known_are_refused_by_name(tmp_path: Path) -> None:
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_chunk((4, 4))
    layout.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))  # Zstandard: a plug-in of HDF5
    with h5py.File(tmp_path / "A.h5", "w") as file:
        h5py.h5d.create(file.id, b"A", h5py.h5t.NATIVE_DOUBLE, h5py.h5s.create_simple((8, 8)), layout)
    with pytest.raises(InputError, match=r"the filter '32015', and distmm supports gzip.*h5repack -f GZIP=1"):
        open_matrix(tmp_path / "A.h5")


@pytest.mark.parametrize("codec", ["zlib", "blosc"])
def test_filters_of_zarr_2_unpack_to_no_more_than_a_chunk(codec: str, tmp_path: Path) -> None:
    values = sample((64, 64))
    packer = numcodecs.get_codec({"id": codec})
    zarr.create_array(
        tmp_path / "A.zarr", data=values, chunks=(64, 64), zarr_format=2, compressors=None, filters=[packer]
    )
    matrix = open_matrix(tmp_path / "A.zarr")
    np.testing.assert_array_equal(matrix[...], values)
    (tmp_path / "A.zarr" / "0.0").write_bytes(bomb(codec, 1 << 26))
    assert peak_of(lambda: matrix[...]) < 1 << 25


def test_a_filter_that_makes_long_texts_of_numbers_is_refused(tmp_path: Path) -> None:
    zarr.create_array(
        tmp_path / "A.zarr", data=sample(), chunks=(13, 9), zarr_format=2, compressors=None,
        filters=[numcodecs.AsType(encode_dtype="f4", decode_dtype="f8")],
    )  # fmt: skip
    open_matrix(tmp_path / "A.zarr")
    metadata = (tmp_path / "A.zarr" / ".zarray").read_text()
    (tmp_path / "A.zarr" / ".zarray").write_text(metadata.replace('"decode_dtype": "<f8"', '"decode_dtype": "<U99999"'))
    with pytest.raises(InputError, match="decode_dtype of its codec astype: has <U99999 elements"):
        open_matrix(tmp_path / "A.zarr")


def test_a_dictionary_of_lzma_is_bounded() -> None:
    raw = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]
    config = {"id": "lzma", "format": lzma.FORMAT_RAW, "filters": raw}
    with pytest.raises(ValueError, match="a dictionary of more than"):
        unpacked(config, lzma.compress(b"x", lzma.FORMAT_RAW, filters=[raw[0] | {"dict_size": 1 << 20}]), 1)
    large = lzma.compress(b"x", filters=raw)
    with pytest.raises(lzma.LZMAError, match=r"[Mm]emory"):
        unpacked({"id": "lzma"}, large, 1)
