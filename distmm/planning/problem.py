"""The product itself: shapes, element type, accumulator, and how the operands' batch dimensions broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeVar

import ml_dtypes
import numpy as np

from distmm.errors import InputError

# What C is as the product of A with its own transpose (BLAS: SYRK), or with its conjugate transpose (HERK).
Symmetry = Literal["symmetric", "hermitian"]

# Operands of 8-bit floats, whose product is float32.
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)

Along = TypeVar("Along")  # what belongs to a dimension

# NumPy's files keep types of other packages as bytes without a type.
VIEWED = "give x.view(ml_dtypes.bfloat16) of the loaded array x, or store it as float32"


@lru_cache(maxsize=256)
def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """Type in which a product with result type `dtype` is accumulated over all of k.

    float16, bfloat16 and 8-bit floats accumulate in float32; integers of at most 32 bits in int32 and the other
    integers in int64, whose two's complement arithmetic gives the same bits after the final cast; bool in int64,
    because a count of 2**32 must not look like zero.

    Raises
    ------
    InputError
        For types without a matrix product here: object, strings, dates, structured and extended-precision types.
    """
    dtype = np.dtype(dtype).newbyteorder("=")
    if dtype.kind in "iu":
        return np.dtype(np.int32 if dtype.itemsize <= 4 else np.int64)
    if dtype.kind == "b":
        return np.dtype(np.int64)
    if dtype in (np.float16, ml_dtypes.bfloat16, *FLOAT8):
        return np.dtype(np.float32)
    if dtype in (np.float32, np.float64, np.complex64, np.complex128):
        return dtype
    other = "cast them first, for example with .astype('float64')"
    if dtype == np.dtype("V2"):
        other = "if they were bfloat16 in a .npy file, " + VIEWED
    raise InputError(f"matrices of dtype {dtype} cannot be multiplied here; {other}")


def result_type(*types: Any) -> np.dtype:
    """Return `numpy.result_type`, where 8-bit floats count as float32: that is what NumPy makes of their products."""
    return np.result_type(*(np.dtype(np.float32) if x in FLOAT8 else x for x in types))


@dataclass(frozen=True)
class Problem:
    """One product: A ``(*batch, m, k)`` times B ``(*batch, k, n)`` in result type `dtype`.

    `a_batch` and `b_batch` are the operands' own batch dimensions, right-aligned and broadcast as in `numpy.matmul`.
    If there is a `symmetry`, B is the (conjugate) transpose of A, and not a second operand. `narrow` is the
    type of A if both operands are of `FLOAT8`.
    """

    m: int
    k: int
    n: int
    dtype: np.dtype
    a_batch: tuple[int, ...] = ()
    b_batch: tuple[int, ...] = ()
    symmetry: Symmetry | None = None
    narrow: np.dtype | None = None

    def __post_init__(self) -> None:
        accumulator_dtype(self.dtype)  # raises for a type that has no product
        self.batch  # noqa: B018  raises where the batch dimensions do not broadcast
        if self.symmetry is not None and (self.m, self.a_batch) != (self.n, self.b_batch):
            raise InputError(f"a {self.symmetry} product is square: it cannot be {self.m} x {self.n}")

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """Broadcast batch dimensions, those of C."""
        try:
            return np.broadcast_shapes(self.a_batch, self.b_batch)
        except ValueError:
            raise InputError(f"batch dimensions {self.a_batch} of A and {self.b_batch} of B do not broadcast") from None

    @property
    def multiplied(self) -> np.dtype:
        """Type that decides which kernels can multiply: that of the operands if it is `narrow`, else of the result."""
        return self.dtype if self.narrow is None else self.narrow

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of one element of C while it is summed over k."""
        return accumulator_dtype(self.dtype).itemsize

    @property
    def element_flops(self) -> int:
        """Floating-point (or integer) operations of one element of C: 2k, four times as many for complex numbers."""
        return 2 * self.k * (4 if self.dtype.kind == "c" else 1)

    @property
    def flops(self) -> int:
        """Operations of the product: those of all elements of C, or of one triangle of a symmetric product."""
        elements = self.m * self.n if self.symmetry is None else self.m * (self.m + 1) // 2
        return elements * math.prod(self.batch) * self.element_flops

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of C."""
        return (*self.batch, self.m, self.n)


def operand_batch(index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Batch block index of an operand with batch dimensions `shape` that meets C's batch block `index`.

    Dimensions that the operand lacks are dropped. Those of length 1 are broadcast: their only block is block 0.
    """
    own = index[len(index) - len(shape) :]
    return tuple(0 if length == 1 else i for i, length in zip(own, shape, strict=True))


def along_operand(
    operand: Literal["A", "B"], each: Sequence[Along], batch: tuple[int, ...], broadcast: Along
) -> tuple[Along, ...]:
    """Return what belongs to the dimensions of A or B, given what belongs to the batch dimensions of C, m, k and n.

    The operand has batch dimensions `batch`. To those of length 1, which are broadcast, belongs `broadcast`.
    """
    *stacks, m, k, n = each
    own = zip(batch, stacks[len(stacks) - len(batch) :], strict=True)
    return *(broadcast if length == 1 else x for length, x in own), *((m, k) if operand == "A" else (k, n))


def operand_cuts(
    operand: Literal["A", "B"], cuts: Sequence[tuple[int, ...]], batch: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return the edges of blocks of an operand with batch dimensions `batch`, for cuts along (batch), m, k and n."""
    return along_operand(operand, cuts, batch, (1,))
