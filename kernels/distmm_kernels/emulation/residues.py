"""float64 and complex128 operands as residues: their layout, the kernels that compute them, and the guards.

In each granule of k, a row of A (a column of B) is multiplied by a power of two and rounded to integers. The power is
the largest one for which residues determine all inner products (`distmm_kernels.emulation.moduli`). It follows from the
row's norm. The rounding error is small if the numbers of a row are of similar size. If they are not, or if few numbers
are near the row's norm, the kernels raise a `Guard`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import GRANULE, granules
from distmm_kernels.emulation.launches import ALIGNMENT, Found, Plan
from distmm_kernels.emulation.moduli import LIMIT, MODULI
from distmm_kernels.emulation.sparsity import Counts, counts
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.bounded import MOST
from distmm_kernels.launch.driver import loaded
from distmm_kernels.layout.stack import Array, Stack
from distmm_kernels.layout.vectors import row_pitch

STRETCH = 128  # steps of k that one thread block splits; divides the granule
ROWS = 32  # that one thread block splits
THREADS = 256
COLUMNS = 4  # of C that one thread computes from residues: it reads a word of 4 residues of each modulus

# Granules with fewer real numbers in a row are not split: the share of small numbers would say too little about the
# error, and a chain of float64 multiply-adds is as fast.
SHORTEST = 1024

# By the real numbers of an element: how many matrices are split into residues. A real matrix is one; a complex matrix
# gives re, im and re + im.
FORMS = {1: 1, 2: 3}

# For a product with the conjugate of B: the form of A by which each form of B is multiplied.
CONJUGATED = 1, 0, 2

# Limits of the sum of squares of a row in a granule. Within them, scaled numbers, products and results stay within
# float64's range.
LEAST_SQUARES, LARGEST_SQUARES = 2.0**-800, 2.0**800


def smallest(length: int) -> int:
    """Return the least integer that is not small, for a granule of ``length`` steps.

    In the worst case, nearly all of a row's integers have this size, and the column is 0 at all others. Then rounding
    makes an error of ``0.29 / smallest``, relative to the norm: a seventh of the bound of a chain of multiply-adds,
    ``length * 2^-53``, in 1024 steps, and a twentieth in 8192. Scaling makes numbers of N(0, 1) 2^8.4 to 2^9.4 times
    this size; 0.1 to 0.24 % of them are smaller than it.
    """
    return int(2.0**49 / math.sqrt(max(1, length)))


def nearest(length: int) -> int:
    """Return the least integer that is near its row's norm, for a granule of ``length`` steps.

    Products of such integers at 1/16 of the steps, times ``(length + 2) 2^-53``, are as large as the worst error of all
    other steps (`distmm_kernels.emulation.sparsity`).
    """
    length = max(1, length)
    lost = math.sqrt(LIMIT * length * 15 / 32) + length / 4
    return 1 + math.ceil(math.sqrt(16 * 2.0**53 * lost / (length * (length + 2))))  # 1 for the rounding of all this


class Layout(NamedTuple):
    """Memory layout of the residues of a stack ``(batch, rows, k)``: offsets in bytes from the start of their memory.

    Each granule is a separate stack ``(batch, forms * moduli, rows, k)``. Its leading dimension is `GRANULE` bytes, in
    the last granule ``last_ld``. If rows are scaled, two tables follow: a float64 factor, and a word of 32 bits with
    counts, for each matrix, granule and row.
    """

    batch: int
    rows: int
    k: int
    last_ld: int
    granule_step: int
    factors: int
    words: int
    end: int
    matrices: int  # of residues, for each matrix of the stack

    @classmethod
    def of(
        cls, batch: int, rows: int, k: int, parts: int = 1, moduli: int = len(MODULI), scaled: bool = True
    ) -> Layout:
        """Lay out the residues of a stack of real numbers (one part) or complex numbers (two parts)."""
        matrices = FORMS[parts] * moduli
        count, lines = max(granules(k), 1), batch * matrices * rows
        last_ld = row_pitch(k - (count - 1) * GRANULE, 1)
        step, table = lines * GRANULE, batch * count * rows if scaled else 0
        factors = -(-((count - 1) * step + lines * last_ld) // ALIGNMENT) * ALIGNMENT
        words = factors + 8 * table
        return cls(batch, rows, k, last_ld, step, factors, words, words + 4 * table, matrices)


@dataclass(frozen=True, eq=False)
class Residues:
    """The residues of a stack of matrices ``(batch, rows, k)``, A or B transposed, for all moduli."""

    layout: Layout
    memory: Any

    def granule(self, index: int, matrix: int) -> Stack:
        """Return the residues ``(forms * moduli, rows, k)`` of one granule of one matrix."""
        at = self.layout
        length = min(GRANULE, at.k - index * GRANULE)
        ld = at.last_ld if (index + 1) * GRANULE >= at.k else GRANULE
        step = at.rows * ld
        address = self.memory.ptr + index * at.granule_step + matrix * at.matrices * step
        return Stack(address, (at.matrices, at.rows, length), (step, ld, 1), 1)

    def factors(self, index: int, matrix: int) -> int:
        """Return the address of the float64 factors of one granule's rows, which are powers of two; 0 if not scaled."""
        at = self.layout
        number = matrix * granules(at.k) + index
        return int(self.memory.ptr) + at.factors + 8 * at.rows * number if at.factors < at.end else 0

    @functools.cached_property
    def counts(self) -> tuple[Counts, ...]:
        """Counts of each granule, in real numbers. The device must be current, and have computed the residues."""
        import cupy

        at, count = self.layout, granules(self.layout.k)
        parts = next(parts for parts, forms in FORMS.items() if forms * len(MODULI) == at.matrices)
        words = cupy.ndarray((at.batch, count, at.rows), "uint32", self.memory + at.words)
        return tuple(counts(words, tuple(parts * min(GRANULE, at.k - i * GRANULE) for i in range(count))))


def reads_along_k(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a warp reads 32 consecutive elements of ``(batch, rows, k)`` along k; otherwise along the rows."""
    return 1 in shape[1:] or abs(strides[2]) <= abs(strides[1])


class Splitter:
    """Splits operands of one type into residues on one device. float64 has one part, complex128 two."""

    def __init__(self, device: Device, parts: int) -> None:
        self.device, self.parts = device, parts
        self._planned = functools.lru_cache(maxsize=MOST)(self._plan)

    def __call__(self, stack: Array) -> tuple[Residues, Found]:
        """Enqueue the kernels that split matrices ``(batch, rows, k)`` or one matrix ``(rows, k)``, with any strides.

        The matrices are read in place. The device must be current.
        """
        import cupy

        _, shape, strides, _ = Stack.of(stack)
        plan, (batch, rows, k) = self._planned(shape, strides), shape
        found = Found(granules(k))
        sums = cupy.cuda.alloc(8 * batch * rows * -(-self.parts * k // STRETCH))
        memory = plan.enqueue(batch, stack.data.ptr, found.address, sums.ptr)
        found.record()
        return Residues(plan.layout, memory), found

    def _plan(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Plan:
        batch, rows, k = shape
        parts, at = self.parts, Layout.of(batch, rows, k, self.parts)
        if 0 in shape:
            return Plan(at, (), ())
        last = k - (granules(k) - 1) * GRANULE
        numbers = (
            *(strides[0], strides[1], strides[2], rows, parts * k, at.factors, at.words, at.granule_step, at.last_ld),
            *(limit(parts * length) for length in (GRANULE, last) for limit in (smallest, nearest)),
        )
        along_k = reads_along_k(shape, strides)
        tiles = -(-rows // ROWS) * -(-parts * k // STRETCH), 1
        name = "distmm_kernels.device_code.residues:"
        launches = (
            (loaded(Recipe(f"{name}sum_squares", (along_k, parts)), self.device), tiles),
            (loaded(Recipe(f"{name}find_factors", (parts,)), self.device), (-(-rows // THREADS), granules(k))),
            (loaded(Recipe(f"{name}split", (along_k, parts)), self.device), tiles),
        )
        return Plan(at, launches, numbers, (at.words, at.end - at.words))


splitter = functools.cache(Splitter)
"""splitter(device, parts): a process has one of a type on a device."""
