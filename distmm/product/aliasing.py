"""Aliasing: arrays that share a file, a Zarr array or memory, and arrays whose elements share memory."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from itertools import product
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from dask.blockwise import Blockwise
from dask.highlevelgraph import MaterializedLayer

from distmm.product.array_types import is_dask, package_of

# A file (its path or URL), a store or a memory, and an array whose addresses are the places of the elements in it.
# None: the elements may be anywhere in it.
Part = tuple[Hashable, np.ndarray | None]

# Steps in which NumPy looks for a common element of two arrays. Views of one array take a few.
MOST_STEPS = 10_000


def overlap(first: Any, second: Any) -> bool:
    """Whether two arrays share elements. A Dask array shares the elements of all arrays that its graph reads."""
    pairs = product(_sources(first), _sources(second))
    return any(_meet(*parts) for x, y in pairs for parts in product(_parts(x), _parts(y)))


def _meet(first: Part, second: Part) -> bool:
    (place, at), (other_place, other_at) = first, second
    if _identity(place) != _identity(other_place):
        return False
    try:
        steps: Any = MOST_STEPS  # NumPy's type hints have -1 and 0 only
        return at is None or other_at is None or np.shares_memory(at, other_at, max_work=steps)
    except np.exceptions.TooHardError:  # they may
        return True


def lies_in(array: Any, path: str) -> bool:
    """Whether elements of an array are in the file, folder or URL `path`, whatever the names of it."""
    from distmm.storage.object_store import is_url, within  # late: imports h5py and Zarr

    if is_url(path):
        return any(within(place, path) for place in _places(array) if is_url(place))
    if not os.path.exists(path):
        return False
    whole = _identity(path)
    for place in _places(array):
        place = os.path.realpath(place.removeprefix("file://"))
        if whole in (_identity(place), *(_identity(str(above)) for above in Path(place).parents)):
            return True
    return False


def coincide(first: Any, second: Any) -> bool:
    """Whether two NumPy or CuPy arrays have the same memory, shape, strides and type. False for memory maps."""
    if isinstance(first, np.ndarray) and next(_mapped(first), None) is not None:
        return False
    return _view(first) is not None and _view(first) == _view(second)


def same(first: Any, second: Any) -> bool:
    """Whether two arrays have the same elements in the same places, as far as one sees without reading them."""
    if is_dask(first) and is_dask(second):
        return bool(first.name == second.name)
    views = [view for view in map(_view, (first, second)) if view is not None]
    return first is second or (len(views) == 2 and views[0] == views[1])


def transposes(first: Any, second: Any) -> bool:
    """Whether one array is the transpose of the other in the last two dimensions, as `same` sees it."""
    if is_dask(first) and is_dask(second):
        from distmm.graph.block_arrays import transposed  # late: arrays in memory need no Dask

        both = (transposed(first), second), (transposed(second), first)
        return any(inner is not None and same(inner, other) for inner, other in both)
    return _view(first) is not None and first.ndim > 1 and same(first.swapaxes(-1, -2), second)


def _view(array: Any) -> tuple[Any, ...] | None:
    """Return address, shape, strides and type of a NumPy or CuPy array; None for other arrays."""
    for name in ("__array_interface__", "__cuda_array_interface__"):
        if package_of(array) in ("numpy", "cupy") and hasattr(array, name):
            return getattr(array, name)["data"][0], array.shape, array.strides, array.dtype
    return None


def repeats(array: Any) -> bool:
    """Whether two elements of an array may share memory, as in a broadcast view."""
    if not (isinstance(array, np.ndarray) or hasattr(array, "__cuda_array_interface__")) or 0 in array.shape:
        return False
    reach = array.itemsize  # bytes that the dimensions with smaller strides span
    for stride, n in sorted((abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False


def _sources(array: Any) -> Iterator[Any]:
    """Yield the arrays that a Dask array's graph reads, or else the array itself."""
    if not is_dask(array):
        yield array
        return
    for layer in array.dask.layers.values():
        if isinstance(layer, MaterializedLayer) and len(layer.mapping) == 1:
            yield from layer.mapping.values()
        if isinstance(layer, Blockwise):
            yield from (source for source, axes in layer.indices if axes is None)


def _places(array: Any) -> Iterator[str]:
    """Yield the paths and URLs of the files and folders that an array is in."""
    yield from (place for x in _sources(array) for place, _ in _parts(x) if isinstance(place, str))


def _parts(array: Any) -> Iterator[Part]:
    """Yield the places of an array's elements in memory, files and stores, if other arrays can share them."""
    if isinstance(array, np.ndarray):
        yield ("host memory",), array
        yield from _mapped(array)
        return
    if package_of(array) == "cupy":  # one address is one place on all GPUs
        yield ("GPU memory",), _addresses(array.data.ptr, array)
        return
    if package_of(array) not in ("distmm", "h5py", "zarr"):
        return
    import h5py  # late: the imports take a second, and a caller with such an array has imported them already
    import zarr

    from distmm.storage.matrix import Matrix
    from distmm.storage.opened import OpenedZarr

    if isinstance(array, OpenedZarr):
        array = array.array
    if isinstance(array, Matrix):
        yield getattr(array, "file", array.path), None
    elif isinstance(array, zarr.Array):
        yield _zarr(array), None
    elif isinstance(array, h5py.Dataset):
        header = h5py.h5o.get_info(array.id).addr  # its address differs for each dataset of a file
        yield array.file.filename, _addresses(header, np.empty(1, "u1"))


def _mapped(array: np.ndarray) -> Iterator[Part]:
    """Yield the places in the file that a memory map, or a view of one, has."""
    base: Any = array
    while base is not None:
        if isinstance(base, np.memmap) and isinstance(base.base, mmap) and base.filename is not None:
            first = array.ctypes.data - base.ctypes.data + base.offset
            yield os.fspath(base.filename), _addresses(first, array)
        base = getattr(base, "base", None)


def _addresses(first: int, like: Any) -> np.ndarray:
    """Return an array of the shape and strides of `like` whose first element is at the address `first`.

    Nothing may read its elements. NumPy refuses the address 0, at which a file begins, so a constant is added to all.
    """
    view = {"data": (2**40 + first, True), "typestr": f"|V{like.dtype.itemsize}", "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=view | {"shape": like.shape, "strides": like.strides}))


def _zarr(array: Any) -> Hashable:
    """Return the identity of a Zarr array: its folder, its URL, or its store and path."""
    import zarr

    from distmm.storage.zarr_internals import dictionary_of, store_of

    store = store_of(array)
    if isinstance(store, zarr.storage.LocalStore):
        return os.path.join(str(store.root), array.path)
    if isinstance(store, zarr.storage.FsspecStore):
        return str(os.path.join(store.fs.unstrip_protocol(store.path), array.path)).rstrip("/")
    if isinstance(store, zarr.storage.ZipStore):
        return _identity(os.fspath(store.path)), array.path
    return id(dictionary_of(store)), array.path


def _identity(place: Hashable) -> Hashable:
    """Return the device and inode of a file or folder, so that all its names compare equal. Others are returned."""
    if not isinstance(place, str):
        return place
    place = place.removeprefix("file://")
    try:
        found = os.stat(place)
    except OSError:
        return place
    return found.st_dev, found.st_ino
