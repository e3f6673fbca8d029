"""NVIDIA's cuBLAS, through CuPy's bindings. Its bits are not reproducible.

The library chooses tiles and split-K by the sizes and by the GPU, so its bits may depend on how k is cut. The
ladder of kernels is measured against it, and `select` chooses it where it is faster than our kernels.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from distmm_kernels.candidate import AMPERE, FLOATS, Candidate
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.launch.launches import CudaKernel, matrices
from distmm_kernels.layout.stack import VECTOR_BYTES, distinct
from distmm_kernels.layout.vectors import has_vectors, in_vectors

__all__ = ["CublasInt8Kernel", "CublasKernel", "CublasTf32Kernel"]

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
SUMS_IN_FLOAT32 = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION of cublasMath_t
ANY_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT
FOURS = 4  # int8 products need a multiple of this as k, and as the pitch of their int32 results (in elements)
COUNTS_BELOW = 2**31  # sizes and pitches are signed numbers of 32 bits
WORKSPACE = 1 << 25  # bytes that the library keeps on a Hopper GPU; on others it keeps less


class CublasKernel(CudaKernel):
    """Operands in their own type; products of 16-bit operands are accumulated in float32."""

    name = "cublas"
    granule = None
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
        total = d if direct else self._total(d, d.dtype if c is None else self.accumulator)
        if c is not None:
            total[...] = c
        for left, right, _, to in matrices(self._readable(a, "A"), self._readable(b, "B"), None, total):
            self._gemm(left, right, to, self._zero if c is None else self._one)
        if total is not d:
            d[...] = total

    def _depth(self, k: int) -> int:
        """Return the k that the library is called with."""
        return k

    def _writes(self, d: Array) -> bool:
        """Whether the library can write its result into this array."""
        return True

    def _total(self, d: Array, dtype: np.dtype[Any]) -> Array:
        """Allocate a result that the library can write."""
        return self._module.empty(d.shape, dtype)

    def _gemm(self, a: Array, b: Array, d: Array, beta: np.ndarray[Any, Any]) -> None:
        """Enqueue ``d = a @ b + beta * d`` on CuPy's current stream.

        The library is column-major and sees the transpose of each matrix, so the call computes D' = B' A'.
        """
        from cupy.cuda import cublas, get_cublas_handle

        *batch, m, n = d.shape
        (turn_a, pitch_a), (turn_b, pitch_b) = self._layout(a, "A"), self._layout(b, "B")
        step_a, step_b, step_d = (x.strides[0] // x.itemsize if batch else 0 for x in (a, b, d))
        kind, to = TYPES[self.dtype.name], TYPES[d.dtype.name]
        handle = get_cublas_handle()  # of this thread and device; each call sets the current stream
        mode = cublas.getMathMode(handle)
        # split-K adds its sums in float32, also if the result has 16 bits
        cublas.setMathMode(handle, SUMS_IN_FLOAT32)
        try:
            cublas.gemmStridedBatchedEx(
                handle, turn_b, turn_a, n, m, self._depth(a.shape[-1]),
                self._one.ctypes.data,
                b.data.ptr, kind, pitch_b, step_b,
                a.data.ptr, kind, pitch_a, step_a,
                beta.ctypes.data,
                d.data.ptr, to, d.strides[-2] // d.itemsize, step_d,
                math.prod(batch), self.arithmetic[self.accumulator.name], ANY_ALGORITHM,
            )  # fmt: skip
        finally:
            cublas.setMathMode(handle, mode)


class CublasTf32Kernel(CublasKernel):
    """float32 operands rounded to TF32."""

    name = "cublas_tf32"
    arithmetic: ClassVar[dict[str, int]] = {"float32": COMPUTE_32F_FAST_TF32}


class CublasInt8Kernel(CublasKernel):
    """int8 accumulated in int32.

    Tensor cores read operands that are k-major, with rows at multiples of 16 bytes. Other operands are copied. The
    library refuses most products whose k is no multiple of 4, so copies are padded with zeros, and k includes these.
    """

    name = "cublas_int8"

    def _readable(self, x: Array, operand: str) -> Array:
        rows = x if operand == "A" else x.swapaxes(-1, -2)
        if rows.shape[-1] % FOURS == 0 and has_vectors(rows, -1) and _layout(x) is not None:
            return x
        rows = in_vectors(rows, self.device)
        return rows if operand == "A" else rows.swapaxes(-1, -2)

    def _layout(self, x: Array, operand: str) -> tuple[int, int]:
        lines = x if operand == "A" else x.swapaxes(-1, -2)  # their k is contiguous
        pitch = lines.strides[-2] if lines.shape[-2] > 1 else lines.shape[-1]  # a single line may have any stride
        return AS_IT_IS if operand == "A" else TRANSPOSED, pitch + -pitch % VECTOR_BYTES

    def _depth(self, k: int) -> int:
        return k + -k % FOURS

    def _writes(self, d: Array) -> bool:
        columns: int = d.shape[-1]
        return columns % FOURS == 0

    def _total(self, d: Array, dtype: np.dtype[Any]) -> Array:
        *lines, n = d.shape
        return self._module.empty((*lines, n + -n % FOURS), dtype)[..., :n]


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


TABLE = (
    Candidate(
        CublasKernel,
        "NVIDIA's library",
        FLOATS,
        "highest",
        tile=(64, 64),
        unit={
            **dict.fromkeys(("float16", "bfloat16"), "tensor"),
            **dict.fromkeys(("float64", "complex128"), "fp64_tensor"),
        },
        workspace=WORKSPACE,
        sizes_below=COUNTS_BELOW,
    ),
    Candidate(
        CublasTf32Kernel,
        "NVIDIA's library, operands rounded to TF32",
        frozenset({"float32"}),
        "high",
        tile=(64, 64),
        capabilities=AMPERE,
        unit="tensor",
        workspace=WORKSPACE,
        sizes_below=COUNTS_BELOW,
    ),
    Candidate(
        CublasInt8Kernel,
        "NVIDIA's library",
        frozenset({"int8"}),
        "ieee",
        tile=(64, 64),
        capabilities=AMPERE,
        worth_it=frozenset(),  # by name only: a k that is no multiple of 4 has not been tried on a GPU
        unit="tensor",
        prepared=1.0,  # B in C order
        workspace=WORKSPACE,
        sizes_below=COUNTS_BELOW,
    ),
)
