"""NVIDIA's cuBLAS, through CuPy's bindings. Its bits are not reproducible.

The library chooses tiles and split-K by the sizes and by the GPU, so its bits may depend on how k is cut. The
ladder of kernels is measured against it, and `select` chooses it where it is faster than our kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from distmm_kernels.candidate import AMPERE, FLOATS, Candidate
from distmm_kernels.config import FLOAT8, Problem
from distmm_kernels.device import Device
from distmm_kernels.kernel import Array, Enqueue
from distmm_kernels.launch.driver import stream_of
from distmm_kernels.launch.launches import MAX_GRID_Y, CudaKernel, matrices
from distmm_kernels.layout.stack import VECTOR_BYTES, address, distinct
from distmm_kernels.layout.vectors import has_vectors, in_vectors

# cudaDataType, from NVIDIA's library_types.h
TYPES = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "int8": 3,
    "complex64": 4,
    "complex128": 5,
    "int32": 10,
    "bfloat16": 14,
}
# The following are in NVIDIA's cublas_api.h; CuPy has names for some of them.
AS_IT_IS, TRANSPOSED = 0, 1  # cublasOperation_t
COMPUTE_32F, COMPUTE_64F, COMPUTE_32I = 68, 70, 72  # cublasComputeType_t: float32 is never rounded to TF32
COMPUTE_32F_FAST_TF32 = 77
DEFAULT_MATH = 0  # CUBLAS_DEFAULT_MATH of cublasMath_t
SUMS_IN_FLOAT32 = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
ANY_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT
FOURS = 4  # int8 products need a multiple of this as k, and as the pitch of their int32 results (in elements)
SMALL = 2**22  # elements of an int8 B in C order that is not copied
# Multiply-adds with such a B that take the library 0.14 ms (H200, 2026-11-29). A copy of B takes the host 0.2 ms.
SHORT = 2**33
# The library (CUDA 13.0) takes such a B if A has a multiple of so many rows; it refuses 33 x 64 times 64 x 64, and
# 1000 x 1024 times 1024 x 1024.
ROWS = 32
COUNTS_BELOW = 2**31  # sizes and pitches are signed numbers of 32 bits
WORKSPACE = 1 << 25  # bytes that the library keeps on a Hopper GPU; on others it keeps less


class CublasKernel(CudaKernel):
    """Operands in their own type; products of 16-bit operands are accumulated in float32.

    Attributes
    ----------
    multiple
        The library is called with a k, and writes results with a number of columns, that are multiples of it.
    """

    name = "cublas"
    multiple: ClassVar[int] = 1
    granule = None
    compiled = False
    capturable = False  # CuPy refuses calls of the library during a capture
    takes_narrow = True
    arithmetic: ClassVar[dict[str, int]] = {
        "float32": COMPUTE_32F,
        "complex64": COMPUTE_32F,
        "float64": COMPUTE_64F,
        "complex128": COMPUTE_64F,
        "int32": COMPUTE_32I,
    }

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self._zero, self._one = np.zeros(1, self.accumulator), np.ones(1, self.accumulator)

    def _stores(self, dtype: np.dtype[Any]) -> bool:
        return dtype == self.accumulator or (dtype == self.dtype and dtype.kind != "i")

    def _format(self, block: Array, operand: str) -> Array:
        return self._readable(super()._format(block, operand), operand)

    def _readable(self, x: Array, operand: str) -> Array:
        """Return an operand that the library can read: one axis contiguous, the other with a leading dimension."""
        if _layout(x) is not None:
            return x
        # NumPy's function calls CuPy's for CuPy arrays
        return np.broadcast_to(self._module.ascontiguousarray(distinct(x)), x.shape)

    def _layout(self, x: Array, operand: str) -> tuple[int, int]:
        """Return operation (`AS_IT_IS` or `TRANSPOSED`) and leading dimension of an operand from `_readable`."""
        found = _layout(x)
        assert found is not None
        return found

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        direct = self._writes(d) and (c is None or d.dtype == self.accumulator)
        total, n = d, d.shape[-1]
        if not direct:  # a result that the library can write
            columns = n + -n % self.multiple
            total = self._module.empty((*d.shape[:-1], columns), d.dtype if c is None else self.accumulator)[..., :n]
        if c is not None:
            total[...] = c
        for left, right, to in matrices(self._readable(a, "A"), self._readable(b, "B"), total):
            call = self._call(left, right, to, self._zero if c is None else self._one)
            call(address(left), address(right), address(to))
        if total is not d:
            d[...] = total

    def _writes(self, d: Array) -> bool:
        found = _layout(d)
        return found is not None and found[0] == AS_IT_IS and d.shape[-1] % self.multiple == 0

    def direct(self, a: Array, b: Array, d: Array, symmetric: bool = False) -> Enqueue | None:
        """Return the library's call, if one call can read and write these arrays."""
        read = all(x is self._readable(x, name) and x.dtype == self.dtype for x, name in ((a, "A"), (b, "B")))
        several = d.ndim > 3 or math.prod(d.shape[:-2]) > MAX_GRID_Y
        if symmetric or not read or several or not (self._stores(d.dtype) and self._writes(d)):
            return None
        ((left, right, to),) = matrices(a, b, d)
        call, current = self._call(left, right, to, self._zero), self._module.cuda.get_current_stream

        def in_stream(of_a: int, of_b: int, of_d: int, stream: int) -> None:
            if current().ptr == stream:
                call(of_a, of_b, of_d)
                return
            with stream_of(stream, self.device.index):
                call(of_a, of_b, of_d)

        return in_stream

    def _call(self, a: Array, b: Array, d: Array, beta: np.ndarray[Any, Any]) -> Callable[[int, int, int], None]:
        """Return the library's call ``d = a @ b + beta * d`` on CuPy's current stream, for matrices with these layouts.

        It takes the addresses of a, b and d. The library is column-major and sees the transpose of each matrix, so the
        call computes D' = B' A'.
        """
        from cupy.cuda import cublas, get_cublas_handle

        *batch, m, n = d.shape
        (turn_a, pitch_a), (turn_b, pitch_b) = self._layout(a, "A"), self._layout(b, "B")
        step_a, step_b, step_d = (x.strides[0] // x.itemsize if batch else 0 for x in (a, b, d))
        kind, to = TYPES[self.dtype.name], TYPES[d.dtype.name]
        sizes = turn_b, turn_a, n, m, a.shape[-1] + -a.shape[-1] % self.multiple
        one, added, pitch_d = self._one.ctypes.data, beta.ctypes.data, d.strides[-2] // d.itemsize
        count, arithmetic = math.prod(batch), self.arithmetic[self.accumulator.name]
        # split-K adds its sums in float32, also if the result has 16 bits
        wanted = SUMS_IN_FLOAT32 if self.dtype.itemsize == 2 else DEFAULT_MATH

        def call(of_a: int, of_b: int, of_d: int) -> None:
            handle = get_cublas_handle()  # of this thread and device; each call sets the current stream
            mode = cublas.getMathMode(handle)
            if mode != wanted:
                cublas.setMathMode(handle, wanted)
            try:
                cublas.gemmStridedBatchedEx(
                    handle, *sizes,
                    one, of_b, kind, pitch_b, step_b, of_a, kind, pitch_a, step_a,
                    added, of_d, to, pitch_d, step_d, count, arithmetic, ANY_ALGORITHM,
                )  # fmt: skip
            finally:
                if mode != wanted:
                    cublas.setMathMode(handle, mode)

        return call


class CublasTf32Kernel(CublasKernel):
    """float32 operands rounded to TF32."""

    name = "cublas_tf32"
    arithmetic: ClassVar[dict[str, int]] = {"float32": COMPUTE_32F_FAST_TF32}


class CublasInt8Kernel(CublasKernel):
    """int8 accumulated in int32.

    Tensor cores read operands that are k-major, with rows at multiples of 16 bytes. Other operands are copied, but for
    a small B in C order where the library reads it by other instructions in less time than the host needs for a copy.
    It refuses most products whose k is no multiple of 4, so copies are padded with zeros, and k includes these.
    """

    name = "cublas_int8"
    multiple = FOURS

    def _readable(self, x: Array, operand: str) -> Array:
        rows = x if operand == "A" else x.swapaxes(-1, -2)
        if rows.shape[-1] % FOURS == 0 and has_vectors(rows, -1) and _layout(x) is not None:
            return x
        if operand == "B" and self._small(x):
            return x
        rows = in_vectors(rows, self.device)
        return rows if operand == "A" else rows.swapaxes(-1, -2)

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        if self._needs_copy(b, d):
            b = in_vectors(b.swapaxes(-1, -2), self.device).swapaxes(-1, -2)
        super()._accumulate(a, b, c, d)

    def direct(self, a: Array, b: Array, d: Array, symmetric: bool = False) -> Enqueue | None:
        """Return the library's call, if one call can read and write these arrays."""
        return None if self._needs_copy(b, d) else super().direct(a, b, d, symmetric)

    def _needs_copy(self, b: Array, d: Array) -> bool:
        """Whether a B in C order that `_readable` has left as it is has to be copied for this product."""
        return self._small(b) and not _in_place(d.shape[:-1], *b.shape[-2:])

    def _layout(self, x: Array, operand: str) -> tuple[int, int]:
        if operand == "B" and self._small(x):
            return AS_IT_IS, x.strides[-2]
        lines = x if operand == "A" else x.swapaxes(-1, -2)  # their k is contiguous
        pitch = lines.strides[-2] if lines.shape[-2] > 1 else lines.shape[-1]  # a single line may have any stride
        return AS_IT_IS if operand == "A" else TRANSPOSED, pitch + -pitch % VECTOR_BYTES

    def _small(self, b: Array) -> bool:
        """Whether a B in C order stays as it is until a product needs a copy."""
        return _small(*b.shape[-2:]) and has_vectors(b, -1)


def _small(k: int, n: int) -> bool:
    """Whether the library may read an int8 B of this size as it is, if its rows are vectors."""
    return k % FOURS == 0 and n % VECTOR_BYTES == 0 and k * n <= SMALL


def _in_place(lines: Sequence[int], k: int, n: int) -> bool:
    """Whether the library reads such a B ``(k, n)`` in less time than a copy takes; `lines` is ``(*batch, m)``."""
    return _small(k, n) and lines[-1] % ROWS == 0 and math.prod(lines) * k * n <= SHORT


def _int8_in_place(problem: Problem, by_columns: bool, result: np.dtype[Any]) -> bool:
    """Whether int8 operands are not copied."""
    as_it_is = by_columns or _in_place((*problem.batch, problem.m), problem.k, problem.n)
    return result == problem.accumulator and problem.k % VECTOR_BYTES == 0 and as_it_is


def _layout(x: Array) -> tuple[int, int] | None:
    """Return operation and leading dimension of matrices ``(*batch, rows, columns)``; None if it cannot read them."""
    rows, columns = x.shape[-2:]
    if any(stride % x.itemsize for stride in x.strides) or any(stride < 0 for stride in x.strides[:-2]):
        return None
    down, across = (stride // x.itemsize for stride in x.strides[-2:])
    if (across == 1 or columns == 1) and columns <= down < COUNTS_BELOW:
        return AS_IT_IS, down
    if (down == 1 or rows == 1) and rows <= across < COUNTS_BELOW:
        return TRANSPOSED, across
    return None


_LIBRARY = partial(Candidate, workspace=WORKSPACE, sizes_below=COUNTS_BELOW)
_TENSOR_CORES = partial(_LIBRARY, tile=(64, 64), capabilities=AMPERE, unit="tensor")

TABLE = (
    _LIBRARY(
        CublasKernel,
        "NVIDIA's library",
        FLOATS,
        "highest",
        tile=(32, 32),
        unit={
            **dict.fromkeys(("float16", "bfloat16", *(dtype.name for dtype in FLOAT8)), "tensor"),
            **dict.fromkeys(("float64", "complex128"), "fp64_tensor"),
        },
        direct=lambda *_: True,
        slow_if_odd={"float16": 0.18, "bfloat16": 0.18},
        slice=256,
    ),
    _TENSOR_CORES(
        CublasTf32Kernel,
        "NVIDIA's library, operands rounded to TF32",
        frozenset({"float32"}),
        "high",
        direct=lambda *_: True,
    ),
    _TENSOR_CORES(
        CublasInt8Kernel,
        "NVIDIA's library",
        frozenset({"int8"}),
        "ieee",
        worth_it=frozenset({(9, 0)}),  # it was measured there
        prepared=1.0,  # B in C order
        direct=_int8_in_place,
    ),
)
