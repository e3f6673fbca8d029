"""The register-tiled kernel: operands with k as their slow axis, and the launch."""

from __future__ import annotations

import math
from typing import ClassVar

from distmm_kernels.candidate import ALL, AMPERE, Candidate
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.kernel import Array
from distmm_kernels.launch import launches as launch
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.bounded import Bounded
from distmm_kernels.layout import stack
from distmm_kernels.layout.stack import VECTOR_BYTES
from distmm_kernels.layout.vectors import has_vectors, in_vectors
from distmm_kernels.tiles.tiling import TILINGS, Tiling, tiling_for


class RegisterTiledKernel(launch.CudaKernel):
    """Tiles in shared memory, and tiles of those in registers. It adds the steps of k one by one in ascending order."""

    name = "register_tiled"
    maker: ClassVar[str] = "distmm_kernels.device_code.register_tiled:source"

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self.kind: str = self.dtype.name  # what the kernel's maker calls the operands' type
        self._launches: Bounded[launch.Launch] = Bounded()

    def _format(self, block: Array, operand: str) -> Array:
        """Return the operand with aligned 16-byte vectors along m or n: itself if it has them, otherwise a copy."""
        block = super()._format(block, operand)
        return self._left(block) if operand == "A" else self._right(block)

    def _left(self, a: Array) -> Array:
        return a if has_vectors(a, -2) else in_vectors(a.swapaxes(-1, -2), self.device).swapaxes(-1, -2)

    def _right(self, b: Array) -> Array:
        return b if has_vectors(b, -1) else in_vectors(b, self.device)

    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        if d.ndim > 2:
            for each in launch.matrices(self._left(a), self._right(b), c, d):
                self._launch(*each)(*map(_address, each))
            return
        # a launch depends on shapes, strides and the alignment of addresses, not on the addresses themselves
        strides = a.strides, b.strides, None if c is None else c.strides, d.strides
        addresses = [stack.address(a), stack.address(b), _address(c), stack.address(d)]
        aligned = not (addresses[0] | addresses[1] | addresses[3]) % VECTOR_BYTES
        key = (d.shape, a.shape, strides, aligned)
        found = self._launches.get(key)
        if found is None:
            a, b = self._left(a), self._right(b)  # no copy, if they were prepared
            addresses[:2] = stack.address(a), stack.address(b)
            found = self._launch(a, b, c, d)
            if aligned and strides[:2] == (a.strides, b.strides):
                self._launches[key] = found
        found(*addresses)

    def _launch(self, a: Array, b: Array, c: Array | None, d: Array) -> launch.Launch:
        """Return the launch for arrays with these shapes and strides."""
        *batch, m, n = d.shape
        tiling = tiling_for(self._tilings(a, b), m, n, math.prod(batch), self.device.multiprocessors)
        width = tiling.widest if n % tiling.widest == 0 and has_vectors(d, -1) else 1
        recipe = Recipe(self.maker, (self.kind, tiling, width))
        blocks = -(-m // tiling.rows) * -(-n // tiling.columns), math.prod(batch)
        arrays = a.swapaxes(-1, -2), b, c, d
        stacks = [None if x is None else stack.Stack.of(x) for x in arrays]
        return launch.Launch(recipe, self.device, blocks, stacks)

    def _tilings(self, a: Array, b: Array) -> tuple[Tiling, Tiling]:
        """Return the tiling for large products and the one for small products, for operands with these strides."""
        return TILINGS[self.dtype.name]


def _address(array: Array | None) -> int:
    return 0 if array is None else stack.address(array)


TABLE = (
    Candidate(
        RegisterTiledKernel,
        "tiles in shared memory, and tiles of those in registers",
        frozenset(name for name in ALL if not name.startswith("complex")),
        "ieee",
        tile=(64, 64),
        capabilities=AMPERE,
        in_place="B",
        prepared=1.0,  # A in C order is copied
    ),
)
