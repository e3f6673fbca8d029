"""The interface of stored matrices: a shape, a dtype, and blocks that are read on demand."""

from __future__ import annotations

import math
import os
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from distmm.errors import InputError
from distmm.planning.problem import VIEWED
from distmm.storage import stamps


@dataclass(frozen=True)
class Matrix(ABC):
    """A lazy matrix on disk or in an object store. An array that a program has opened may be a stack or a vector.

    It has no open file. Each read opens the file, reads and closes it. So it pickles to a few hundred bytes, and a
    worker that can access the same path reads its blocks itself.

    Attributes
    ----------
    path : str
        Absolute path, or URL.
    shape : tuple of int
        ``(rows, columns)``, or ``(*batch, rows, columns)``, or ``(n,)``.
    dtype : numpy.dtype
        Boolean, integer, floating or complex, in native byte order.
    chunks : tuple of int or None
        Shape of the storage chunks. None if the format has no chunks.
    columns_first : bool
        Whether the elements are stored in Fortran order, and so are blocks that are read.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None
    columns_first: bool = field(default=False, kw_only=True)
    # Opening a path twice gives two different matrices, with different Dask keys: the file may have changed.
    opening: str = field(default_factory=lambda: uuid.uuid4().hex, kw_only=True, repr=False, compare=False)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix in memory, uncompressed."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Read a region, with NumPy's rules for integers, slices (any step) and ``...``.

        Returns
        -------
        numpy.ndarray
            A new array in memory.

        Raises
        ------
        IndexError
            For an index out of range, or of another kind.
        InputError
            If the stored data cannot be read.
        """
        region, rest = normalise(key, self.shape)
        if any(s.start == s.stop for s in region):
            return np.empty([len(range(s.start, s.stop, s.step)) for s in region], self.dtype)[rest]
        with explained(self.path, *region):
            block = self._read(*region)
            self._check()
        return block[rest]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self.path}: a matrix on disk cannot become a NumPy array without a copy")
        return np.asarray(self[...], dtype=dtype)

    def fingerprint(self) -> dict[str, Any]:
        """Return facts, as JSON, that are the same for a copy. No elements are read.

        Formats add their own facts, such as the hash of the metadata.
        """
        chunks = None if self.chunks is None else list(self.chunks)
        return {"path": self.path, "shape": list(self.shape), "dtype": self.dtype.name, "chunks": chunks}

    def stamp(self) -> str | None:
        """Return a hash that differs after any write to the files. None if the store has no such facts.

        A copy or a rename may change it, too, while `fingerprint` stays the same.
        """
        return None

    def missing(self) -> str | None:
        """Say which part of the data is missing, and reads as the fill value. None if nothing is missing."""
        return None

    def pieces(self, rows: slice, cols: slice, most: int) -> list[tuple[slice, slice]] | None:
        """Cut a region, of steps 1, into parts of at most `most` bytes, which threads can read concurrently.

        None if a single read is faster: for compressed chunks, and for a library with a global lock.
        """
        return None

    def read_into(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        """Fill a block in C order with one of the `pieces`. Call `check` after the last piece."""
        with explained(self.path, rows, cols):
            self._fill(rows, cols, block)

    def check(self, rows: slice, cols: slice) -> None:
        """Raise InputError if the matrix was replaced, so that `read_into` may have read another matrix."""
        with explained(self.path, rows, cols):
            self._check()

    def _fill(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        block[...] = self._read(rows, cols)

    def _check(self) -> None:
        """Raise OSError if the matrix was replaced during a read. Formats whose reads detect that do nothing."""
        return

    @abstractmethod
    def _read(self, *region: slice) -> NDArray[Any]:
        """Return a new array of ``self.dtype``. The slices are ascending, not empty, and within the shape."""


@dataclass(frozen=True)
class FileMatrix(Matrix):
    """A matrix in one file, `file`. Its path may also name a dataset, or a shape and type."""

    file: str = field(kw_only=True)

    def stamp(self) -> str:
        """Hash what the file system says of the file."""
        return stamps.of_files([(self.file, os.stat(self.file))])


@contextmanager
def explained(path: str, *region: slice) -> Iterator[None]:
    """Raise InputError with the region and the host for any error of a read.

    The library's error appears only in the text. Dask pickles an error together with its causes. If one of them cannot
    be unpickled, as Zarr's ArrayNotFoundError cannot, the client gets a bare Exception instead.
    """
    try:
        yield
    except Exception as error:  # the libraries raise a dozen types of errors for damaged or missing data
        where = ", ".join(f"{s.start}:{s.stop}" for s in region)
        needs = "must reach the store with its keys" if "://" in path else "must see the same path"
        told = InputError(
            f"{path}: cannot read [{where}] on {socket.gethostname()}: {type(error).__name__}: {error}; each worker "
            f"{needs}, and the data must be whole: copy it again if it is damaged"
        )
        try:
            raise told from None
        finally:
            told.__context__ = None


def stripes(rows: slice, cols: slice, itemsize: int, most: int) -> list[tuple[slice, slice]]:
    """Cut a region into ranges of rows of at most `most` bytes, but at least one row each; none of an empty region."""
    if rows.stop <= rows.start or cols.stop <= cols.start:
        return []
    height = max(1, most // ((cols.stop - cols.start) * itemsize))
    return [(slice(i, min(i + height, rows.stop), 1), cols) for i in range(rows.start, rows.stop, height)]


def normalise(key: Any, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice | int, ...]]:
    """Split a basic index into the region to read, and an index of the block that was read.

    Storage formats support only ascending slices. So a descending slice is read in ascending order and then reversed.
    An integer is read as one row or column, and its dimension is then dropped.

    Returns
    -------
    region : tuple of slice
        Ascending slices within the shape.
    rest : tuple
        The index for the block that was read.

    Raises
    ------
    IndexError
        For an index out of range, too many indices, or an index that is neither an integer nor a slice.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    for index in keys:
        if isinstance(index, bool) or not (index is Ellipsis or isinstance(index, (int, np.integer, slice))):
            raise IndexError(f"matrices on disk take integers, slices and '...', not {type(index).__name__}: {index!r}")
    _ = np.broadcast_to(False, shape)[tuple(keys)]  # NumPy refuses what is out of range, and too many indices
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        keys[at : at + 1] = [slice(None)] * (len(shape) + 1 - len(keys))
    keys += [slice(None)] * (len(shape) - len(keys))
    read: list[slice] = []
    rest: list[slice | int] = []
    for index, length in zip(keys, shape, strict=True):
        span = range(length)[index]  # an integer, or a range
        if isinstance(span, int):
            read.append(slice(span, span + 1, 1))
            rest.append(0)
            continue
        ascending = span if span.step > 0 else span[::-1]
        read.append(slice(ascending[0], ascending[-1] + 1, ascending.step) if span else slice(0, 0, 1))
        rest.append(slice(None, None, 1 if span.step > 0 else -1))
    return tuple(read), tuple(rest)


def check_dtype(path: str, dtype: Any) -> np.dtype[Any]:
    """Return a dtype in native byte order. Raise InputError if distmm cannot multiply it."""
    dtype = np.dtype(dtype)
    if dtype != ml_dtypes.bfloat16 and (dtype.kind not in "biufc" or dtype.char in "gG"):
        other = "convert it to a boolean, integer, floating (16, 32, 64 bit) or complex (64, 128 bit) type"
        if dtype == np.dtype("V2"):
            other = "if it was bfloat16, whose type .npy files do not keep, " + VIEWED
        raise InputError(f"{path}: has {dtype} elements, which cannot be multiplied; {other}")
    return dtype.newbyteorder("=")


def check_shape(path: str, shape: Any) -> tuple[int, int]:
    """Return ``(rows, columns)``. Raise InputError if the shape is not that of a matrix."""
    sides = () if shape is None else tuple(shape)
    if len(sides) != 2:
        raise InputError(
            f"{path}: has shape {sides}, {len(sides)} dimensions, and a matrix has 2; "
            f"reshape it (a vector becomes (1, n) or (n, 1)), or use distmm.matmul in Python for stacks of matrices"
        )
    rows, columns = sides
    return int(rows), int(columns)


def only_matrix(path: str, shapes: dict[str, tuple[int, ...]], what: str, separator: str) -> str:
    """Return the name of the only matrix among named arrays. If there is not exactly one, raise InputError."""
    matrices = [name for name, shape in sorted(shapes.items()) if len(shape) == 2]
    if len(matrices) != 1:
        found = ", ".join(f"{name} {shape}" for name, shape in sorted(shapes.items())) or "nothing"
        example = f"{path}{separator}{(matrices or ['name'])[0]}"
        raise InputError(f"{path}: this {what} has {found}; name the matrix that you mean, as in {example}")
    return matrices[0]
