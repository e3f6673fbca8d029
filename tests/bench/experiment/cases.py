"""The cases to measure, the most important first: programs, sizes, places of operands, types, workers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from distmm.errors import InputError
from distmm.planning.owners import Grid
from distmm.planning.precision import Precision

__all__ = [
    "DISTMM",
    "KERNEL",
    "PLACES",
    "TYPES",
    "Case",
    "Device",
    "Experiment",
    "Group",
    "Program",
    "element",
    "weak_size",
]

Device = Literal["cpu", "gpu"]

# The pseudo-program that measures one worker's kernel; each product prepares its operands. Its rate times the number of
# workers is the upper limit for a product.
KERNEL = "kernel"

# Edge of the product of the kernel alone, unless blocks are smaller. Larger products are not faster.
KERNEL_EDGE = 16384

TYPES = ("float32", "float64", "bfloat16", "complex64")

# Places of A, B and C that are measured by default. The other place is "streamed": A and B are resident, C is made a
# quarter at a time, and each block of C is freed once ``C.sum()`` has read it. So a C that does not fit is computed.
PLACES = ("resident", "host")

# Types that "streamed" measures, on GPUs too.
STREAMED_TYPES = ("float32", "float64")


@dataclass(frozen=True)
class Program:
    """A program that multiplies, and the cases that it can do.

    Attributes
    ----------
    name : str
    module : str
        The measuring process imports it. Its ``program`` takes a `Task`, and is a context manager. It yields the
        function that measures: called with a `Case` and a seed, it returns fields of a `Row`.
    kinds : mapping
        For each device: the supported places of operands, and the supported types.
    warm_edge : int, optional
        Largest edge of the four blocks along a dimension of the product that warms up a GPU. By default that product
        is the one of the case.
    """

    name: str
    module: str
    kinds: Mapping[Device, tuple[Sequence[str], Sequence[str]]]
    warm_edge: int | None = None


DISTMM = Program("distmm", "experiment.products", dict.fromkeys(("gpu", "cpu"), ((*PLACES, "streamed"), TYPES)))


def element(name: str) -> np.dtype[Any]:
    """Return the type of elements of this name."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def weak_size(base: int, workers: int, blocks: int) -> tuple[int, int]:
    """Return the size of a weakly scaled product: ``base * sqrt(workers)``, in whole blocks.

    Each worker then holds as many elements of A, B and C as a single worker does at `base`. The number of blocks is the
    same for all numbers of workers. Their edge is a multiple of 1/32 of the edge at `base`, so n differs from the exact
    size by at most ``base / 64``.

    Parameters
    ----------
    base : int
        Size on one worker.
    workers : int
    blocks : int
        Blocks along each dimension.

    Returns
    -------
    tuple of int
        Size n, and the edge of its blocks.
    """
    step = max(1, base // blocks // 32)
    edge = max(1, round(base * math.sqrt(workers) / blocks / step)) * step
    return edge * blocks, edge


@dataclass(frozen=True)
class Case:
    """A product of two n x n matrices of N(0, 1). Each repetition has new matrices.

    Attributes
    ----------
    program : str
        Name of a `Program`, or `KERNEL`.
    scaling : {"strong", "weak", "kernel"}
    place : {"resident", "host", "streamed"}
        Where A, B and C are: in the workers' memory, or in the host's memory (the client's arrays). For "streamed" see
        `PLACES`.
    workers : int
        GPUs, or CPU processes with one thread each.
    n, block : int
        Size, and edge of the blocks of resident matrices.
    """

    program: str
    scaling: str
    place: str
    dtype: str
    workers: int
    n: int
    block: int

    @property
    def flops(self) -> int:
        """Additions and multiplications."""
        return (8 if element(self.dtype).kind == "c" else 2) * self.n**3

    @property
    def bound(self) -> int:
        """Least bytes between workers with stationary C: ``n^2 (rows + columns - 2)`` elements.

        It is the bound of the best two-dimensional grid, if each block is sent once to each worker that needs it.
        """
        between = min(grid.rows + grid.columns - 2 for grid in Grid.all_of(self.workers))
        return between * self.n**2 * element(self.dtype).itemsize

    def __str__(self) -> str:
        what = "" if self.scaling == KERNEL else f", {self.scaling}, {self.place}"
        return f"{self.program} on {self.workers}{what}, {self.dtype}, n = {self.n}"


@dataclass(frozen=True)
class Group:
    """Cases that one process measures one after the other."""

    program: Program
    workers: int
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Experiment:
    """The requested measurements.

    Attributes
    ----------
    device : {"cpu", "gpu"}
    counts : sequence of int
        Numbers of workers.
    size : int
        n of strong scaling.
    weak : int
        n of weak scaling on one worker.
    blocks : int
        Blocks along each dimension of resident matrices. A multiple of the grid's rows and columns keeps all workers
        busy.
    programs : sequence of Program
    scalings, places, dtypes : sequences of str
    precision, kernel
        Options of `distmm.matmul`.
    repeat : int
        Products of each case, with new matrices. The result is the median.
    seed : int
    """

    device: Device
    counts: Sequence[int]
    size: int
    weak: int
    blocks: int = 4
    programs: Sequence[Program] = (DISTMM,)
    scalings: Sequence[str] = ("strong", "weak")
    places: Sequence[str] = PLACES
    dtypes: Sequence[str] = ("float32",)
    precision: Precision = "highest"
    kernel: str | None = None
    repeat: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        elsewhere = [program.name for program in self.programs if self.device not in program.kinds]
        if elsewhere:
            raise InputError(f"{', '.join(elsewhere)} cannot be measured on the {self.device.upper()}: leave it out")
        known = {
            "scalings": ("strong", "weak"),
            "places": (*PLACES, "streamed"),
            "dtypes": TYPES,
        }
        for what, names in known.items():
            wrong = sorted(set(getattr(self, what)) - set(names))
            if wrong:
                raise InputError(f"{what} {', '.join(wrong)}: on this device there are {', '.join(names)}")
        numbers = {"size": self.size, "weak": self.weak, "repeat": self.repeat, "blocks": self.blocks}
        for what, number in numbers.items():
            if number < 1:
                raise InputError(f"{what} is {number}: it must be at least 1")
        if not self.counts or min(self.counts) < 1:
            raise InputError(f"numbers of workers {list(self.counts)}: give some, of at least 1 each")
        smaller = min(self.size, self.weak)
        if smaller < self.blocks:
            raise InputError(
                f"size {smaller} has no {self.blocks} blocks along a dimension: give fewer, or a larger size"
            )

    def groups(self) -> list[Group]:
        """Return all cases, grouped by the process that measures them.

        The most important cases come first, since a deadline cuts off the last ones. First is distmm: on one worker, on
        all workers, then on the numbers between. After it come the other programs: on all workers, on one, then on the
        numbers between.
        """
        fewest, *more = sorted(set(self.counts))
        ours, peers = ([each for each in self.programs if (each == DISTMM) is own] for own in (True, False))
        found = [(program, workers) for workers in [fewest, *more[::-1]] for program in ours]
        found += [(program, workers) for workers in [*more[-1:], fewest, *more[-2::-1]] for program in peers]
        groups = [Group(program, workers, tuple(self._cases(program, workers))) for program, workers in found]
        if groups and groups[0].program == DISTMM:
            first, edge = groups[0], min(KERNEL_EDGE, -(-self.size // self.blocks))
            alone = tuple(Case(KERNEL, KERNEL, "resident", dtype, 1, edge, edge) for dtype in self.dtypes)
            groups[0] = Group(first.program, first.workers, alone + first.cases)
        return [group for group in groups if group.cases]

    def _cases(self, program: Program, workers: int) -> Iterator[Case]:
        places, dtypes = program.kinds[self.device]
        sizes = {
            "strong": (self.size, -(-self.size // self.blocks)),
            "weak": weak_size(self.weak, workers, self.blocks),
        }
        for scaling in ("strong", "weak"):
            for place in places:
                for dtype in STREAMED_TYPES if place == "streamed" else dtypes:
                    if scaling in self.scalings and place in self.places and dtype in self.dtypes:
                        yield Case(program.name, scaling, place, dtype, workers, *sizes[scaling])
