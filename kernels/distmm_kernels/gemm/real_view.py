"""Complex products as one real product, with four real multiplications for each complex one.

`distmm_kernels.layout.real_view` describes the real matrices. Each part of an element of C is a sum of real products
in ascending k, with the accuracy, the guards, the granules and the bits of the real kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmm_kernels.candidate import AMPERE, HOPPER, Candidate
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.gemm.aligned import AlignedKernel
from distmm_kernels.gemm.emulated import Fp16x3Kernel
from distmm_kernels.gemm.guarded import WORKSPACE
from distmm_kernels.gemm.operands import Prepared
from distmm_kernels.kernel import Array
from distmm_kernels.launch.launches import CudaKernel
from distmm_kernels.layout.real_view import REALS, as_real, doubled, in_rows
from distmm_kernels.layout.stack import distinct
from distmm_kernels.symmetric import Symmetry
from distmm_kernels.tiles.hopper_tiles import COORDINATES


class ComplexChainKernel(CudaKernel):
    """complex64 and complex128 by the fastest chain of real multiply-adds: each part of an element is such a chain."""

    name = "complex_chain"

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self._real = self._kernel(Problem(problem.m, problem.k, problem.n, REALS[self.dtype.name]), device)
        self.reads = f"{self.dtype} as {self._real.reads[0]}", *self.reads

    def _kernel(self, problem: Problem, device: Device) -> Any:
        """Return the kernel that multiplies real numbers."""
        from distmm_kernels.select import select  # which imports all kernels

        return select(problem, device, "ieee", reproducible=True)

    def prepare_both(self, block: Array, symmetry: Symmetry, *, wait: bool = True) -> tuple[Any, Any]:
        """Prepare A and its transpose, which is conjugated while it becomes a real matrix."""
        a = self.prepare_a(block, wait=wait)
        with self._on_device():
            b = self._format(self._to_device(block).swapaxes(-1, -2), "B", symmetry == "hermitian")
            if wait:
                self._complete()
        return a, b

    def _format(self, block: Array, operand: str, conjugated: bool = False) -> Prepared:
        own = distinct(block).astype(self.dtype, copy=False)
        real = as_real(in_rows(own, self.device)) if operand == "A" else doubled(own, self.device, conjugated)
        return Prepared(shape=block.shape, format=self.reads[0], made=self._real._format(real, operand))

    def _accumulate(self, a: Any, b: Any, c: Array | None, d: Array) -> None:
        self._in_reals(self._real._accumulate, a, b, c, d)

    def _triangle(self, a: Any, b: Any, c: Array | None, d: Array) -> bool:
        self._in_reals(self._real._triangle, a, b, c, d)
        return False

    def _in_reals(self, multiply: Callable[..., Any], a: Any, b: Any, c: Array | None, d: Array) -> None:
        a, b = (x if isinstance(x, Prepared) else self._format(x, name) for x, name in ((a, "A"), (b, "B")))
        added = None if c is None else as_real(in_rows(c, self.device))
        multiply(a.made, b.made, added, as_real(d))


class ComplexFp16x3Kernel(ComplexChainKernel, AlignedKernel):
    """complex64 by three products of float16 halves."""

    name = "complex_fp16x3"
    granule = GRANULE // 2
    capturable = False  # the host reads guards
    guarded = True

    def _kernel(self, problem: Problem, device: Device) -> Fp16x3Kernel:
        real = Fp16x3Kernel(problem, device)
        # An H200 takes 1.6 ms by TF32 halves and 1.3 by the library for half zeros at n = 2048, which is 2**35 real
        # multiply-adds, and 6.4 and 10.2 ms at n = 4096, which is 2**38.
        real.library_below = 2**36
        return real

    @property
    def patience(self) -> int:
        """That of the real kernel."""
        return int(self._real.patience)

    def declines(self, steps: int) -> bool:
        """Whether the library is faster: see `GuardedKernel.declines`."""
        return bool(self._real.declines(4 * steps))

    def look(self, a: Array, b: Array) -> None:
        """Look for the guards of a sample of rows and columns, as real matrices."""
        self._real.look(a, b, lambda block, operand: self._format(block, operand).made)


TABLE = (
    Candidate(
        ComplexChainKernel,
        "one real product by the fastest chain",
        frozenset(REALS),
        "ieee",
        tile=(64, 32),
        capabilities=AMPERE,
        unit={"complex128": "fp64_tensor"},
        prepared=3.0,  # A with k as its slow axis; B as a real matrix, twice as large as B
        passes=(24, 0),  # of complex64: A: 8 in, 8 out; B: 8 in, 16 out
    ),
    Candidate(
        ComplexFp16x3Kernel,
        "one real product by scaled float16 halves, on tensor cores",
        frozenset({"complex64"}),
        "highest",
        tile=(128, 64),
        capabilities=HOPPER,
        unit="tensor",
        prepared=4.001,  # B as a real matrix, twice as large as B, and its halves; A takes less
        workspace=WORKSPACE,
        triangles=frozenset({"complex64"}),
        passes=(44, 0),  # A: 8 in, 8 out; B: 8 in, 16 out, two times 16 in, 16 out
        sizes_below=COORDINATES // 2,
    ),
)
