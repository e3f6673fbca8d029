"""``.npy`` files, read and written block by block."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from distmm.errors import InputError
from distmm.storage.flat import FlatMatrix, FlatTarget
from distmm.storage.matrix import check_dtype, check_shape
from distmm.storage.output import Output
from distmm.storage.regular_files import check_regular

# One thread at a time parses a header. NumPy uses `ast`, which fails in CPython before 3.11.8 if several threads parse
# at the same time: "SystemError: AST constructor recursion depth mismatch".
_parsing = threading.Lock()


def open_npy(path: str) -> FlatMatrix:
    """Open a file in C or Fortran order, and check its header and its length.

    Raises
    ------
    InputError
        For a file that is not a whole ``.npy`` file of a matrix of numbers.
    """
    try:
        check_regular(path)
        with _parsing:  # unlike numpy.load, this neither unpickles objects nor opens zip archives of arrays
            found = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # NumPy raises half a dozen types of errors for damaged headers
        raise InputError(
            f"{path}: not a readable .npy file: {error}; write it with numpy.save (no pickled objects), or copy it "
            f"again"
        ) from error
    shape, dtype = check_shape(path, found.shape), check_dtype(path, found.dtype)
    first = not found.flags.c_contiguous
    return FlatMatrix(
        path, shape, dtype, None, file=path, offset=found.offset, stored=found.dtype, columns_first=first
    )  # fmt: skip


def create(output: Output, shape: tuple[int, int], dtype: np.dtype[Any]) -> FlatTarget:
    """Write the header of a file in C order, and set the file's length. No elements are written."""
    if dtype.kind == "V":
        raise InputError(f"{output.path}: .npy files have no type {dtype}; write C to Zarr, or as another type")
    np.lib.format.open_memmap(output.draft, mode="w+", dtype=dtype, shape=shape, version=(1, 0))
    return reopen(output)


def reopen(output: Output) -> FlatTarget:
    """Open a draft that `create` has made, to continue writing."""
    stored = open_npy(output.draft)
    return FlatTarget(output, stored.shape, stored.dtype, stored.offset)
