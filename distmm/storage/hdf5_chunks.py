"""Packed chunks of HDF5 datasets, unpacked into no more memory than a chunk may take.

HDF5's own filters unpack whatever a chunk says: 4 MB of gzip become 4 GB before HDF5 compares them with the chunk. So
chunks with gzip, shuffle and Fletcher-32, which h5py writes, are read packed and unpacked here, outside of h5py's lock.
Of the other filters of HDF5 and h5py a header says how much they will take. All other filters are refused.
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

__all__ = ["check_filters", "read"]

Z = h5py.h5z
OWN = {Z.FILTER_DEFLATE, Z.FILTER_SHUFFLE, Z.FILTER_FLETCHER32}

# A chunk that HDF5 unpacks itself may be packed once. h5py's LZF makes 264 bytes of 3 at most, and no writer keeps a
# packed chunk that is larger than the plain one.
PACKING = {Z.FILTER_DEFLATE, Z.FILTER_LZF, Z.FILTER_SZIP, Z.FILTER_SCALEOFFSET, Z.FILTER_NBIT}
NAMES = {Z.FILTER_LZF: "lzf", Z.FILTER_SZIP: "szip", Z.FILTER_SCALEOFFSET: "scaleoffset", Z.FILTER_NBIT: "nbit"}


def filters(dataset: h5py.Dataset) -> list[tuple[int, tuple[int, ...], str]]:
    """Return number, parameters and name of each filter, in the order in which a chunk was packed."""
    layout = dataset.id.get_create_plist()
    found = (layout.get_filter(i) for i in range(layout.get_nfilters()))
    return [(code, tuple(values), name.decode(errors="replace")) for code, _, values, name in found]


def check_filters(path: str, dataset: h5py.Dataset) -> None:
    """Refuse a dataset whose chunks may unpack to any length.

    Raises
    ------
    InputError
        For a filter that is not known, two that pack, and one whose parameters do not belong to the chunk.
    """
    pipeline = filters(dataset)
    codes = [code for code, *_ in pipeline]
    unknown = [name or str(code) for code, _, name in pipeline if code not in OWN | set(NAMES)]
    wrong = ""
    if unknown:
        known = ", ".join(("gzip", "shuffle", "fletcher32", *NAMES.values()))
        wrong = f"the filter {unknown[0]!r}, and known are {known}"
    elif len(set(codes) & PACKING) > 1:
        wrong = "more than one packing filter"
    elif Z.FILTER_DEFLATE in codes and not _plain(dataset):
        wrong = f"gzip, and elements that lie in the file in another way than as {dataset.dtype} in memory"
    for code, values, _ in pipeline:
        if code in (Z.FILTER_SCALEOFFSET, Z.FILTER_NBIT) and math.prod(values[2:5:2]) > _most(dataset):
            wrong = f"a {NAMES[code]} filter for {values[2]} elements, more than a chunk has"
    if wrong:
        raise InputError(
            f"{path}: its chunks have {wrong}: what they unpack to would not be bounded; copy the dataset with "
            f"h5repack -f GZIP=1 {dataset.file.filename} copy.h5, and name the copy"
        )


def read(dataset: h5py.Dataset, rows: slice, cols: slice) -> NDArray[Any]:
    """Read a region of a dataset; both slices are not empty, within the shape, and step upwards.

    Raises
    ------
    ValueError
        For a chunk that would unpack to more than twice its length.
    """
    pipeline = filters(dataset)
    if not {code for code, *_ in pipeline} <= OWN or not _plain(dataset) or not pipeline:
        for at in _chunks(dataset, rows, cols) if pipeline else ():
            _check_header(dataset, at, [code for code, *_ in pipeline])
        return np.asarray(dataset[rows, cols])
    sides = [len(range(s.start, s.stop, s.step)) for s in (rows, cols)]
    block = np.empty((sides[0], sides[1]), dataset.dtype)
    for at in _chunks(dataset, rows, cols):
        (here, inside), (across, along) = (
            _common(part, low, edge) for part, low, edge in zip((rows, cols), at, dataset.chunks, strict=True)
        )
        if (data := _packed(dataset, at)) is None:
            block[here, across] = dataset.fillvalue
        else:
            elements = np.frombuffer(_unpacked(dataset, pipeline, *data), dataset.dtype)
            block[here, across] = elements.reshape(dataset.chunks)[inside, along]
    return block


def _plain(dataset: h5py.Dataset) -> bool:
    """Whether the elements lie in the file as in memory: not so integers of 24 bits, or records with gaps."""
    kind = dataset.id.get_type()
    return bool(kind == h5py.h5t.py_create(dataset.dtype, logical=True))


def _chunks(dataset: h5py.Dataset, rows: slice, cols: slice) -> Iterator[tuple[int, int]]:
    """Yield the first row and column of each chunk that a region meets."""
    edges = [range(s.start // edge * edge, s.stop, edge) for s, edge in zip((rows, cols), dataset.chunks, strict=True)]
    return itertools.product(edges[0], edges[1])


def _common(part: slice, low: int, edge: int) -> tuple[slice, slice]:
    """Say where the indices of `part` from `low` to ``low + edge`` are in the block that is read, and in the chunk."""
    count = len(range(part.start, part.stop, part.step))
    first, last = (min(count, max(0, -(-(at - part.start) // part.step))) for at in (low, low + edge))
    start = part.start + first * part.step - low
    return slice(first, last), slice(start, start + (last - first) * part.step, part.step)


def _packed(dataset: h5py.Dataset, at: tuple[int, int]) -> tuple[int, bytes] | None:
    """Return a chunk as it lies in the file, with the filters that it was packed without; None if it is not there."""
    if dataset.id.get_chunk_info_by_coord(at).byte_offset is None:
        return None
    skipped, data = dataset.id.read_direct_chunk(at)
    return skipped, data


def _unpacked(dataset: h5py.Dataset, pipeline: list[tuple[int, tuple[int, ...], str]], skipped: int, data: Any) -> Any:
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
    return 2 * int(math.prod(dataset.chunks) * dataset.dtype.itemsize) + SLACK


def _check_header(dataset: h5py.Dataset, at: tuple[int, int], codes: list[int]) -> None:
    """Refuse a chunk that would take more than it may, by its packed length and the length that its header declares."""
    stored = dataset.id.get_chunk_info_by_coord(at)
    if stored.byte_offset is None:
        return
    length = int(stored.size)
    if Z.FILTER_SZIP in codes and not stored.filter_mask:
        length = int.from_bytes(dataset.id.read_direct_chunk(at)[1][:4], "little")
    if length > _most(dataset):
        raise ValueError(f"the chunk at {at} takes {length} bytes, and a chunk has {_most(dataset)} at most")
