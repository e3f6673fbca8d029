"""Launches of the Hopper kernel on matrices that lie as it wants them."""

from __future__ import annotations

from typing import NamedTuple

from distmm_kernels.binary import Recipe
from distmm_kernels.device import Device
from distmm_kernels.driver import loaded
from distmm_kernels.hopper_tiles import ROWS, WARP_ROWS, HopperTile
from distmm_kernels.tensor_map import MatrixStack, tensor_map

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
        tile, m, n = self.tile, d.rows, d.columns
        k = a[0].columns if tile.a_major == "k" else a[0].rows
        a_maps = [tensor_map(part, tile.operand, *self._a_box).address for part in a]
        b_maps = [tensor_map(part, tile.operand, *self._b_box).address for part in b]
        d_map = tensor_map(d, tile.output, *self._d_box).address
        maps = a_maps[0], a_maps[-1], b_maps[0], b_maps[-1], d_map
        high, wide = -(-m // ROWS), -(-n // tile.columns)
        added = (0, 0, 0) if c is None else (c.address, c.pitch, c.step if c.matrices > 1 else 0)
        batched = d.matrices, int(a[0].matrices > 1), int(b[0].matrices > 1)
        grid = (min(self._multiprocessors, high * wide * d.matrices), 1, 1)
        self._kernel.launch(grid, maps, (*added, *scales, m, n, k, *batched, high, wide))
