"""The CPU kernel: BLAS for floating point, and our own tiled loops for integers, which BLAS does not multiply."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from distmm_kernels.candidate import ALL, Candidate
from distmm_kernels.kernel import Array, Kernel


class CpuKernel(Kernel):
    """BLAS for floats and complex numbers (in BLAS's order of additions), tiled loops with wrap-around for integers."""

    name = "cpu"
    device_kind = "cpu"
    granule = None  # BLAS may add in another order for another k
    empty: Callable[..., Array] = staticmethod(np.empty)  # makes the arrays of results
    _module = np

    def _to_device(self, block: Array) -> Array:
        return block.get() if hasattr(block, "get") else np.asarray(block)

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _complete(self) -> None:
        """Nothing is asynchronous here."""

    def _format(self, block: Array, operand: str) -> Array:
        block = block.astype(self.dtype, copy=False)
        if self.dtype.kind == "i":  # packed tile by tile, with any strides
            return block if block.flags.aligned else block.copy()
        if not block.flags.aligned:
            # An unaligned buffer came over a network. Order "K" keeps a transpose as it is: for small blocks BLAS adds
            # terms in an order that depends on the order of storage, and bits must not depend on where a block came
            # from.
            block = block.copy(order="K")
        return block if _blas_can_read(block) else np.ascontiguousarray(block)

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self.empty(shape, dtype)

    def _writes(self, d: Array) -> bool:
        return True

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        if self.dtype.kind == "i":
            from distmm_kernels.device_code.cpu_integers import accumulate  # floats need no Numba

            d[...] = 0 if c is None else c
            accumulate(a, b, d)
        else:
            np.matmul(a, b, out=d)
            if c is not None:
                np.add(c, d, out=d)


def _blas_can_read(block: Array) -> bool:
    """BLAS needs one unit stride and a positive leading dimension; NumPy multiplies other layouts by a plain loop."""
    (rows, columns), (row, column) = block.shape[-2:], block.strides[-2:]
    item = block.itemsize
    in_c_order = column == item and row >= columns * item
    in_f_order = row == item and column >= rows * item
    return bool(block.flags.aligned and (in_c_order or in_f_order) and row % item == 0 and column % item == 0)


TABLE = (Candidate(CpuKernel, "BLAS for floats, packed tiles on all cores for integers", ALL, "ieee"),)
