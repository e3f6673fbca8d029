"""Launches of the Hopper kernel on matrices that lie as it wants them."""

from __future__ import annotations

import functools
from typing import NamedTuple

from distmm_kernels.binary import Recipe
from distmm_kernels.device import Device
from distmm_kernels.driver import loaded
from distmm_kernels.hopper_tiles import ROWS, WARP_ROWS, HopperTile
from distmm_kernels.tensor_map import MatrixStack, TensorMap, tensor_map

__all__ = ["HopperGemm", "Scales"]


class Scales(NamedTuple):
    """Factors of the product's rows and columns, in device memory.

    Attributes
    ----------
    rows, columns
        Addresses of float32: of a row each, then of 127 more that are read but not used; of a column each, then of 255.
    row_step, column_step
        Bytes from one matrix's to the next one's; 0 where all matrices of the batch have the same.
    """

    rows: int
    row_step: int
    columns: int
    column_step: int


NO_SCALES = Scales(0, 0, 0, 0)


class _Fixed(NamedTuple):
    """What a launch takes that depends on neither C nor the address of D. The maps are kept: the driver reads them."""

    grid: tuple[int, int, int]
    maps: tuple[TensorMap, ...]
    addresses: tuple[int, ...]
    numbers: tuple[int, ...]


class HopperGemm:
    """One variant of the kernel on one device.

    Parameters
    ----------
    tile
        What to run.
    """

    def __init__(self, tile: HopperTile, device: Device) -> None:
        self.tile = tile
        self._kernel = loaded(Recipe("distmm_kernels.device_code.hopper_gemm:hopper_gemm", (tile,)), device)
        self._multiprocessors = device.multiprocessors
        self._a_box = (ROWS, tile.depth) if tile.a_major == "k" else (tile.depth, 64)
        self._b_box = (tile.columns, tile.depth) if tile.b_major == "k" else (tile.depth, 64)
        self._d_box = (WARP_ROWS, tile.box_columns)
        self._fixed = functools.lru_cache(maxsize=1024)(self._fix)

    def __call__(
        self,
        a: tuple[MatrixStack, ...],
        b: tuple[MatrixStack, ...],
        c: MatrixStack | None,
        d: MatrixStack,
        scales: Scales = NO_SCALES,
    ) -> None:
        """Enqueue ``D = C + scale * A B`` on CuPy's current stream; the device must be current.

        Parameters
        ----------
        a, b
            One part each, or high and low. A is ``(m, k)`` if ``tile.a_major`` is ``k``, else ``(k, m)``; B is
            ``(n, k)`` if ``tile.b_major`` is ``k``, else ``(k, n)``. Aligned as `distmm_kernels.tensor_map.ALIGNMENT`
            says. One matrix, or as many as D.
        c
            ``(m, n)`` of the accumulator's type, aligned to 8 bytes, one matrix or as many as D; None if the tile does
            not add.
        d
            ``(m, n)``, aligned as A and B are.
        """
        fixed = self._fixed(a, b, d.matrices, d.rows, d.columns)
        d_map = tensor_map(d, self.tile.output, *self._d_box)
        added = (0, 0, 0) if c is None else (c.address, c.pitch, c.step if c.matrices > 1 else 0)
        self._kernel.launch(fixed.grid, (*fixed.addresses, d_map.address), (*added, *scales, *fixed.numbers))

    def _fix(self, a: tuple[MatrixStack, ...], b: tuple[MatrixStack, ...], matrices: int, m: int, n: int) -> _Fixed:
        tile = self.tile
        k = a[0].columns if tile.a_major == "k" else a[0].rows
        a_maps = [tensor_map(part, tile.operand, *self._a_box) for part in a]
        b_maps = [tensor_map(part, tile.operand, *self._b_box) for part in b]
        maps = a_maps[0], a_maps[-1], b_maps[0], b_maps[-1]
        high, wide = -(-m // ROWS), -(-n // tile.columns)
        grid = (min(self._multiprocessors, high * wide * matrices), 1, 1)
        batched = matrices, int(a[0].matrices > 1), int(b[0].matrices > 1)
        return _Fixed(grid, maps, tuple(each.address for each in maps), (m, n, k, *batched, high, wide))
