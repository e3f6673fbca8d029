"""A block product: its sizes, the type of its operands, and the type of its accumulator."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

# Types of accumulators.
SUPPORTED: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name) for name in ("float32", "float64", "int32", "int64", "complex64", "complex128")
)

# Two 8-bit floats. A product may have one of each.
FLOAT8: tuple[np.dtype[Any], ...] = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))

# Types of operands that are narrower than their accumulator. Tensor cores read them without conversion.
NARROW: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name) for name in ("float16", ml_dtypes.bfloat16, *FLOAT8, "int8", "uint8", "bool")
)

# Their accuracy: kernels/README.md, "How a kernel is chosen".
PRECISIONS = ("highest", "high", "medium", "ieee")

# Rows and columns of the tile of C that one thread block owns in the textbook kernel: 32 is a warp's width, and a
# block has at most 32 x 32 threads. Their results have the same bits for any cuts of k at multiples of it.
TILE = 32

# Integers narrower than 32 bits widen; unsigned ones use the signed type of their width: two's complement gives
# the same low bits, so the cast in `finish` restores NumPy's wrap-around. A bool product counts its true terms in
# int64.
_WIDER = {
    **dict.fromkeys(("int8", "int16", "uint8", "uint16", "uint32"), "int32"),
    "uint64": "int64",
    "bool": "int64",
    **dict.fromkeys(("float16", "bfloat16", *(dtype.name for dtype in FLOAT8)), "float32"),
}


def compute_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Type in which a product with this result type is accumulated.

    Parameters
    ----------
    dtype
        Type of the product as NumPy would give it. Byte order is ignored: the returned type is always native.

    Returns
    -------
    numpy.dtype
        One of ``SUPPORTED``.

    Raises
    ------
    TypeError
        If products of this type cannot be accumulated in any supported type.
    """
    given = np.dtype(dtype)
    name = given.newbyteorder("=").name
    native = np.dtype(_WIDER.get(name, name)) if given.kind in "biufc" or given in NARROW else given
    if native not in SUPPORTED:
        raise TypeError(
            f"no kernel multiplies matrices of dtype {given}: convert them first, with .astype to one of "
            f"{', '.join(supported.name for supported in SUPPORTED)} (or bfloat16, float16, bool, a narrower integer)"
        )
    return native


def operand_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Type in which kernels receive the operands of a product with this result type.

    Parameters
    ----------
    dtype
        Type of the product as NumPy would give it.

    Returns
    -------
    numpy.dtype
        The type itself if it is in ``NARROW``, else `compute_dtype` of it.

    Raises
    ------
    TypeError
        If products of this type cannot be accumulated in any supported type.
    """
    native = np.dtype(dtype).newbyteorder("=")
    return native if native in NARROW else compute_dtype(native)


def result_type(*types: np.dtype[Any]) -> np.dtype[Any]:
    """Return `numpy.result_type`, where 8-bit floats count as float32: that is what NumPy makes of their products."""
    return np.result_type(*(np.dtype(np.float32) if x in FLOAT8 else x for x in types))


@functools.lru_cache(maxsize=4096)
def working_type(a: np.dtype[Any], b: np.dtype[Any], out: np.dtype[Any], k: int) -> np.dtype[Any]:
    """Return the type in which kernels take the operands of a product whose result has the type ``out``.

    It is int64 if sums of integers may exceed int32, and ``out`` has more bits than int32 or is a float.
    """
    dtype = result_type(a, b)
    if dtype.kind in "iu" and (out.kind in "fc" or out.itemsize > 4):
        bits = 8 * dtype.itemsize - (dtype.kind == "i")
        return np.dtype(np.int64) if k << 2 * bits >= 2**31 else operand_dtype(dtype)
    return a if a in FLOAT8 and b in FLOAT8 else operand_dtype(dtype)


@dataclass(frozen=True)
class Problem:
    """One block product ``(*batch, m, k) @ (*batch, k, n)``.

    Attributes
    ----------
    m, k, n
        Sizes, 0 or more.
    dtype
        Type of both operands, one of ``SUPPORTED`` or ``NARROW``.
    batch
        Sizes of the batch dimensions.

    Raises
    ------
    ValueError
        If a size is negative.
    TypeError
        If a size is no integer, or ``dtype`` is in neither ``SUPPORTED`` nor ``NARROW``.
    """

    m: int
    k: int
    n: int
    dtype: np.dtype[Any]
    batch: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Convert arguments such as np.float32 or a NumPy integer. The class is frozen, hence object.__setattr__.
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        object.__setattr__(self, "batch", tuple(operator.index(size) for size in self.batch))
        for name in ("m", "k", "n"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if min(self.m, self.k, self.n, *self.batch) < 0:
            raise ValueError(f"a size is negative in {self}; every size must be 0 or more")
        if self.dtype not in SUPPORTED + NARROW:
            raise TypeError(
                f"{self.dtype} is not a type that kernels take operands in; "
                f"use operand_dtype({str(self.dtype)!r}) and convert the operands to it"
            )

    @property
    def accumulator(self) -> np.dtype[Any]:
        """Type of c and d: float32 for narrow floats, int32 for 8-bit integers, int64 for bool, else the operands'."""
        return compute_dtype(self.dtype)

    @property
    def operations(self) -> int:
        """Operations of one matrix of the batch: 2 for each multiply-add, 8 of complex numbers."""
        return (8 if self.dtype.kind == "c" else 2) * self.m * self.k * self.n

    def __str__(self) -> str:
        batch = f"{'x'.join(map(str, self.batch))} x " if self.batch else ""
        return f"{batch}({self.m}, {self.k}) @ ({self.k}, {self.n}) {self.dtype}"
