"""Products on tensor cores of any GPU since Ampere, by `mma.sync`: float16, bfloat16, int8, and rounded float32.

Operands of 16 bits may have either axis contiguous. Those of 8 and of 32 bits must be k-major, since `ldmatrix`
transposes pairs of bytes only. The kernel is in `distmm_kernels.device_code.fragments`.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import ml_dtypes

from distmm_kernels.candidate import AMPERE, Candidate
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.gemm.aligned import AlignedKernel
from distmm_kernels.gemm.operands import Prepared
from distmm_kernels.gemm.register_tiled import RegisterTiledKernel
from distmm_kernels.kernel import Array
from distmm_kernels.layout.stack import Stack, distinct
from distmm_kernels.layout.vectors import has_vectors, in_vectors
from distmm_kernels.tiles.fragment_tiles import ITEMSIZE, MULTIPLICANDS, Multiplicand, tilings
from distmm_kernels.tiles.tiling import Tiling


class MmaSyncKernel(AlignedKernel, RegisterTiledKernel):
    """float16 and bfloat16 accumulated in float32, int8 in int32.

    Tensor cores truncate their sums. So each granule of k is a launch of its own, which adds the granule's sum to C by
    an addition that rounds to nearest.
    """

    name = "mma_sync"
    maker: ClassVar[str] = "distmm_kernels.device_code.fragments:source"
    takes_narrow = True
    granule = GRANULE
    kinds: ClassVar[dict[str, Multiplicand]] = MULTIPLICANDS

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self.kind: Multiplicand = self.kinds[self.dtype.name]

    def _left(self, a: Array) -> Array:
        any_axis = ITEMSIZE[self.kind] == 2  # may be contiguous
        if has_vectors(a, -1) or (any_axis and has_vectors(a, -2)):
            return a
        if any_axis and Stack.of(a).contiguous(-2):
            return in_vectors(a.swapaxes(-1, -2), self.device).swapaxes(-1, -2)
        return in_vectors(a, self.device)

    def _right(self, b: Array) -> Array:
        return self._left(b.swapaxes(-1, -2)).swapaxes(-1, -2)

    def _accumulate(self, a: Any, b: Any, c: Array | None, d: Array) -> None:
        k, c = a.shape[-1], self._loadable(c)
        for first in range(0, k, GRANULE):
            last = first + GRANULE
            parts = (a, b) if k <= GRANULE else (a[..., first:last], b[..., first:last, :])
            super()._accumulate(*parts, c, d)
            c = d

    def _tilings(self, a: Array, b: Array) -> tuple[Tiling, Tiling]:
        return tilings(self.kind, self.device.compute_capability, (has_vectors(a, -1), has_vectors(b, -2)))


class _RoundedKernel(MmaSyncKernel):
    """float32 operands, which `prepare_a` and `prepare_b` round to a narrower type."""

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self.reads = (f"float32 rounded to {self.kind}",)

    def _format(self, block: Array, operand: str) -> Prepared:
        own = distinct(block).astype(self.dtype, copy=False)
        narrow = own.astype(ml_dtypes.bfloat16) if self.kind == "bfloat16" else _to_tf32()(own)
        made = self._left(narrow) if operand == "A" else self._right(narrow)
        return Prepared(shape=block.shape, format=self.reads[0], made=made)

    def _accumulate(self, a: Prepared, b: Prepared, c: Array | None, d: Array) -> None:
        super()._accumulate(a.made, b.made, c, d)


class MmaSyncTf32Kernel(_RoundedKernel):
    """float32 operands rounded to nearest to 11 significant bits (TF32)."""

    name = "mma_sync_tf32"
    kinds: ClassVar[dict[str, Multiplicand]] = {"float32": "tfloat32"}


class MmaSyncBf16Kernel(_RoundedKernel):
    """float32 operands rounded to bfloat16."""

    name = "mma_sync_bf16"
    kinds: ClassVar[dict[str, Multiplicand]] = {"float32": "bfloat16"}


@functools.cache
def _to_tf32() -> Any:
    """Return CuPy's function that rounds float32 numbers to TF32: tensor cores would truncate them."""
    import cupy

    round_bits = 'unsigned bits; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x)); y = __uint_as_float(bits);'
    return cupy.ElementwiseKernel("float32 x", "float32 y", round_bits, "round_to_tf32")


def _on_fragments(kernel: type[MmaSyncKernel], idea: str, precision: str, prepared: float) -> Candidate:
    """Return the row of a kernel; ``prepared`` counts a copy of an operand whose rows are not aligned."""
    kinds = kernel.kinds
    return Candidate(
        kernel,
        f"{idea}tensor cores fed by ldmatrix",
        frozenset(kinds),
        precision,
        tile=(64, 128),
        capabilities=AMPERE,
        unit="mma_sync",
        in_place={"float16": "AB", "bfloat16": "AB", "int8": "A"},
        prepared=prepared,
    )


TABLE = (
    _on_fragments(MmaSyncBf16Kernel, "operands rounded to bfloat16, on ", "medium", 0.5),
    _on_fragments(MmaSyncTf32Kernel, "operands rounded to TF32, on ", "high", 1.0),
    _on_fragments(MmaSyncKernel, "", "highest", 1.0),
)
