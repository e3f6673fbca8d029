"""float64 and complex128 operands as residues: their layout, the kernels that make them, and the guards.

A row of A (a column of B) is scaled by a power of two, granule by granule of k, to integers that fill the moduli's
range (`distmm_kernels.emulation.moduli`), and rounded. The scale comes from the row's norm, so that every inner product
is known by its residues. What lies below the last bit of a row's integers is lost. That is little where a row's numbers
are of similar size, and raises a `Guard` where they are not, or where few of them are near its norm.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import GRANULE, granules
from distmm_kernels.emulation.moduli import MODULI
from distmm_kernels.emulation.sparsity import Counts, counts
from distmm_kernels.emulation.splits import ALIGNMENT, MAX_GRID_Z, Found
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.driver import LoadedKernel, loaded
from distmm_kernels.layout.stack import Stack
from distmm_kernels.layout.vectors import row_pitch

__all__ = [
    "FORMS",
    "LARGEST_SQUARES",
    "LEAST_SQUARES",
    "NEAR",
    "SHORTEST",
    "STRETCH",
    "Residues",
    "Splitter",
    "smallest",
    "splitter",
]

Array = Any  # cupy.ndarray: CuPy ships no types

STRETCH = 128  # k of one block of threads; divides the granule
ROWS = 32  # of one block of threads
THREADS = 256
COLUMNS = 4  # of C that one thread makes of their residues: a word of each modulus

# In a shorter granule the share of small numbers says too little, and a chain of float64 multiply-adds is as fast.
SHORTEST = 512

# Integers of so many more bits than the least one that is not small are near their row's norm
# (`distmm_kernels.emulation.sparsity`).
NEAR = 5

# Matrices of residues that one matrix becomes, by the real numbers of an element: itself; or re, im and re + im.
FORMS = {1: 1, 2: 3}

# Sums of squares of a row and granule, within which scaling, products and results stay within float64's range.
LEAST_SQUARES, LARGEST_SQUARES = 2.0**-800, 2.0**800


def smallest(length: int) -> int:
    """Return the exponent of the least integer that is not small, for a granule of ``length`` steps.

    The worst case: nearly all of a row's integers are that small, and the column is 0 at the others. Then rounding
    changes the product by ``0.29 * 2^-smallest`` of its norm. A chain of multiply-adds changes it by about as much,
    ``3e-17 * sqrt(length)`` (NumPy, N(0, 1)). N(0, 1) is scaled to 2^8 to 2^9 times this size, and 0.2 % of its numbers
    are smaller.
    """
    return 52 - (length.bit_length() - 1) // 2


class Layout(NamedTuple):
    """Where the residues of a stack ``(batch, rows, k)`` lie, in bytes from the start of their memory.

    Each granule is a stack ``(batch, forms * moduli, rows, k)`` of its own, with lines of `GRANULE` bytes, in the last
    one of ``last_ld``. If rows are scaled, a float64 factor and a word of 32 bits follow for each matrix, granule and
    row.
    """

    batch: int
    rows: int
    k: int
    last_ld: int
    granule_step: int
    factors: int
    words: int
    end: int
    matrices: int  # of residues, for each matrix

    @classmethod
    def of(
        cls, batch: int, rows: int, k: int, parts: int = 1, moduli: int = len(MODULI), scaled: bool = True
    ) -> Layout:
        """Lay out the residues of a stack of real numbers, or of complex ones, which have two parts."""
        matrices = FORMS[parts] * moduli
        count, lines = max(granules(k), 1), batch * matrices * rows
        last_ld = row_pitch(k - (count - 1) * GRANULE, 1)
        step, table = lines * GRANULE, batch * count * rows if scaled else 0
        factors = -(-((count - 1) * step + lines * last_ld) // ALIGNMENT) * ALIGNMENT
        words = factors + 8 * table
        return cls(batch, rows, k, last_ld, step, factors, words, words + 4 * table, matrices)


@dataclass(frozen=True, eq=False)
class Residues:
    """A stack of matrices ``(batch, rows, k)``, A or B transposed, modulo each of the moduli."""

    layout: Layout
    memory: Any

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return self.layout.end

    def granule(self, index: int, matrix: int) -> Stack:
        """Return the residues ``(forms * moduli, rows, k)`` of one granule of one matrix."""
        at = self.layout
        length = min(GRANULE, at.k - index * GRANULE)
        ld = at.last_ld if (index + 1) * GRANULE >= at.k else GRANULE
        step = at.rows * ld
        address = self.memory.ptr + index * at.granule_step + matrix * at.matrices * step
        return Stack(address, (at.matrices, at.rows, length), (step, ld, 1), 1)

    def factors(self, index: int, matrix: int) -> int:
        """Return the address of float64 factors of one granule's rows, powers of two."""
        at = self.layout
        return int(self.memory.ptr) + at.factors + 8 * at.rows * (matrix * granules(at.k) + index)

    @functools.cached_property
    def counts(self) -> tuple[Counts, ...]:
        """Return what each granule has, of real numbers. The device must be current, and have made the residues."""
        import cupy

        at, count = self.layout, granules(self.layout.k)
        parts = next(parts for parts, forms in FORMS.items() if forms * len(MODULI) == at.matrices)
        words = cupy.ndarray((at.batch, count, at.rows), "uint32", self.memory + at.words)
        return tuple(counts(words, tuple(parts * min(GRANULE, at.k - i * GRANULE) for i in range(count))))


class _Plan(NamedTuple):
    """How stacks of one shape and strides are split."""

    layout: Layout
    launches: tuple[tuple[LoadedKernel, tuple[int, int]], ...]
    numbers: tuple[int, ...]


class Splitter:
    """Splits operands of one type into residues on one device: float64 numbers have one part, complex128 ones two."""

    def __init__(self, device: Device, parts: int) -> None:
        self.device, self.parts = device, parts
        self._plans: dict[tuple[Any, ...], _Plan] = {}

    def __call__(self, stack: Array) -> tuple[Residues, Found]:
        """Enqueue the splitting of matrices ``(batch, rows, k)``, or of one, with any strides, read in place.

        The device must be current.
        """
        import cupy

        _, shape, strides, _ = Stack.of(stack)
        plan = self._plans.get((shape, strides))
        if plan is None:
            plan = self._plans[shape, strides] = self._plan(shape, strides)
        batch, rows, k = shape
        at = plan.layout
        memory = cupy.cuda.alloc(at.end)
        found = Found(granules(k), looked_for=True)
        if plan.launches:
            stream = cupy.cuda.get_current_stream().ptr
            sums = cupy.cuda.alloc(8 * batch * rows * -(-self.parts * k // STRETCH))
            cupy.cuda.runtime.memsetAsync(memory.ptr + at.words, 0, at.end - at.words, stream)
            for first in range(0, batch, MAX_GRID_Z):
                values = (stack.data.ptr, memory.ptr, found.address, sums.ptr, *plan.numbers, first)
                for kernel, grid in plan.launches:
                    kernel.launch((*grid, min(batch - first, MAX_GRID_Z)), (), values, stream)
        found.record()
        return Residues(at, memory), found

    def _plan(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> _Plan:
        batch, rows, k = shape
        parts, at = self.parts, Layout.of(batch, rows, k, self.parts)
        if 0 in shape:
            return _Plan(at, (), ())
        last = k - (granules(k) - 1) * GRANULE
        numbers = (
            *(strides[0], strides[1], strides[2], rows, parts * k, at.factors, at.words, at.granule_step, at.last_ld),
            *(smallest(parts * GRANULE), smallest(parts * last)),
        )
        # a warp reads 32 neighbours, along k or along rows
        along_k = k == 1 or (rows > 1 and abs(strides[2]) <= abs(strides[1])) or rows == 1
        tiles = -(-rows // ROWS) * -(-parts * k // STRETCH), 1
        name = "distmm_kernels.device_code.residues:"
        launches = (
            (loaded(Recipe(f"{name}sum_squares", (along_k, parts)), self.device), tiles),
            (loaded(Recipe(f"{name}find_factors", (parts,)), self.device), (-(-rows // THREADS), granules(k))),
            (loaded(Recipe(f"{name}split", (along_k, parts)), self.device), tiles),
        )
        return _Plan(at, launches, numbers)


@functools.cache
def splitter(device: Device, parts: int = 1) -> Splitter:
    """Return the one splitter of a type on a device."""
    return Splitter(device, parts)
