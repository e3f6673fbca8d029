"""A row of the table of kernels: what a kernel multiplies, how precisely, on which devices, with how much memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from distmm_kernels.config import NARROW, PRECISIONS, SUPPORTED, Problem
from distmm_kernels.kernel import Kernel

# The hardware units that do a kernel's multiply-adds. "plain": the float32 or float64 units, by the accumulator.
# "fp64_tensor": the float64 tensor cores. For other types tensor cores have two peak rates: that of `wgmma` and later
# instructions ("tensor"), and that of `mma.sync` ("mma_sync").
Unit = Literal["plain", "fp64_tensor", "tensor", "mma_sync"]

ALL = frozenset(dtype.name for dtype in SUPPORTED + NARROW)
FLOATS = frozenset(dtype.name for dtype in SUPPORTED + NARROW if dtype.kind not in "iub")
HOPPER = ((9, 0), (9, 0))  # the only capability with wgmma
AMPERE = ((8, 0), (99, 0))  # Ampere and later have asynchronous copies to shared memory
# A100, H100 and H200, B200 have float64 tensor cores at full rate. Other GPUs since A100 have the instruction too, but
# it is no faster there than their few float64 units.
FAST_FLOAT64 = frozenset({(8, 0), (9, 0), (10, 0)})
# The float16 tensor cores of the same GPUs are at least 15 times as fast as their float32 units. On other GPUs they are
# 2 to 4 times as fast, so that three products and a split gain nothing.
FAST_TENSOR_CORES = FAST_FLOAT64


@dataclass(frozen=True)
class Candidate:
    """One row of the table. Each file of kernels lists the rows of its classes in ``TABLE``.

    Attributes
    ----------
    kernel
        The class, with its name, kind of device and granule.
    idea
        How the kernel works, in a few words.
    dtypes
        Names of the operand types that it multiplies.
    precision
        The strictest of ``PRECISIONS`` that float products meet; integer products are exact in every kernel.
    tile
        Rows and columns of C that one thread block owns. A tile that extends beyond C takes as long as a whole one.
    capabilities
        The lowest and the highest compute capability on which it runs.
    worth_it
        Compute capabilities on which `select` may choose it; None: all on which it runs. On others it runs only if a
        caller names it.
    unit
        The hardware unit whose peak rate scales the kernel's rate from one GPU model to another; a mapping if that
        depends on the operands' type.
    prepared
        Bytes of the prepared operand for each byte of the block, in addition to the block; 0 if the kernel reads the
        block itself.
    copied
        Bytes of a copy, for each byte of the block, that exists while an operand is prepared whose k is not contiguous.
    workspace
        Most bytes of GPU memory that a running product takes in addition to operands and results; a mapping if that
        depends on the operands' type.
    one_launch
        Operand types for which one launch multiplies all panels of a task and stores C in its own type. Other kernels
        keep the sums of the panels, in the accumulator's type, beside C.
    triangles
        Operand types for which a symmetric product takes half of the operations. Other kernels compute all of it.
    passes
        Bytes read and written outside the mainloop: for each element of A and B, and for each element of C. The
        measured rates of cubes include them. Thin products have more of these bytes per operation.
    direct
        Whether a product of a problem is one launch on matrices as they are, with a result of the third argument's
        type: A in C order, and B in C order, or, if the second argument is true, with contiguous columns. All begin at
        multiples of 16 bytes.
    side_by_side
        Whether it multiplies all matrices of a batch at the same time; otherwise one after the other.
    in_place
        ``"A"``, ``"B"`` or both: the operands in C order that it reads in place if their rows begin at multiples of 16
        bytes; a mapping if that depends on the operands' type.
    slow_if_odd
        Factor of its rate, by type, if k or n is odd; None: it is as fast.
    slice
        Steps of k of the shortest slice that it multiplies beside others, if C has few tiles; None: it has no slices.
    products
        Products of C's size that it computes at the same time for one product.
    sizes_below
        Each size must be less than this, since the kernel's coordinates are limited; None: no limit.
    """

    kernel: type[Kernel]
    idea: str
    dtypes: frozenset[str]
    precision: str
    tile: tuple[int, int] = (1, 1)
    capabilities: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (99, 0))
    worth_it: frozenset[tuple[int, int]] | None = None
    unit: Unit | Mapping[str, Unit] = "plain"
    prepared: float = 0.0
    copied: float = 0.0
    workspace: int | Mapping[str, int] = 0
    one_launch: frozenset[str] = frozenset()
    triangles: frozenset[str] = frozenset()
    passes: tuple[int, int] = (0, 0)
    direct: Callable[[Problem, bool, np.dtype[Any]], bool] = lambda *_: False
    side_by_side: bool = True
    in_place: str | Mapping[str, str] = ""
    slow_if_odd: Mapping[str, float] | None = None
    slice: int | None = None
    products: int = 1
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
        """The kernel's granule of k; None if its results are not bitwise reproducible."""
        return self.kernel.granule

    def unit_of(self, dtype: str) -> Unit:
        """Return the hardware unit whose peak rate scales the kernel's rate for operands of this type."""
        return self.unit if isinstance(self.unit, str) else self.unit.get(dtype, "plain")

    def in_place_of(self, dtype: str) -> str:
        """Return `in_place` for operands of this type."""
        return self.in_place if isinstance(self.in_place, str) else self.in_place.get(dtype, "")

    def workspace_of(self, dtype: str) -> int:
        """Return the most bytes that a running product of operands of this type takes beside operands and results."""
        return self.workspace if isinstance(self.workspace, int) else self.workspace[dtype]
