"""Arrays of Zarr and HDF5 that a program has opened: they get the checks of matrices that are given by their path.

An open array would travel to the workers with the name under which it was opened. A relative name is another file in
another working folder, and a store in the memory of this process is empty in theirs. Zarr then reads the fill value.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field, fields
from typing import Any

import h5py
import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import FsspecStore, LocalStore, LoggingStore, ObjectStore, ZipStore

from distmm.errors import InputError
from distmm.storage.hdf5 import Hdf5Matrix
from distmm.storage.matrix import check_dtype, explained
from distmm.storage.object_store import is_url
from distmm.storage.zarr_chunks import Present
from distmm.storage.zarr_folder import ZarrMatrix, check_codecs, metadata_hash
from distmm.storage.zarr_internals import bounded, keys_of, opened_again, store_of

# Options that Zarr itself gives to a file system of fsspec. With others, such as keys, a URL alone is not enough.
OPTIONS = {"asynchronous", "loop", "skip_instance_cache"}


def by_path(source: Any, name: str) -> Any:
    """Return what the path of an open array would give. Other objects are returned unchanged.

    A Zarr array in a folder, or at a URL without options, becomes a `ZarrMatrix`. In another store it becomes an
    `OpenedZarr`. A dataset becomes an `Hdf5Matrix`, if its file was opened by its name for reading.

    Raises
    ------
    InputError
        If the path now leads to another array, or to none.
    """
    if isinstance(source, zarr.Array) and source.ndim:
        path = _place(source)
        return OpenedZarr.of(source, name) if path is None else _zarr(source, path, name)
    if isinstance(source, h5py.Dataset) and source and source.ndim and unsendable(source) is None:
        return _hdf5(source, name)
    return source


def unsendable(source: Any) -> str | None:
    """Say why other processes cannot open an array, and what to give instead. None if they can."""
    if isinstance(source, h5py.Dataset):
        file = source.file
        what = f"is the dataset {source.name} of {file.filename}"
        if file.mode != "r":
            return (
                f"{what}, which is open for writing ({file.mode}): workers cannot open it at the same time; close it "
                "and open it again with h5py.File(path, 'r'), or give its path to distmm.multiply"
            )
        if file.driver != "sec2":  # of the others, `_hdf5` cannot tell whether the file still has its name
            return (
                f"{what}, which the driver {file.driver!r} has opened: open it by its path, with h5py.File(path, 'r')"
            )
        return None
    array = source.array if isinstance(source, OpenedZarr) else source
    if not isinstance(array, zarr.Array):  # of a Dask array, or of an `OpenedZarr` in a worker: its bytes
        return None
    store = store_of(array)
    if in_memory(store):
        return "is a Zarr array in the memory of this process (memory://): give its elements, x[...], or store it"
    if isinstance(store, ZipStore) and not store.read_only:
        return (
            f"is a Zarr array in {store.path}, which is open for writing, and which workers would empty: close it, and "
            "open it again with zarr.storage.ZipStore(path, mode='r')"
        )
    return None


@dataclass(frozen=True)
class OpenedZarr:
    """A Zarr array in a store that has no path of its own. Each read checks that the array is still there.

    Attributes
    ----------
    array : zarr.Array or bytes
        Pickled in other processes, which open it for each read: an error then says what could not be read.
    path : str
        Name in messages.
    shape, dtype, chunks
        Of the array.
    metadata : str
        SHA-256 of its metadata.
    present : Present
        Which of its chunks existed.
    file : tuple of int, or None
        Size of its zip file in bytes, and the time of its last change in nanoseconds.
    """

    array: Any
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    metadata: str
    present: Present = field(repr=False)
    file: tuple[int, int] | None

    @classmethod
    def of(cls, array: Any, name: str) -> OpenedZarr:
        """Describe an array as it is now."""
        store = store_of(array)
        if isinstance(store, ZipStore) and store.read_only:
            array = _unzipped(array, os.path.abspath(store.path), name)
        path = f"{array.store}/{array.path}".rstrip("/")
        check_codecs(path, array.metadata.to_dict())
        dtype, present = check_dtype(path, array.dtype), Present.among(keys_of(array), array)
        facts = metadata_hash(array), present, _zip_file(array)
        return cls(array, path, tuple(array.shape), dtype, tuple(array.chunks), *facts)

    def __reduce__(self) -> Any:
        if (why := unsendable(self)) is not None:
            raise InputError(f"an operand {why}")
        array = self.array if isinstance(self.array, bytes) else pickle.dumps(self.array)
        return type(self), (array, *(getattr(self, one.name) for one in fields(self)[1:]))

    def __dask_tokenize__(self) -> Any:
        return self.path, self.metadata, self.present, self.file

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def missing(self) -> str | None:
        """Say how many chunks were missing. None if none was, or not known."""
        return self.present.missing(self.array.fill_value)

    def __getitem__(self, index: tuple[slice, ...]) -> NDArray[Any]:
        """Read a block.

        Raises
        ------
        InputError
            If the array, or a chunk, is not there any more, or cannot be read.
        """
        with explained(self.path, *index):
            array = pickle.loads(self.array) if isinstance(self.array, bytes) else self.array
            block = np.asarray(bounded(array, self.present.expects)[index], self.dtype)
            # A missing chunk reads as the fill value. So the block is valid only if the array is still there.
            if metadata_hash(opened_again(array)) != self.metadata or _zip_file(array) != self.file:
                raise OSError("the array has been replaced since it was opened")
        return block


def _place(array: Any) -> str | None:
    """Return the absolute path or the URL of a Zarr array. None if its store has none that says all."""
    store = store_of(array) if isinstance(array.store, LoggingStore) else array.store
    if isinstance(store, LocalStore):
        return os.path.abspath(os.path.join(store.root, array.path))
    if not isinstance(store, FsspecStore) or in_memory(store):
        return None
    path = f"{store.path.rstrip('/')}/{array.path}".rstrip("/")
    if "file" in _protocols(store.fs):
        return os.path.abspath(path)
    return store.fs.unstrip_protocol(path) if set(store.fs.storage_options) <= OPTIONS else None


def in_memory(store: Any) -> bool:
    """Whether a store is in the memory of this process, and empty elsewhere. The copy of a `MemoryStore` is not."""
    files = getattr(store, "fs", None)
    while files is not None:
        if "memory" in _protocols(files):
            return True
        files = getattr(files, "sync_fs", None) or getattr(files, "fs", None)  # what a wrapper or a cache stands for
    return isinstance(store, ObjectStore) and type(store.store).__name__ == "MemoryStore"


def _protocols(files: Any) -> set[str]:
    return {files.protocol} if isinstance(files.protocol, str) else set(files.protocol)


def _zip_file(array: Any) -> tuple[int, int] | None:
    """Return size and time of the zip file of an array that is open for reading."""
    store = store_of(array)
    if not (isinstance(store, ZipStore) and store.read_only):
        return None
    found = os.stat(store.path)
    return found.st_size, found.st_mtime_ns


def _unzipped(array: Any, path: str, name: str) -> Any:
    """Open the array of a zip file again, by the absolute path of the file."""
    try:
        return zarr.open_array(ZipStore(path, mode="r"), path=array.path, mode="r")
    except (OSError, zarr.errors.ArrayNotFoundError) as error:
        raise InputError(
            f"{name} is the Zarr array {array.path!r} of {path}, and there is none ({error}); {GONE}"
        ) from error


GONE = (
    "it was renamed, removed or replaced, or was opened by a relative path in another working folder: open it again, "
    "by an absolute path"
)


def _zarr(array: Any, path: str, name: str) -> ZarrMatrix:
    if not is_url(path) and not os.path.isdir(path):
        raise InputError(f"{name} is the Zarr array {path}, and there is no such folder; {GONE}")
    matrix = ZarrMatrix.open(path, any_shape=True)
    if matrix.metadata != metadata_hash(array):
        raise InputError(f"{name} is the Zarr array {path}, and another one has this name by now; {GONE}")
    return matrix


def _hdf5(dataset: h5py.Dataset, name: str) -> Hdf5Matrix:
    path = os.path.abspath(dataset.file.filename)
    try:
        same = os.path.samestat(os.stat(path), os.fstat(dataset.file.id.get_vfd_handle()))
    except FileNotFoundError:
        same = False
    if not same:
        raise InputError(f"{name} is the dataset {dataset.name} of {path}, and there is no such file now; {GONE}")
    return Hdf5Matrix.open(path, dataset.name, any_shape=True)
