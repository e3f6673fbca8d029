"""float32 products of halves, as in `emulated`, by the `mma.sync` kernel: on tensor cores of any GPU since Ampere."""

from __future__ import annotations

import functools

from distmm_kernels.candidate import AMPERE, FAST_TENSOR_CORES, Candidate
from distmm_kernels.device import Device
from distmm_kernels.emulation.splits import Parts
from distmm_kernels.gemm.emulated import FLOAT16_HALVES, TF32_HALVES, Fp16x3Kernel, Halves, Tf32x3Kernel
from distmm_kernels.gemm.mma_sync import fragment_loads
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.hopper_launch import NO_SCALES, Scales
from distmm_kernels.launch.launches import MAX_GRID_Y, Launch
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles.fragment_tiles import Multiplicand, tilings_of_halves
from distmm_kernels.tiles.tiling import tiling_for

__all__ = ["HalvesGemm", "MmaSyncFp16x3Kernel", "MmaSyncTf32x3Kernel"]


class HalvesGemm:
    """The kernel for products of halves on one device, called as `distmm_kernels.launch.hopper_launch.HopperGemm` is.

    Parameters
    ----------
    along_k
        Whether the halves of A, and those of B, are k-major.
    """

    def __init__(self, operand: Multiplicand, along_k: tuple[bool, bool], device: Device) -> None:
        self.operand, self.along_k, self.device = operand, along_k, device
        self._tilings = tilings_of_halves(operand, device.compute_capability, along_k)
        self._kept = functools.lru_cache(maxsize=1024)(self._launch)

    def __call__(
        self,
        a: tuple[Stack, ...],
        b: tuple[Stack, ...],
        c: Stack | None,
        d: Stack,
        scales: Scales = NO_SCALES,
    ) -> None:
        """Enqueue ``D = C + scales * (A_high B_high + A_low B_high + A_high B_low)`` on CuPy's current stream."""
        for first in range(0, d.matrices, MAX_GRID_Y):
            count = min(MAX_GRID_Y, d.matrices - first)
            a_parts = [self._operand(x, first, count, self.along_k[0]) for x in a]
            b_parts = [self._operand(x, first, count, self.along_k[1]) for x in b]
            added = None if c is None else _part(c, first, count)
            to = _part(d, first, count)
            factors = self._factors(scales, first, to)
            stacks = *a_parts, *b_parts, added, to, *factors
            vectors = to.has_vectors(-1)
            found = self._kept(tuple(x and x.at(0) for x in stacks), vectors)
            found(*(0 if x is None else x.address for x in stacks))

    def _launch(self, stacks: tuple[Stack | None, ...], vectors: bool) -> Launch:
        """Return the launch on stacks of these shapes and strides, at any addresses."""
        d = stacks[5]
        assert d is not None
        tiling = tiling_for(self._tilings, d.rows, d.columns, d.matrices, self.device.multiprocessors)
        width = tiling.widest if vectors and d.columns % tiling.widest == 0 else 1
        recipe = Recipe("distmm_kernels.device_code.fragments:source", (self.operand, tiling, width))
        blocks = -(-d.rows // tiling.rows) * -(-d.columns // tiling.columns), d.matrices
        return Launch(recipe, self.device, blocks, stacks)

    def _operand(self, x: Stack, first: int, count: int, along_k: bool) -> Stack:
        """Return matrices ``(k, rows)`` for the kernel, from halves with either axis contiguous."""
        part = _part(x, first, count)
        if not along_k:
            return part
        (matrices, rows, k), (step, pitch, itemsize) = part.shape, part.strides
        return part._replace(shape=(matrices, k, rows), strides=(step, itemsize, pitch))

    def _factors(self, scales: Scales, first: int, d: Stack) -> tuple[Stack | None, Stack | None]:
        """Return the factors of rows and of columns as matrices of D's size."""
        if not scales.rows:
            return None, None
        rows, columns = scales.rows + first * scales.row_step, scales.columns + first * scales.column_step
        return (
            Stack(rows, d.shape, (scales.row_step, 4, 0), 4),
            Stack(columns, d.shape, (scales.column_step, 0, 4), 4),
        )


def _part(x: Stack, first: int, count: int) -> Stack:
    """Return ``count`` matrices of a stack from number ``first`` on; a stack of one matrix is broadcast."""
    if x.matrices == 1:
        return x._replace(shape=(count, *x.shape[1:]), strides=(0, *x.strides[1:]))
    return x._replace(address=x.address + first * x.step, shape=(count, *x.shape[1:]))


@functools.cache
def halves_gemm(operand: Multiplicand, along_k: tuple[bool, bool], device: Device) -> HalvesGemm:
    """Return the GEMM for halves of this type and layout on a device."""
    return HalvesGemm(operand, along_k, device)


class MmaSyncFp16x3Kernel(Fp16x3Kernel):
    """Halves in float16, if the operands allow them."""

    name = "mma_sync_fp16x3"
    finishes = False

    def _gemm(self, a: Parts, b: Parts, to: Stack, adds: bool) -> HalvesGemm:
        return halves_gemm("float16" if a.format.scaled else "tfloat32", (a.k_major, b.k_major), self.device)


class MmaSyncTf32x3Kernel(MmaSyncFp16x3Kernel):
    """Halves in TF32: half as fast, and accurate for nearly any numbers."""

    name = "mma_sync_tf32x3"
    form = Tf32x3Kernel.form
    first = Tf32x3Kernel.first


def _halves(kernel: type[Fp16x3Kernel], of: str, kind: Multiplicand, prepared: float) -> Candidate:
    """Return the row of a kernel."""
    return Halves(
        kernel,
        f"three products of {of} halves, on tensor cores fed by ldmatrix",
        tile=(64, 64),
        loads=lambda problem: fragment_loads(tilings_of_halves(kind, (9, 0), (True, True))[0], problem),
        capabilities=AMPERE,
        worth_it=FAST_TENSOR_CORES,
        unit="mma_sync",
        prepared=prepared,
    )


TABLE = (
    _halves(MmaSyncFp16x3Kernel, "scaled float16", "float16", FLOAT16_HALVES),
    _halves(MmaSyncTf32x3Kernel, "TF32", "tfloat32", TF32_HALVES),
)
