"""What one block product is: its sizes, its type, and the type it is accumulated in."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

__all__ = ["PRECISIONS", "SUPPORTED", "TILE", "Problem", "compute_dtype"]

SUPPORTED: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(name) for name in ("float32", "float64", "int32", "int64", "complex64", "complex128")
)

# Every kernel of today computes in the operands' own IEEE type, so each of the four is met by all of them.
PRECISIONS = ("highest", "high", "medium", "ieee")

# Rows and columns of what one thread block owns of C: 32 is a warp's width, and 32 x 32 the most threads of a block.
# Cuts of k on multiples of it leave the bits of every kernel's result as they are.
TILE = 32

# Integers narrower than 32 bits widen; unsigned ones use the signed type of their width: two's complement gives
# the same low bits, so the cast in `finish` restores NumPy's wrap-around. A bool counts its true terms in int64.
_WIDER = {
    **dict.fromkeys(("int8", "int16", "uint8", "uint16", "uint32"), "int32"),
    "uint64": "int64",
    "bool": "int64",
    "float16": "float32",
}


def compute_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Type that a product of this result type is accumulated in.

    Parameters
    ----------
    dtype
        Type of the product as NumPy would give it. Byte order is ignored: the answer is always native.

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
    native = np.dtype(_WIDER.get(name, name)) if given.kind in "biufc" else given
    if native not in SUPPORTED:
        raise TypeError(
            f"no kernel multiplies matrices of dtype {given}: convert them first, with .astype to one of "
            f"{', '.join(supported.name for supported in SUPPORTED)} (or float16, bool, or a narrower integer)"
        )
    return native


@dataclass(frozen=True)
class Problem:
    """One block product ``(*batch, m, k) @ (*batch, k, n)``, its operands already of a supported type.

    Raises
    ------
    ValueError
        If a size is negative.
    TypeError
        If a size is no integer, or ``dtype`` is not in ``SUPPORTED``.
    """

    m: int
    k: int
    n: int
    dtype: np.dtype[Any]
    batch: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # object.__setattr__: the class is frozen, and callers may write np.float32 or a NumPy integer.
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        object.__setattr__(self, "batch", tuple(operator.index(size) for size in self.batch))
        for name in ("m", "k", "n"):
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if min(self.m, self.k, self.n, *self.batch) < 0:
            raise ValueError(f"a size is negative in {self}; every size must be 0 or more")
        if self.dtype not in SUPPORTED:
            raise TypeError(
                f"{self.dtype} is not a type that kernels compute in; "
                f"use compute_dtype({str(self.dtype)!r}) and convert the operands to it"
            )

    def __str__(self) -> str:
        batch = f"{'x'.join(map(str, self.batch))} x " if self.batch else ""
        return f"{batch}({self.m}, {self.k}) @ ({self.k}, {self.n}) {self.dtype}"
