"""Products of residues on int8 tensor cores, and the elements of C that follow from them.

The Hopper kernel or the `mma.sync` kernel multiplies the residues of all moduli as one batch. Its epilogue reduces the
sums, and stores a byte for each modulus and element of C. Another kernel computes elements from these bytes, and adds
them to C.

C is computed in parts, which bounds the memory of its residues. `WORKSPACE` holds the residues of 100 tiles for each
multiprocessor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Literal, TypeAlias

import numpy as np

from distmm_kernels.candidate import AMPERE, HOPPER, Candidate
from distmm_kernels.device import Device
from distmm_kernels.emulation.moduli import MODULI, epilogue_multiplier
from distmm_kernels.emulation.residues import COLUMNS, CONJUGATED, THREADS
from distmm_kernels.gemm.guarded import WORKSPACE, parts
from distmm_kernels.gemm.operands import Prepared
from distmm_kernels.kernel import Array, Kernel
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.driver import loaded
from distmm_kernels.launch.fragment_launch import fragment_gemm
from distmm_kernels.launch.hopper_launch import HopperGemms, Scales
from distmm_kernels.layout.stack import Stack, address
from distmm_kernels.layout.vectors import row_pitch
from distmm_kernels.tiles.hopper_tiles import ROWS

Instruction: TypeAlias = Literal["wgmma", "mma.sync"]

STRIP = 8 * ROWS  # rows of a symmetric C whose elements are computed up to the end of the last one


class ResidueProducts:
    """Multiplies residues modulo given numbers on one device.

    Parameters
    ----------
    moduli
        Modulus of each matrix of residues.
    reconstruction
        The kernel that computes elements of C from the residues of products. One more parameter of its maker says
        whether C is added.
    instruction
        The one that multiplies: that of Hopper GPUs, or that of any GPU since Ampere. Results are the same.
    """

    def __init__(
        self, device: Device, moduli: tuple[int, ...], reconstruction: Recipe, instruction: Instruction
    ) -> None:
        self.device, self.moduli = device, moduli
        self._reconstruction, self._instruction = reconstruction, instruction
        self._gemms = HopperGemms(device)

    def add_granule(
        self, index: int, a: Prepared, b: Prepared, c: Array | None, d: Array, symmetric: bool = False,
        conjugated: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue ``D = C + A B`` for one granule of all matrices of a batch; see `add`."""
        for place, mine, yours in matrices_of(a.batch, b.batch, d.shape[:-2]):
            left, right = a.made.granule(index, mine), b.made.granule(index, yours)
            factors = a.made.factors(index, mine), b.made.factors(index, yours)
            self.add(left, right, None if c is None else c[place], d[place], factors, symmetric, conjugated)

    def add(
        self,
        left: Stack,
        right: Stack,
        c: Array | None,
        d: Array,
        factors: tuple[int, int] = (0, 0),
        symmetric: bool = False,
        conjugated: bool = False,
    ) -> None:
        """Enqueue ``D = C + A B`` for one granule of one matrix; the device must be current.

        Parameters
        ----------
        left, right
            Residues of A and of B transposed, from `distmm_kernels.emulation.residues.Residues.granule`.
        c, d
            ``(m, n)``; C with any strides, D with rows on 16 bytes.
        factors
            Addresses of float64 factors of rows and of columns; zeros if the operands are not scaled.
        symmetric
            Whether elements of D above the diagonal need not be computed. They may have any value then.
        conjugated
            Whether B is the conjugate of the complex matrix of which ``right`` has the residues.
        """
        import cupy

        m, n = d.shape
        rows, columns = strip(m, n, left.matrices)
        memory = cupy.cuda.alloc(left.matrices * rows * row_pitch(columns, 1))
        to_c = (0, 0, 0) if c is None else (address(c), *c.strides)
        variant = (c is not None, True) if conjugated else (c is not None,)
        recipe = Recipe(self._reconstruction.maker, (*self._reconstruction.parameters, *variant))
        kernel = loaded(recipe, self.device)
        forms = CONJUGATED if conjugated else (0,)  # otherwise one launch multiplies all forms
        count = left.matrices // len(forms)
        below = symmetric and self._instruction == "wgmma" and columns == n
        for down, across in parts(m, n, rows, columns):
            across = slice(0, down.stop) if below else across
            high, wide = down.stop - down.start, across.stop - across.start
            pitch = row_pitch(wide, 1)
            to = Stack(memory.ptr, (left.matrices, high, wide), (high * pitch, pitch, 1), 1)
            of_a = left.part(-2, down.start, down.stop)
            of_b = right.part(-2, across.start, across.stop)
            gemm = self._gemm(to.part(-3, 0, count), down.start if below else None)
            for first, form in zip(range(0, left.matrices, count), forms, strict=True):
                mine = of_a.part(-3, form * count, (form + 1) * count)
                theirs, made = (each.part(-3, first, first + count) for each in (of_b, to))
                gemm((mine,), (theirs,), None, made, Scales(self._table.data.ptr + 8 * first, 8, 0, 0))
            column = across.start
            for row in range(down.start, down.stop, STRIP if below else high):
                last = min(row + STRIP, down.stop) if below else down.stop
                sizes = last - row, last if below else wide
                values = (
                    *(to.address + (row - down.start) * pitch, to.step, pitch),
                    *((factors[0] + 8 * row, factors[1] + 8 * column) if factors[0] else factors),
                    *(address(d) + row * d.strides[0] + column * d.strides[1], d.strides[0]),
                    *(to_c[0] + row * to_c[1] + column * to_c[2], to_c[1], to_c[2]),
                    *sizes,
                )
                kernel.launch((-(-sizes[0] * -(-sizes[1] // COLUMNS) // THREADS), 1, 1), values)

    def _gemm(self, to: Stack, above: int | None) -> Callable[..., None]:
        """Return the launcher for a part of C; ``above`` are the rows above a part of a symmetric C."""
        if self._instruction == "mma.sync":
            return fragment_gemm("int8", (True, True), self.device)
        gemm = self._gemms(to, "int8", operand="int8", b_major="k", symmetric=above is not None)
        return partial(gemm, above=above or 0)

    @cached_property
    def _table(self) -> Array:
        """Modulus and epilogue multiplier of each product, on the device."""
        import cupy

        table = [(modulus, epilogue_multiplier(modulus)) for modulus in self.moduli]
        made = cupy.asarray(np.array(table, np.uint32))
        cupy.cuda.get_current_stream().synchronize()  # other threads' streams read it too
        return made


def strip(m: int, n: int, products: int = len(MODULI)) -> tuple[int, int]:
    """Return rows and columns of a part of C: all columns, unless 128 rows of them exceed `WORKSPACE`.

    Parts have an even number of rows of tiles, if they have more than one: those of a symmetric C are in pairs
    (`distmm_kernels.tiles.hopper_places.rows_in_pairs`), and no tile is computed in vain.
    """
    columns = min(n, max(2 * ROWS, WORKSPACE // (products * ROWS) // (2 * ROWS) * 2 * ROWS))
    rows = WORKSPACE // (products * row_pitch(columns, 1)) // (2 * ROWS) * 2 * ROWS
    return min(m, max(rows, ROWS)), columns


def matrices_of(
    a: tuple[int, ...], b: tuple[int, ...], batch: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yield each index of the batch, and the numbers of the matrices of A and of B that are multiplied there."""
    mine, yours = (np.broadcast_to(np.arange(math.prod(own)).reshape(own), batch) for own in (a, b))
    for place in np.ndindex(batch):
        yield place, int(mine[place]), int(yours[place])


def rows(row: partial[Candidate], idea: str, kernel: type[Kernel]) -> tuple[Candidate, ...]:
    """Return the rows of a kernel by `wgmma`, and of the same one by `mma.sync`, from what both have in common.

    The second one is a subclass with another ``instruction``. All sums of residues are exact, so the results have the
    same bits.
    """
    fed, dtypes = f"{idea}, on tensor cores", row.keywords["dtypes"]
    own = {"name": f"mma_sync_{kernel.name}", "instruction": "mma.sync", "__module__": kernel.__module__}
    return (
        row(kernel, fed, capabilities=HOPPER, unit="tensor", triangles=dtypes),
        row(
            type(f"MmaSync{kernel.__name__}", (kernel,), own),
            f"{fed} fed by ldmatrix",
            capabilities=AMPERE,
            unit="mma_sync",
        ),
    )
