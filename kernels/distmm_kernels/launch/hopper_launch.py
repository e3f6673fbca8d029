"""Launches of the Hopper kernel on matrices that the tensor memory accelerator (TMA) can load."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from distmm_kernels.device import Device
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.bounded import MOST
from distmm_kernels.launch.driver import ParameterBlock, loaded, stream_number
from distmm_kernels.launch.tensor_map import TensorMap, TensorMaps, tensor_map
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles.hopper_places import rows_in_pairs
from distmm_kernels.tiles.hopper_tiles import COORDINATES, ROWS, WARP_ROWS, HopperTile, box_columns, widest
from distmm_kernels.tiles.hopper_widths import best_columns

Stacks: TypeAlias = tuple[Stack, ...]


class Scales(NamedTuple):
    """Factors of the product's rows and columns, in device memory.

    Attributes
    ----------
    rows, columns
        Addresses of float32 factors, one for each row and one for each column. 127 more words after the rows' factors,
        and 255 more after the columns', are read but not used.
    row_step, column_step
        Bytes from the factors of one matrix to those of the next; 0 if all matrices of the batch have the same factors.

    If D is int8, there are no factors. Then ``rows`` is the address of two words for each matrix: its modulus, and the
    multiplier for divisions by it (`distmm_kernels.emulation.moduli.epilogue_multiplier`).
    """

    rows: int
    row_step: int
    columns: int
    column_step: int


NO_SCALES = Scales(0, 0, 0, 0)


class Finish(NamedTuple):
    """The last step of the epilogue: ``D = alpha * D + beta * C0``, in float32.

    Attributes
    ----------
    factors
        Bits of alpha and beta. Launches are kept by their arguments, and -0.0 equals 0.0.
    c0
        ``(m, n)`` of type `HopperTile.c0`, one matrix or as many as D, aligned as C is. None: nothing is added.
    """

    factors: tuple[int, int]
    c0: Stack | None

    @classmethod
    def of(cls, alpha: float, beta: float, c0: Any) -> Finish:
        """Make the step for these factors, and an array that the TMA loads, or None."""
        first, second = struct.unpack("2I", struct.pack("2f", alpha, beta))
        return cls((first, second), None if c0 is None else Stack.for_tensor_map(c0))


NO_FINISH = Finish.of(1, 0, None)

COUNTERS = 4096  # of each device


class _Launch(NamedTuple):
    """All parameters of a launch. The driver reads the block and the descriptors from memory that these objects own."""

    grid: tuple[int, int, int]
    parameters: int
    block: ParameterBlock
    maps: tuple[TensorMap | TensorMaps, ...]


class HopperGemm:
    """One variant of the kernel on one device. `hopper_gemm` returns it, and makes it once in a process.

    Parameters
    ----------
    tile
        The variant of the kernel.
    """

    def __init__(self, tile: HopperTile, device: Device) -> None:
        self.tile = tile
        self._kernel = loaded(Recipe("distmm_kernels.device_code.hopper.hopper_gemm:hopper_gemm", (tile,)), device)
        self._device = device
        self._a_box = (ROWS, tile.depth) if tile.a_major == "k" else (tile.depth, 64)
        self._b_box = (tile.columns, tile.depth) if tile.b_major == "k" else (tile.depth, 64)
        self._d_box = (WARP_ROWS, box_columns(tile.output))
        # CuPy reuses freed memory, so products of the same size soon have the same addresses again. To encode the
        # descriptor of a D at a new address takes longer than the rest of a launch.
        self._kept = functools.lru_cache(maxsize=MOST)(self._launch)

    def __call__(
        self,
        a: Stacks,
        b: Stacks,
        c: Stack | None,
        d: Stack,
        scales: Scales = NO_SCALES,
        finish: Finish = NO_FINISH,
        above: int = 0,
    ) -> None:
        """Enqueue ``D = alpha * (C + scale * A B) + beta * C0`` on CuPy's current stream; the device must be current.

        Parameters
        ----------
        a, b
            Stacks from `Stack.for_tensor_map`: one for each operand, or its high and low part, or its panels in
            ascending k. A is ``(m, k)`` if ``tile.a_major`` is ``k``, else ``(k, m)``. B is ``(n, k)`` if
            ``tile.b_major`` is ``k``, else ``(k, n)``. Each has one matrix, or as many as D.
        c
            ``(m, n)`` of the accumulator's type, one matrix or as many as D; None if the tile adds no C.
        d
            ``(m, n)``. C and D are aligned as A and B are.
        above
            If the tile is symmetric: D has rows of the symmetric product from this one on, and columns from the first
            one on. Only a D of int8, which is not mirrored, may lack the first rows.

        Raises
        ------
        ValueError
            If a size is too large for 32-bit coordinates: the kernel would not write all of D.
        """
        kept = self._kept(a, b, c, d, scales, finish, pace_counter(self._device), above)
        self._kernel.launch_with(kept.grid, kept.parameters)

    def bound(self, a: Stacks, b: Stacks, d: Stack, stream: int) -> Callable[[], None]:
        """Return a function that enqueues ``D = A B`` on a stream, which it knows by its handle.

        If the stream ends and another one gets its handle, both may share a counter, and only the pace is lost.
        """
        kept = self._launch(a, b, None, d, NO_SCALES, NO_FINISH, pace_counter(self._device, stream), 0)
        return lambda: self._kernel.launch_with(kept.grid, kept.parameters, stream)  # and keeps what it points to

    def _launch(
        self, a: Stacks, b: Stacks, c: Stack | None, d: Stack, scales: Scales, finish: Finish, counter: int, above: int
    ) -> _Launch:
        tile, matrices, m, n = self.tile, d.matrices, d.rows, d.columns
        k, *others = (each.columns if tile.a_major == "k" else each.rows for each in a)
        sums = sum((k, *others)) if tile.panels else k
        if max(m, n, sums, matrices) >= COORDINATES:
            raise ValueError(
                f"{matrices} products ({m}, {sums}) @ ({sums}, {n}): Hopper kernels count to 2^31 along each axis; "
                "multiply parts of them, or name another kernel"
            )
        a_maps = [tensor_map(part, tile.operand, *self._a_box) for part in a]
        b_maps = [tensor_map(part, tile.b_operand or tile.operand, *self._b_box) for part in b]
        d_map = tensor_map(d, tile.output, *self._d_box)
        c_map = d_map if c is None else tensor_map(c, tile.accumulator, ROWS, box_columns(tile.accumulator))
        c0 = finish.c0
        c0_map = d_map if c0 is None or tile.c0 is None else tensor_map(c0, tile.c0, ROWS, box_columns(tile.c0))
        maps = TensorMaps(a_maps), TensorMaps(b_maps), c_map, d_map, c0_map
        high, wide = -(-m // ROWS), -(-n // tile.columns)
        if tile.symmetric:
            high, wide = rows_in_pairs(high, tile.columns // tile.symmetric, above)
        grid = (min(self._device.multiprocessors, high * wide * matrices), 1, 1)
        steps = (int(operand is not None and operand.matrices > 1) for operand in (a[0], b[0], c, c0))
        of_panels = len(a), others[-1] if others else k
        values = *scales, m, n, k, matrices, *steps, high, wide, counter, above, *finish.factors, *of_panels
        block = ParameterBlock(len(maps), len(values))
        return _Launch(grid, block.fill([each.address for each in maps], values), block, maps)


def pace_counter(device: Device, stream: int | None = None) -> int:
    """Return the address of two numbers in the current device's memory for launches on a stream, or CuPy's current one.

    Launches of one stream run one after the other, so they share them. A stream's number is never used again, its
    handle is: a new stream may have the handle of one whose last launch still runs. Streams whose numbers differ by a
    multiple of `COUNTERS` also share the counter; if they run at the same time, only the pace is lost.
    """
    import cupy

    numbers = _pace_counters.get(device.index)
    if numbers is None:
        with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):  # not that of a graph
            made = cupy.zeros(2 * COUNTERS, "u4")
        cupy.cuda.get_current_stream().synchronize()  # launches on other streams read it too
        numbers = _pace_counters.setdefault(device.index, made)  # another thread may have set it meanwhile
    handle = cupy.cuda.get_current_stream().ptr if stream is None else stream
    return int(numbers.data.ptr) + 8 * (stream_number(handle) % COUNTERS)


_pace_counters: dict[int, Any] = {}


hopper_gemm = functools.cache(HopperGemm)
"""hopper_gemm(tile, device): a process has one launcher of a variant of the kernel on a device."""


class HopperGemms:
    """Variants of the kernel on one device, each with the best width of tiles for the results that it computes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept = functools.lru_cache(maxsize=MOST)(self._best)

    def __call__(self, to: Stack, output: Any, **variant: Any) -> HopperGemm:
        """Return the launcher for results of this shape; ``variant`` are further arguments of `HopperTile`."""
        return self._kept(*to.shape, to.itemsize, output=output, **variant)

    def _best(self, matrices: int, rows: int, columns: int, itemsize: int, **variant: Any) -> HopperGemm:
        sizes = rows, columns, matrices, variant.get("products", 1), self._device.multiprocessors
        most = widest(variant.get("promotes", False), variant.get("scaled_blocks", False))
        width = best_columns(*sizes, most, variant.get("symmetric", 0))
        if itemsize == 1:
            width = 128 if width <= 128 else 256  # a multiple of a TMA box of bytes
        return hopper_gemm(HopperTile(columns=width, **variant), self._device)
