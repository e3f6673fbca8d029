"""Products that multiply each granule of k by a fast algorithm, or by a more accurate one if a guard is raised.

The algorithm depends only on the granule's own numbers in A and B, so cuts of k at granules do not change the bits of
the result.

The accurate algorithm may need copies of the granule. It computes C in parts, and does not keep these copies: plans
count `WORKSPACE` bytes for them.
"""

from __future__ import annotations

import enum
import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.emulation.formats import GRANULE, Guard
from distmm_kernels.emulation.launches import Found, as_stack
from distmm_kernels.emulation.sparsity import holds
from distmm_kernels.gemm.aligned import AlignedKernel
from distmm_kernels.gemm.operands import Shareable
from distmm_kernels.kernel import Array
from distmm_kernels.layout.stack import distinct
from distmm_kernels.layout.vectors import row_pitch
from distmm_kernels.symmetric import Symmetry, turned
from distmm_kernels.tiles.hopper_tiles import ROWS

WORKSPACE = 1 << 29  # bytes that a product takes at a time in addition to operands and C

# A product of so many multiply-adds waits for its guards. If the library computes it, a sample is looked at afterwards.
# Both take microseconds, and the product takes milliseconds.
LONG = 2**37
SAMPLE = 64  # rows of A and columns of B whose guards tell those of the whole
MOST_PATIENCE = 15  # products of the library from one sample to the next


class Way(enum.Enum):
    """The algorithm that multiplies a granule."""

    RESIDUES = enum.auto()
    FP16X3 = enum.auto()
    TF32X3 = enum.auto()
    IEEE = enum.auto()


@dataclass(frozen=True, eq=False, kw_only=True)
class GuardedOperand(Shareable):
    """A prepared operand, made of parts or residues.

    Attributes
    ----------
    matrices
        The operand itself, ``(*batch, rows, k)``: A, or B transposed. Broadcast matrices are kept once. Granules with a
        raised guard are read from it.
    found
        The guards of its granules.
    by_tf32
        By granule, whether TF32 halves hold it. Filled when first needed.
    conjugated
        Whether the operand is the conjugate of what ``matrices`` and ``made`` have. Guards of both are the same.
    """

    matrices: Array
    found: Found
    by_tf32: dict[int, bool] = field(default_factory=dict)
    conjugated: bool = False

    def granule(self, index: int) -> Array:
        """Return one granule of ``matrices``."""
        return self.matrices[..., index * GRANULE : (index + 1) * GRANULE]


class GuardedKernel(AlignedKernel):
    """A kernel that chooses an algorithm for each granule.

    A subclass says which one it expects, which one a granule with a raised guard takes, and how granules are added.

    Attributes
    ----------
    shortest
        Granules of fewer steps are always chains of multiply-adds.
    mirrors
        Whether launches for symmetric products store mirror images, if each granule takes the expected algorithm.
    library_below
        Multiply-adds of a product from which on the library is not faster, whatever the guards are.
    """

    granule = GRANULE
    capturable = False  # the host reads guards
    guarded = True
    shortest: ClassVar[int]
    first: ClassVar[Way]
    _split: Callable[[Array], tuple[Any, Found]]
    mirrors: ClassVar[bool] = False
    library_below: float = math.inf

    def __init__(self, problem: Problem, device: Device) -> None:
        from distmm_kernels.select import select  # which imports all kernels

        super().__init__(problem, device)
        # one kernel for blocks of any size: the bits of all these kernels agree, except for the sign of a zero
        self._ieee = select(problem, device, "ieee", reproducible=True)
        self._raised = False  # whether the last product had a raised guard: the next one waits for its guards
        self._unequal = False  # whether most granules had
        self._sample: tuple[GuardedOperand, GuardedOperand] | None = None
        self.patience = 0  # products that the library may compute before the next sample

    def _format(self, block: Array, operand: str) -> GuardedOperand:
        own = distinct(block).astype(self.dtype, copy=False)
        matrices = own if operand == "A" else own.swapaxes(-1, -2)
        made, found = self._split(as_stack(self._splittable(matrices)))
        batch = matrices.shape[:-2]
        return GuardedOperand(
            shape=block.shape, format=self.reads[0], made=made, batch=batch, matrices=matrices, found=found
        )

    def _splittable(self, matrices: Array) -> Array:
        """Return what is split of an operand."""
        return matrices

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def _expected(cls, k: int) -> tuple[Way, ...]:
        """Return the algorithm of each granule if no guard is raised."""
        lengths = (min(GRANULE, k - start) for start in range(0, k, GRANULE))
        return tuple(cls.first if length >= cls.shortest else Way.IEEE for length in lengths)

    def _way(self, a: Any, b: Any, index: int) -> Way:
        """Choose the algorithm of one granule from its guards."""
        return self.first if self._holds(a, b, index) else Way.IEEE

    def _holds(self, a: GuardedOperand, b: GuardedOperand, index: int) -> bool:
        """Whether the fast algorithm is accurate enough for the product of one granule of A and of B."""
        guards = a.found.guards[index] | b.found.guards[index]
        return not guards or (guards == Guard.SPARSE and holds(a.made.counts[index], b.made.counts[index]))

    @abstractmethod
    def _chain(self, ways: tuple[Way, ...], a: Any, b: Any, c: Array | None, d: Array, symmetric: bool = False) -> None:
        """Add the products of all granules in ascending k: the first to C, each other one to D.

        If ``symmetric``, elements of D above the diagonal need not be computed.
        """

    def _accumulate(self, a: Any, b: Any, c: Array | None, d: Array) -> None:
        self._add_granules(a, b, c, d, symmetric=False)

    def _triangle(self, a: Any, b: Any, c: Array | None, d: Array) -> bool:
        ways = self._add_granules(a, b, c, d, symmetric=True)
        return self.mirrors and Way.IEEE not in ways and ways == self._expected(a.shape[-1])

    def _add_granules(self, a: Any, b: Any, c: Array | None, d: Array, symmetric: bool) -> tuple[Way, ...]:
        """Write ``c + a @ b`` into ``d``, and return the algorithm of each granule."""
        expected = self._expected(a.shape[-1])
        begun = not self._waits(a, b)
        if begun:
            self._chain(expected, a, b, c, d, symmetric)
        ways = self._ways(a, b)
        if not begun or ways != expected:
            self._chain(ways, a, b, c, d, symmetric)
        return ways

    def _waits(self, a: Any, b: Any) -> bool:
        """Whether a product first reads its guards, which may not have arrived yet.

        Otherwise it begins the algorithm that they nearly always allow. If a guard is raised after all, D is computed
        again from C, which is unchanged.
        """
        here = a.found.here and b.found.here
        return here or self._raised or math.prod(a.shape) * b.shape[-1] >= LONG

    def _ways(self, a: Any, b: Any) -> tuple[Way, ...]:
        """Return the algorithm of each granule."""
        ways = expected = self._expected(a.shape[-1])
        if a.found.raised or b.found.raised:
            ways = tuple(way if way is Way.IEEE else self._way(a, b, i) for i, way in enumerate(expected))
        self._remember([way is first for way, first in zip(ways, expected, strict=True)])
        self.patience = 0
        return ways

    def _remember(self, equal: Sequence[bool]) -> None:
        """Remember which granules took the expected algorithm."""
        self._raised, self._unequal = not all(equal), 2 * sum(equal) < len(equal)

    def declines(self, steps: int) -> bool:
        """Whether the library is faster for a product of so many multiply-adds, since guards are raised.

        They are raised if they were in most granules of the last product, or of the last sample.
        """
        sample = self._sample
        if sample is not None and all(operand.found.here for operand in sample):
            self._sample = None
            with self._on_device(), self._module.cuda.Stream(non_blocking=True):  # the caller's has the product
                self._remember([self._holds(*sample, index) for index in range(len(sample[0].found.guards))])
            self.patience = min(2 * self.patience + 1, MOST_PATIENCE) if self._unequal else 0
        if steps >= LONG:
            self.patience = 0
        return self._unequal and steps < self.library_below

    def look(self, a: Array, b: Array, prepare: Callable[[Array, str], GuardedOperand] | None = None) -> None:
        """Look for the guards of a sample of rows and columns. Nobody waits for them.

        ``prepare`` makes operands of this kernel from other matrices, which are its own by default.
        """
        if self._sample is None:
            prepare = prepare or self._format
            with self._on_device():
                rows, columns = (max(1, size // SAMPLE) for size in (a.shape[-2], b.shape[-1]))
                left, right = prepare(a[..., ::rows, :], "A"), prepare(b[..., ::columns], "B")
            self._sample = replace(left, matrices=None), replace(right, matrices=None)  # the blocks may be freed

    def _by_multiply_adds(self, index: int, a: GuardedOperand, b: GuardedOperand, c: Array | None, d: Array) -> None:
        """Add one granule by a chain of multiply-adds in the operands' own type, which may need copies of them."""
        left, right = a.granule(index), b.granule(index)
        symmetry: Symmetry = "hermitian" if b.conjugated else "symmetric"
        if left.shape[-1] < self.shortest:  # common, with small copies: one launch for a batch
            self._ieee._accumulate(left, turned(right, symmetry), c, d)
            return
        each = (2 + b.conjugated) * d.itemsize  # B as a real matrix is twice as large, and is made of its conjugate
        for x, y, added, to in by_parts(left, right, c, d, each):
            self._ieee._accumulate(x, turned(y, symmetry), added, to)


def by_parts(
    left: Array, right: Array, c: Array | None, d: Array, each: int
) -> Iterator[tuple[Array, Array, Array | None, Array]]:
    """Cut a product into products for parts of D, if copies of both operands would take more than `WORKSPACE`.

    The parts are of about the same size: a narrow one at the end would leave multiprocessors idle.

    Parameters
    ----------
    left, right
        ``(*batch, m, k)`` and ``(*batch, n, k)``.
    each
        Bytes that a copy takes for each element.
    """
    row = row_pitch(left.shape[-1], each) * each
    if row * (math.prod(left.shape[:-1]) + math.prod(right.shape[:-1])) <= WORKSPACE:
        yield left, right, c, d
        return
    edge = max(ROWS, WORKSPACE // (2 * row) // ROWS * ROWS)
    batch, (m, n) = d.shape[:-2], d.shape[-2:]
    # NumPy's function calls CuPy's for CuPy arrays
    left, right = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (left, right))
    for place in np.ndindex(batch):
        for down, across in parts(m, n, _even(m, edge), _even(n, edge)):
            added = None if c is None else c[place][down, across]
            yield left[place][down], right[place][across], added, d[place][down, across]


def _even(size: int, most: int) -> int:
    """Return the size of equal parts, in whole tiles, of which there are as few as of parts of ``most``."""
    return -(-size // (-(-size // most) * ROWS)) * ROWS


def parts(m: int, n: int, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Cut C into parts of ``rows`` by ``columns``; the last ones are smaller."""
    for down in range(0, m, rows):
        for across in range(0, n, columns):
            yield slice(down, min(m, down + rows)), slice(across, min(n, across + columns))
