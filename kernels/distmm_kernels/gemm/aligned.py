"""Matrices with aligned rows, which the tensor memory accelerator loads and stores, and sums of slices of k."""

from __future__ import annotations

from typing import Any

import numpy as np

from distmm_kernels.kernel import Array
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.driver import loaded
from distmm_kernels.launch.launches import CudaKernel
from distmm_kernels.layout.stack import VECTOR_BYTES, Stack
from distmm_kernels.layout.vectors import in_vectors
from distmm_kernels.tiles.slices import COLUMNS, THREADS

ADD = "distmm_kernels.device_code.slices:add_slices"


class AlignedKernel(CudaKernel):
    """A kernel whose D has rows that begin at multiples of 16 bytes."""

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array whose rows begin at multiples of 16 bytes."""
        multiple = VECTOR_BYTES // dtype.itemsize
        columns = -(-shape[-1] // multiple) * multiple
        whole = self._module.empty((*shape[:-1], columns), dtype)
        return whole if columns == shape[-1] else whole[..., : shape[-1]]

    def _loadable(self, c: Array | None) -> Array | None:
        """Return C, or a copy of it if the tensor memory accelerator cannot load it."""
        return c if c is None or Stack.of(c).loadable() else in_vectors(c, self.device)

    def _writes(self, d: Array) -> bool:
        return Stack.of(d).loadable()

    def _add_slices(self, sums: Array, c: Array | None, d: Array) -> None:
        """Write C and the sums of slices, in ascending k, into D.

        Parameters
        ----------
        sums
            ``(*batch, slices, m, n)``. The sums and D come from `_empty`.
        c
            From `_loadable`. It may be D.
        """
        recipe = Recipe(ADD, (self.accumulator.name, d.dtype.name, c is not None))
        of, to = Stack.of(sums), Stack.of(d)
        added = to if c is None else Stack.of(c)
        values = (
            *(of.address, of.step, of.strides[0], of.pitch, of.matrices),
            *(added.address, added.step, added.pitch),
            *(to.address, to.step, to.pitch, to.rows, to.columns),
        )
        grid = -(-to.rows * -(-to.columns // COLUMNS) // THREADS), 1, to.matrices
        loaded(recipe, self.device).launch(grid, values)
