"""The register-tiled kernel's three verbs: operands with k as their slow axis, and the launch."""

from __future__ import annotations

import math

from distmm_kernels import launch
from distmm_kernels.binary import Recipe
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.tiling import Tiling, tiling_for
from distmm_kernels.vectors import has_vectors, in_vectors

__all__ = ["RegisterTiledKernel"]


class RegisterTiledKernel(launch.CudaKernel):
    """Tiles in shared memory, and tiles of those in registers. Its bits are those of one ascending chain of steps."""

    name = "register_tiled"

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self._launches: dict[tuple[int, int, int, bool], tuple[Recipe, int]] = {}

    def _format(self, block: Array, operand: str) -> Array:
        """Return the operand in vectors along m or n: as it is if it lies so, else copied."""
        block = super()._format(block, operand)
        return self._left(block) if operand == "A" else self._right(block)

    def _left(self, a: Array) -> Array:
        return a if has_vectors(a, -2) else in_vectors(a.swapaxes(-1, -2), self.device).swapaxes(-1, -2)

    def _right(self, b: Array) -> Array:
        return b if has_vectors(b, -1) else in_vectors(b, self.device)

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        *batch, m, n = d.shape
        key = m, n, math.prod(batch), has_vectors(d, -1)
        if key not in self._launches:
            self._launches[key] = self._launch_of(*key)
        recipe, tiles = self._launches[key]
        # an operand from `prepare` stays as it is
        for stack in launch.matrices(self._left(a).swapaxes(-1, -2), self._right(b), c, d):
            launch.run(recipe, self.device, (tiles, stack[3].shape[0] if batch else 1), stack)

    def _launch_of(self, m: int, n: int, batch: int, aligned: bool) -> tuple[Recipe, int]:
        """Return the kernel, and how many tiles it cuts one C into."""
        tiling = self._tiling(m, n, batch)
        width = tiling.vector if aligned and n % tiling.vector == 0 else 1
        recipe = Recipe("distmm_kernels.device_code.register_tiled:source", (self.dtype.name, tiling, width))
        return recipe, -(-m // tiling.rows) * -(-n // tiling.columns)

    def _tiling(self, m: int, n: int, batch: int) -> Tiling:
        return tiling_for(m, n, batch, self.dtype.name, self.device.multiprocessors)
