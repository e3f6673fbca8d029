"""Chunks of HDF5 datasets, with a bound on the memory that they take.

HDF5's filters decompress a chunk to any length: 4 MB of gzip may become 4 GB before HDF5 compares the length with that
of a chunk. So chunks with gzip, shuffle and Fletcher-32, which h5py writes, are read without HDF5's filters and
decompressed here, without h5py's lock. The other filters of HDF5 and h5py have a header with the decompressed length,
which is checked. All other filters are refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from numcodecs.fletcher32 import Fletcher32
from numcodecs.shuffle import Shuffle
from numpy.typing import NDArray

from distmm.errors import InputError
from distmm.storage.unpacking import SLACK, unpacked

Z = h5py.h5z
OWN = {Z.FILTER_DEFLATE, Z.FILTER_SHUFFLE, Z.FILTER_FLETCHER32}

# A chunk that HDF5 decompresses may have only one of these filters. h5py's LZF expands 3 bytes to at most 264, and no
# writer stores a compressed chunk that is larger than the uncompressed one.
PACKING = {Z.FILTER_DEFLATE, Z.FILTER_LZF, Z.FILTER_SZIP, Z.FILTER_SCALEOFFSET, Z.FILTER_NBIT}
NAMES = {Z.FILTER_LZF: "lzf", Z.FILTER_SZIP: "szip", Z.FILTER_SCALEOFFSET: "scaleoffset", Z.FILTER_NBIT: "nbit"}


def filters(dataset: h5py.Dataset) -> list[tuple[int, tuple[int, ...], str]]:
    """Return number, parameters and name of each filter, in the order in which they were applied."""
    layout = dataset.id.get_create_plist()
    found = (layout.get_filter(i) for i in range(layout.get_nfilters()))
    return [(code, tuple(values), name.decode(errors="replace")) for code, _, values, name in found]


def check_filters(path: str, dataset: h5py.Dataset) -> None:
    """Refuse a dataset whose chunks may decompress to any length.

    Raises
    ------
    InputError
        For an unknown filter, for two compression filters, and for parameters that do not match the chunk.
    """
    pipeline = filters(dataset)
    codes = [code for code, *_ in pipeline]
    unknown = [name or str(code) for code, _, name in pipeline if code not in OWN | set(NAMES)]
    wrong = ""
    if unknown:
        known = ", ".join(("gzip", "shuffle", "fletcher32", *NAMES.values()))
        wrong = f"the filter {unknown[0]!r}, and distmm supports {known}"
    elif len(set(codes) & PACKING) > 1:
        wrong = "more than one compression filter"
    elif Z.FILTER_DEFLATE in codes and not _plain(dataset):
        wrong = f"gzip, and elements whose form in the file differs from {dataset.dtype} in memory"
    for code, values, _ in pipeline:
        if code in (Z.FILTER_SCALEOFFSET, Z.FILTER_NBIT) and math.prod(values[2:5:2]) > _most(dataset):
            wrong = f"a {NAMES[code]} filter for {values[2]} elements, more than a chunk has"
    if wrong:
        raise InputError(
            f"{path}: its chunks have {wrong}: their decompressed size would not be bounded; copy the dataset with "
            f"h5repack -f GZIP=1 {dataset.file.filename} copy.h5, and give the copy"
        )


def read(dataset: h5py.Dataset, region: tuple[slice, ...]) -> NDArray[Any]:
    """Read a region of a dataset. The slices are ascending, not empty, and within the shape.

    Raises
    ------
    ValueError
        For a chunk that would decompress to more than twice the size of its elements.
    """
    pipeline = filters(dataset)
    if not {code for code, *_ in pipeline} <= OWN or not _plain(dataset) or not pipeline:
        for at in _chunks(dataset, region) if pipeline else ():
            _check_header(dataset, at, [code for code, *_ in pipeline])
        return np.asarray(dataset[region])
    block = np.empty([len(range(s.start, s.stop, s.step)) for s in region], dataset.dtype)
    for at in _chunks(dataset, region):
        common = [_common(part, low, edge) for part, low, edge in zip(region, at, dataset.chunks, strict=True)]
        here, inside = (tuple(slices) for slices in zip(*common, strict=True))
        if dataset.id.get_chunk_info_by_coord(at).byte_offset is None:
            block[here] = dataset.fillvalue
        else:
            elements = np.frombuffer(_unpacked(dataset, pipeline, *dataset.id.read_direct_chunk(at)), dataset.dtype)
            block[here] = elements.reshape(dataset.chunks)[inside]
    return block


def _plain(dataset: h5py.Dataset) -> bool:
    """Whether elements have the same form in the file and in memory, unlike 24-bit integers and records with gaps."""
    kind = dataset.id.get_type()
    return bool(kind == h5py.h5t.py_create(dataset.dtype, logical=True))


def _chunks(dataset: h5py.Dataset, region: tuple[slice, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the first index along each dimension of each chunk that intersects a region."""
    edges = (range(s.start // edge * edge, s.stop, edge) for s, edge in zip(region, dataset.chunks, strict=True))
    return itertools.product(*edges)


def _common(part: slice, low: int, edge: int) -> tuple[slice, slice]:
    """Return two slices for the indices of `part` that are in the chunk at `low`: in the block, and in the chunk."""
    count = len(range(part.start, part.stop, part.step))
    first, last = (min(count, max(0, -(-(at - part.start) // part.step))) for at in (low, low + edge))
    start = part.start + first * part.step - low
    return slice(first, last), slice(start, start + (last - first) * part.step, part.step)


def _unpacked(dataset: h5py.Dataset, pipeline: list[tuple[int, tuple[int, ...], str]], skipped: int, data: Any) -> Any:
    """Reverse the filters of a chunk, except those that were `skipped`, by a bit for each."""
    size = math.prod(dataset.chunks) * dataset.dtype.itemsize
    for place, (code, values, _) in reversed(list(enumerate(pipeline))):
        if skipped >> place & 1:
            continue
        if code == Z.FILTER_DEFLATE:
            data = unpacked({"id": "zlib"}, data, size)
        elif code == Z.FILTER_FLETCHER32:
            data = Fletcher32().decode(data)
        elif values[0] > 1:
            data = Shuffle(values[0]).decode(np.frombuffer(data, np.uint8))
    return data


def _most(dataset: h5py.Dataset) -> int:
    """Return the largest number of bytes that a chunk may decompress to."""
    return 2 * int(math.prod(dataset.chunks) * dataset.dtype.itemsize) + SLACK


def _check_header(dataset: h5py.Dataset, at: tuple[int, ...], codes: list[int]) -> None:
    """Refuse a chunk that is too large, by its compressed length and the decompressed length in its header."""
    stored = dataset.id.get_chunk_info_by_coord(at)
    if stored.byte_offset is None:
        return
    length = int(stored.size)
    if Z.FILTER_SZIP in codes and not stored.filter_mask:
        length = int.from_bytes(dataset.id.read_direct_chunk(at)[1][:4], "little")
    if length > _most(dataset):
        raise ValueError(f"the chunk at {at} takes {length} bytes, and a chunk may have at most {_most(dataset)}")
