"""A row of the table of kernels: what a kernel multiplies, how precisely, on which devices, and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from distmm_kernels.config import NARROW, PRECISIONS, SUPPORTED, Problem
from distmm_kernels.kernel import Kernel
from distmm_kernels.tiles.tiling import Tiling

__all__ = ["ALL", "AMPERE", "FAST_FLOAT64", "FAST_TENSOR_CORES", "FLOATS", "HOPPER", "Candidate", "Unit", "tile_loads"]

# What a kernel's multiply-adds run on: float32 or float64 units, by the accumulator ("plain"); tensor cores of float64;
# those of other types, as `wgmma` and its like reach them ("tensor"), or as `mma.sync` does.
Unit = Literal["plain", "fp64_tensor", "tensor", "mma_sync"]

ALL = frozenset(dtype.name for dtype in SUPPORTED + NARROW)
FLOATS = frozenset(dtype.name for dtype in SUPPORTED + NARROW if dtype.kind not in "iub")
HOPPER = ((9, 0), (9, 0))  # wgmma exists there only
AMPERE = ((8, 0), (99, 0))  # and later: asynchronous copies to shared memory
# A100, H100 and H200, B200: float64 tensor cores at full rate. Other GPUs since then have the instruction, and do it at
# the rate of a few float64 units, which multiply-adds reach as well.
FAST_FLOAT64 = frozenset({(8, 0), (9, 0), (10, 0)})
# The same have float16 tensor cores 15 times as fast as float32 units, and more; other GPUs 2 to 4 times, so that three
# products and a split gain nothing.
FAST_TENSOR_CORES = FAST_FLOAT64


@dataclass(frozen=True)
class Candidate:
    """One row of the table. The file of a kernel has those of its classes, as ``TABLE``.

    Attributes
    ----------
    kernel
        The class. Name, kind of device and granule are its own.
    idea
        In a few words.
    dtypes
        Operands that it multiplies, by name.
    precision
        The strictest of ``PRECISIONS`` that float products meet; integer products are exact in every kernel.
    tile
        Rows and columns of C that one thread block owns; the part of a tile beyond C is computed in vain.
    loads
        Loads from global memory for one element of C; None for a kernel whose threads load nothing themselves.
    capabilities
        The least and the greatest compute capability.
    worth_it
        Compute capabilities where it is chosen unasked, of those that it runs on; None: all.
    unit
        What its rate follows from one GPU model to another; a mapping where that depends on the operands' type.
    prepared
        Bytes that its own format of a block takes beside the block, for each byte of it; 0 where it uses the block.
    workspace
        Bytes that it takes of a GPU for each product at work, beside operands and results, at most.
    passes
        Bytes that are read and written beside the tiles, for each element of A and B and for each of C. Cubes have
        them in their measured rates; thin products have more of them for an operation.
    side_by_side
        Whether it works on the matrices of a batch at the same time; else each takes as long as it does alone.
    sizes_below
        Sizes that its coordinates can count; None: any.
    """

    kernel: type[Kernel]
    idea: str
    dtypes: frozenset[str]
    precision: str
    tile: tuple[int, int] = (1, 1)
    loads: Callable[[Problem], int] | None = None
    capabilities: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (99, 0))
    worth_it: frozenset[tuple[int, int]] | None = None
    unit: Unit | Mapping[str, Unit] = "plain"
    prepared: float = 0.0
    workspace: int = 0
    passes: tuple[int, int] = (0, 0)
    side_by_side: bool = True
    sizes_below: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"{self.name} has precision {self.precision!r}: use one of {', '.join(PRECISIONS)}")

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.name

    @property
    def device_kind(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return self.kernel.device_kind

    @property
    def granule(self) -> int | None:
        """The kernel's own; None if it promises no bits."""
        return self.kernel.granule

    def unit_of(self, dtype: str) -> Unit:
        """Return what its rate for operands of this type follows."""
        return self.unit if isinstance(self.unit, str) else self.unit.get(dtype, "plain")


def tile_loads(tiling: Tiling, problem: Problem) -> int:
    """Count the loads for an element of C of a thread block that loads a tile of A and one of B for each step."""
    steps = -(-problem.k // tiling.depth) * tiling.depth
    return -(-steps * (tiling.rows + tiling.columns) // (tiling.rows * tiling.columns))
