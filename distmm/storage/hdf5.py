"""Datasets in HDF5 files, written ``file.h5`` or ``file.h5:/group/dataset``, and a bound on memory for their chunks.

HDF5's filters decompress a chunk to any length: 4 MB of gzip may become 4 GB before HDF5 compares the length with that
of a chunk. So chunks with gzip, shuffle and Fletcher-32, which h5py writes, are read without HDF5's filters and
decompressed here, without h5py's lock. The other filters of HDF5 and h5py have a header with the decompressed length,
which is checked. All other filters are refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import h5py
import numpy as np
from numcodecs.fletcher32 import Fletcher32
from numcodecs.shuffle import Shuffle
from numpy.typing import NDArray

from distmm.errors import InputError
from distmm.storage.flat import FlatTarget
from distmm.storage.matrix import FileMatrix, check_dtype, check_shape, only_matrix
from distmm.storage.output import Output
from distmm.storage.regular_files import check_regular
from distmm.storage.unpacking import SLACK, unpacked

# Largest number of soft links on the way to a dataset. More links are treated as a cycle.
MOST_LINKS = 16

Z = h5py.h5z
OWN = {Z.FILTER_DEFLATE, Z.FILTER_SHUFFLE, Z.FILTER_FLETCHER32}

# A chunk that HDF5 decompresses may have only one of these filters. h5py's LZF expands 3 bytes to at most 264, and no
# writer stores a compressed chunk that is larger than the uncompressed one.
PACKING = {Z.FILTER_DEFLATE, Z.FILTER_LZF, Z.FILTER_SZIP, Z.FILTER_SCALEOFFSET, Z.FILTER_NBIT}
NAMES = {Z.FILTER_LZF: "lzf", Z.FILTER_SZIP: "szip", Z.FILTER_SCALEOFFSET: "scaleoffset", Z.FILTER_NBIT: "nbit"}


def datasets(file: h5py.File) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every dataset of a file. A null dataset has an empty shape."""
    shapes: dict[str, tuple[int, ...]] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            shapes[f"/{name}"] = item.shape or ()

    file.visititems(visit)
    return shapes


def _open(file: str) -> h5py.File:
    check_regular(file)
    # HDF5 locks files even for reading. Read-only mounts and some network file systems refuse that lock.
    return h5py.File(file, "r", locking="best-effort")


def _dataset(opened: h5py.File, name: str) -> h5py.Dataset | None:
    """Return a dataset whose elements are in this file. None if there is no dataset of this name.

    Links are followed here, one by one. HDF5 itself would open any file of an external link with the user's rights.

    Raises
    ------
    InputError
        For an external link, external storage and a virtual dataset.
    """
    group, ahead = opened["/"], name.split("/")
    found: Any = group
    links = 0
    while ahead:
        part = ahead.pop(0)
        if part in ("", "."):
            continue
        if not isinstance(found, h5py.Group) or (link := found.get(part, getlink=True)) is None:
            return None
        if isinstance(link, h5py.ExternalLink):
            raise InputError(
                f"{opened.filename}:{name}: is a link to {link.path} in another file, {link.filename}, which is not "
                f"followed; give that file and dataset"
            )
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > MOST_LINKS:
                return None
            ahead = link.path.split("/") + ahead
            found = group if link.path.startswith("/") else found
        else:
            found = found[part]
    if not isinstance(found, h5py.Dataset):
        return None
    if found.external or found.is_virtual:
        kind = "external storage" if found.external else "a virtual dataset"
        raise InputError(
            f"{opened.filename}:{name}: is {kind}, whose elements are in other files, which are not read; copy the "
            f"elements into a new dataset, with h5py: file['copy'] = file['{name}'][...]"
        )
    return found


@dataclass(frozen=True)
class Hdf5Matrix(FileMatrix):
    """One dataset of an HDF5 file. ``path`` has the names of the file and the dataset."""

    dataset: str = field(kw_only=True)

    @classmethod
    def open(cls, file: str, dataset: str | None, any_shape: bool = False) -> Self:
        """Open a dataset and check it. `dataset` may be None if the file has only one matrix.

        With `any_shape` it may also be a stack or a vector.

        Raises
        ------
        InputError
            For a missing or damaged dataset, filters that are not supported, and elements in other files.
        """
        try:
            with _open(file) as opened:
                shapes = datasets(opened)
                name = dataset or only_matrix(file, shapes, "HDF5 file", ":")
                found = _dataset(opened, name)
                if found is None:
                    raise InputError(f"{file}: no dataset {name!r}; the file has {', '.join(shapes) or 'none'}")
                check_filters(f"{file}:{name}", found)
                shape, dtype, chunks = found.shape, found.dtype, found.chunks
        except OSError as error:
            raise InputError(f"{file}: not a readable HDF5 file: {error}; copy or write it again") from error
        path = f"{file}:{name}"
        if not any_shape:
            check_shape(path, shape)
        return cls(path, shape, check_dtype(path, dtype), chunks, file=file, dataset=name)

    def _read(self, *region: slice) -> NDArray[Any]:
        with _open(self.file) as opened:
            found = _dataset(opened, self.dataset)
            if found is None:
                raise OSError(f"the dataset {self.dataset} was removed")
            return np.asarray(read(found, region), dtype=self.dtype)


def check_replaceable(path: str, dataset: str | None) -> None:
    """Refuse to replace a file that has other contents than one matrix with the name of the new one."""
    contents: dict[str, bool] = {}  # every name, and whether it is a matrix or a group
    try:
        with _open(path) as file:

            def visit(name: str, link: Any) -> None:
                item = file[name] if isinstance(link, h5py.HardLink) else None
                contents[f"/{name}"] = isinstance(item, h5py.Group) or (
                    isinstance(item, h5py.Dataset) and item.ndim == 2
                )

            file.visititems_links(visit)
            names = list(datasets(file))
    except OSError as error:
        raise InputError(f"{path}: is not an HDF5 file ({error}), and is not replaced; remove it yourself") from error
    if len(names) != 1 or not all(contents.values()) or (dataset or names[0]).lstrip("/") != names[0].lstrip("/"):
        raise InputError(
            f"{path}: has {', '.join(contents) or 'no matrix'}, and the whole file would be lost; choose another file"
        )


def create(output: Output, dataset: str, shape: tuple[int, int], dtype: np.dtype[Any]) -> FlatTarget:
    """Create a file with one contiguous dataset, whose space is allocated, but without data.

    HDF5 allows only one writing process. A contiguous dataset consists of plain bytes at an offset, and nothing else in
    the file changes. So the workers write these bytes without HDF5.
    """
    if dtype.kind == "V":
        raise InputError(f"{output.path}: HDF5 files have no type {dtype}; write C to Zarr, or as another type")
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(output.draft, "x") as file:
        file.create_dataset(dataset, shape=shape, dtype=dtype, dcpl=layout)
    return reopen(output)


def reopen(output: Output) -> FlatTarget:
    """Open a draft that `create` has made, to continue writing."""
    stored = Hdf5Matrix.open(output.draft, None)
    with _open(output.draft) as file:
        offset = file[stored.dataset].id.get_offset() or 0  # None for a matrix without elements
    return FlatTarget(output, stored.shape, stored.dtype, offset)


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
