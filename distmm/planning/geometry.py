"""Index arithmetic of a blocked matrix product: the problem, its blocks, and the grid of workers that own them.

A product ``C = A @ B`` with A ``(*batch, m, k)`` and B ``(*batch, k, n)`` is cut into blocks ``A[i, p]``, ``B[p, j]``
and ``C[i, j]``. A *panel* is one p: a column of A blocks and the row of B blocks that meet it. A *step* is one task
of the chain that makes ``C[i, j]``; it takes one or several consecutive panels. Everything here is immutable and
pure: integers in, tuples out.

A symmetric product, ``A @ A.T`` or ``A @ A.conj().T``, has chains for the blocks of its lower triangle only, the
diagonal included: ``i >= j``. The others are transposes of those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice, product
from typing import Literal

import ml_dtypes
import numpy as np

from distmm.errors import InputError

__all__ = [
    "Blocking",
    "Grid",
    "Problem",
    "Symmetry",
    "Wave",
    "accumulator_dtype",
    "even_edges",
    "operand_batch",
    "ranges",
    "slices",
]

# What C is as the product of A with its own transpose (BLAS: SYRK), or with its conjugate transpose (HERK).
Symmetry = Literal["symmetric", "hermitian"]


def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    """Type in which a product with result type `dtype` is accumulated over all of k.

    float16 and bfloat16 accumulate in float32; integers of at most 32 bits in int32 and the other integers in int64,
    whose two's complement arithmetic gives the same bits after the final cast; bool in int64, because a count of
    2**32 must not look like zero.

    Raises
    ------
    InputError
        For types without a matrix product here: object, strings, dates, structured and extended-precision types.
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return np.dtype(np.int32 if dtype.itemsize <= 4 else np.int64)
    if dtype.kind == "b":
        return np.dtype(np.int64)
    if dtype in (np.float16, ml_dtypes.bfloat16):
        return np.dtype(np.float32)
    if dtype.newbyteorder("=") in (np.float32, np.float64, np.complex64, np.complex128):
        return dtype.newbyteorder("=")
    raise InputError(
        f"matrices of dtype {dtype} cannot be multiplied here; cast them first, for example with .astype('float64')"
    )


def even_edges(size: int, edge: int) -> tuple[int, ...]:
    """Cut `size` into blocks of `edge`, the last one ragged; a size of 0 is one empty block."""
    if size == 0:
        return (0,)
    full, rest = divmod(size, edge)
    return (edge,) * full + ((rest,) if rest else ())


def ranges(count: int, parts: int, multiple: int = 1) -> tuple[range, ...]:
    """Cut ``range(count)`` into at most `parts` ranges of one length, a multiple of `multiple`, the last one ragged."""
    length = _length(count, parts, multiple)
    return tuple(range(start, min(start + length, count)) for start in range(0, count, length))


def _length(count: int, parts: int, multiple: int) -> int:
    return math.ceil(math.ceil(count / parts) / multiple) * multiple


def slices(edges: tuple[int, ...]) -> tuple[slice, ...]:
    """Index range of every block."""
    ends = list(accumulate(edges))
    return tuple(slice(end - edge, end) for edge, end in zip(edges, ends, strict=True))


@dataclass(frozen=True)
class Problem:
    """One product: A ``(*batch, m, k)`` times B ``(*batch, k, n)`` in result type `dtype`.

    `a_batch` and `b_batch` are the operands' own batch dimensions, right-aligned and broadcast as in `numpy.matmul`.
    With a `symmetry`, B is the (conjugate) transpose of A, and no operand of its own.
    """

    m: int
    k: int
    n: int
    dtype: np.dtype
    a_batch: tuple[int, ...] = ()
    b_batch: tuple[int, ...] = ()
    symmetry: Symmetry | None = None

    def __post_init__(self) -> None:
        accumulator_dtype(self.dtype)  # raises for a type that has no product
        self.batch  # noqa: B018  raises where the batch dimensions do not broadcast
        if self.symmetry is not None and (self.m, self.a_batch) != (self.n, self.b_batch):
            raise InputError(f"a {self.symmetry} product is square: it cannot be {self.m} x {self.n}")

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """Broadcast batch dimensions, those of C."""
        try:
            return np.broadcast_shapes(self.a_batch, self.b_batch)
        except ValueError:
            raise InputError(f"batch dimensions {self.a_batch} of A and {self.b_batch} of B do not broadcast") from None

    @property
    def element_flops(self) -> int:
        """Floating-point (or integer) operations of one element of C: 2k, four times as many for complex numbers."""
        return 2 * self.k * (4 if self.dtype.kind == "c" else 1)

    @property
    def flops(self) -> int:
        """Operations of the product: those of all elements of C, or of one triangle of a symmetric one."""
        elements = self.m * self.n if self.symmetry is None else self.m * (self.m + 1) // 2
        return elements * math.prod(self.batch) * self.element_flops

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of C."""
        return (*self.batch, self.m, self.n)


@dataclass(frozen=True)
class Grid:
    """`rows` x `columns` workers; block (i, j) of any matrix lives at ``(i % rows, j % columns)``: 2-D block-cyclic.

    So ``A[i, p]`` and ``C[i, j]`` share a row of workers, ``B[p, j]`` and ``C[i, j]`` a column: each block of A is
    sent along one row of the grid and each block of B along one column, at most once a worker. A batch index rotates
    the ranks, so that many small products spread over all workers; so does `shift`, for a product that is to be done
    again on other workers. A grid of one worker goes on to a second one for that.

    With several `layers`, each is such a grid for a part of k (split-K), and makes a partial sum of every block of C.
    """

    rows: int
    columns: int
    layers: int = 1
    shift: int = 0

    def __post_init__(self) -> None:
        if min(self.rows, self.columns, self.layers) < 1:
            raise InputError(
                f"a grid needs at least one row, column and layer of workers, not {self.rows} x {self.columns} x "
                f"{self.layers}"
            )

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.rows * self.columns * self.layers

    def owner(self, i: int, j: int, batch: tuple[int, ...] = (), layer: int = 0) -> int:
        """Rank of the worker at which block (i, j) lives, on a layer."""
        row, column = i % self.rows, j % self.columns
        rank = (layer * self.rows + row) * self.columns + column + sum(batch) + self.shift
        return rank % (max(self.size, 2) if self.shift else self.size)

    @staticmethod
    def all_of(workers: int, layers: int = 1) -> tuple[Grid, ...]:
        """Every grid of exactly `workers` ranks in `layers` layers; none where they do not divide evenly."""
        cells, rest = divmod(workers, layers)
        return () if rest else tuple(Grid(r, cells // r, layers) for r in range(1, cells + 1) if cells % r == 0)


@dataclass(frozen=True)
class Wave:
    """A rectangle of C blocks that are computed together: what must fit into the workers' memory at one time.

    Attributes
    ----------
    index : int
        Its place in the order of waves.
    batches : range
        Of the batch blocks, counted in row-major order.
    rows, columns : range
        Of the blocks of C.
    triangle : bool
        Only the blocks with ``i >= j``; rows and columns are the same.
    """

    index: int
    batches: range
    rows: range
    columns: range
    triangle: bool = False

    @property
    def c_blocks(self) -> int:
        """Number of blocks of C that are multiplied."""
        rows, columns = len(self.rows), len(self.columns)
        return len(self.batches) * (rows * (rows + 1) // 2 if self.triangle else rows * columns)


@dataclass(frozen=True)
class Blocking:
    """Block edges of a product along m, k and n and along each batch dimension, and how many panels one task takes.

    With `triangle`, only the blocks of C with ``i >= j`` are multiplied.
    """

    m: tuple[int, ...]
    k: tuple[int, ...]
    n: tuple[int, ...]
    batch: tuple[tuple[int, ...], ...] = field(default=())
    panels: int = 1
    triangle: bool = False

    def __post_init__(self) -> None:
        if self.triangle and self.m != self.n:
            raise InputError(
                f"blocks of {max(self.m)} x {max(self.n)}: a symmetric product is cut alike along m and n, so that "
                "each block has its mirror image"
            )
        if self.panels < 1:
            raise InputError(f"a task takes at least one panel, not {self.panels}")

    @property
    def c_blocks(self) -> int:
        """Number of blocks of C."""
        return len(self.m) * len(self.n) * math.prod(len(edges) for edges in self.batch)

    @cached_property
    def whole(self) -> Wave:
        """All of C as one wave."""
        return self.waves((1, 1, 1), (1, 1))[0]

    @property
    def c_elements(self) -> int:
        """Number of elements of the blocks of C that are multiplied."""
        m, n = sum(self.m), sum(self.n)
        area = (m * m + sum(edge * edge for edge in self.m)) // 2 if self.triangle else m * n
        return area * math.prod(map(sum, self.batch))

    def parts(self, layers: int = 1) -> tuple[tuple[range, ...], ...]:
        """Panels of each step of a chain, in ascending k, for each of at most `layers` parts of k."""
        parts = ranges(len(self.k), layers, self.panels)
        return tuple(tuple(range(p, min(p + self.panels, part.stop)) for p in part[:: self.panels]) for part in parts)

    def part_panels(self, layers: int) -> int:
        """Count the panels of each part of k but the last, which may have fewer: a multiple of those of a step."""
        return _length(len(self.k), layers, self.panels)

    @property
    def steps(self) -> tuple[range, ...]:
        """Panels of each step of the longest chain, in ascending k, where k is not split."""
        return self.parts()[0]

    def chain_steps(self, layers: int = 1) -> int:
        """Count the steps of the longest chain."""
        return math.ceil(min(self.part_panels(layers), len(self.k)) / self.panels)

    def chain_tasks(self, layers: int = 1) -> int:
        """Count the product tasks of one block of C: its steps, and the sums of its partial blocks."""
        return math.ceil(len(self.k) / self.panels) + math.ceil(len(self.k) / self.part_panels(layers)) - 1

    def tasks(self, layers: int = 1) -> int:
        """Count the product tasks of all chains."""
        return self.whole.c_blocks * self.chain_tasks(layers)

    def mirrored(self, wave: Wave) -> int:
        """Count the blocks of C that are transposes of a wave's blocks."""
        diagonal = len(wave.batches) * len(wave.rows) if wave.triangle else 0
        return wave.c_blocks - diagonal if self.triangle else 0

    @cached_property
    def largest(self) -> tuple[int, int, int]:
        """Edges (m, k, n) of the largest block."""
        return max(self.m), max(self.k), max(self.n)

    def batches(self) -> Iterator[tuple[int, ...]]:
        """Every batch block index of C, in row-major order."""
        return product(*(range(len(edges)) for edges in self.batch))

    def waves(self, parts: tuple[int, int, int], multiple: tuple[int, int]) -> tuple[Wave, ...]:
        """Cut C into at most `parts` (batch blocks, block rows, block columns) waves, at multiples of the grid's edges.

        Row-major: the rows of A that a wave has read are those of the next one too. Batches are cut along their first
        dimension. A triangle is cut alike along both: into triangles on the diagonal, and rectangles below it.
        """
        batches = ranges(math.prod(map(len, self.batch)), parts[0], math.prod(map(len, self.batch[1:])))
        if self.triangle:
            cuts = ranges(len(self.m), max(parts[1:]), math.lcm(*multiple))
            below = [(rows, columns) for at, rows in enumerate(cuts) for columns in cuts[: at + 1]]
            every = ((b, rows, columns, rows == columns) for b, (rows, columns) in product(batches, below))
            return tuple(Wave(index, *cut) for index, cut in enumerate(every))
        rows, columns = ranges(len(self.m), parts[1], multiple[0]), ranges(len(self.n), parts[2], multiple[1])
        return tuple(Wave(index, *cut) for index, cut in enumerate(product(batches, rows, columns)))

    def count_waves(self, parts: tuple[int, int, int], multiple: tuple[int, int]) -> int:
        """Count the waves of `waves`, without making them."""
        batches = ranges(math.prod(map(len, self.batch)), parts[0], math.prod(map(len, self.batch[1:])))
        if self.triangle:
            cuts = len(ranges(len(self.m), max(parts[1:]), math.lcm(*multiple)))
            return len(batches) * cuts * (cuts + 1) // 2
        rows, columns = ranges(len(self.m), parts[1], multiple[0]), ranges(len(self.n), parts[2], multiple[1])
        return len(batches) * len(rows) * len(columns)

    def wave_batches(self, wave: Wave) -> tuple[range, ...]:
        """Batch blocks of a wave along each batch dimension."""
        inner = math.prod(map(len, self.batch[1:]))
        first = range(wave.batches.start // inner, wave.batches.stop // inner)
        return (first, *(range(len(edges)) for edges in self.batch[1:])) if self.batch else ()

    def regions(self, wave: Wave) -> tuple[tuple[slice, ...], ...]:
        """Where the blocks of a wave are in C, and their mirror images where those are elsewhere."""
        there = self.region(wave)
        *batch, rows, columns = there
        return (there, (*batch, columns, rows)) if self.triangle and not wave.triangle else (there,)

    def region(self, wave: Wave) -> tuple[slice, ...]:
        """Where the blocks of a wave are in C."""
        blocks = [*self.wave_batches(wave), wave.rows, wave.columns]
        cuts = [slices(edges) for edges in (*self.batch, self.m, self.n)]
        return tuple(slice(cut[at.start].start, cut[at.stop - 1].stop) for cut, at in zip(cuts, blocks, strict=True))

    def c_indices(self, wave: Wave | None = None) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Every block of C that is multiplied, or of one wave of it, as ``(batch index, i, j)``, in row-major order."""
        wave = self.whole if wave is None else wave
        batches = islice(self.batches(), wave.batches.start, wave.batches.stop)
        return ((b, i, j) for b in batches for i in wave.rows for j in wave.columns if i >= j or not wave.triangle)


def operand_batch(index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Batch block index of an operand with batch dimensions `shape` that meets C's batch block `index`.

    Dimensions that the operand lacks are dropped, those of length 1 are broadcast: their only block is block 0.
    """
    own = index[len(index) - len(shape) :]
    return tuple(0 if length == 1 else i for i, length in zip(own, shape, strict=True))
