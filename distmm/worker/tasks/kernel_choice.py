"""Which kernel the tasks of a product use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distmm.errors import InputError
from distmm.planning.precision import Precision
from distmm.transfer import block_memory

if TYPE_CHECKING:
    from distmm.planning.plan import Plan
    from distmm_kernels.config import Problem
    from distmm_kernels.device import Device
    from distmm_kernels.kernel import Kernel

LARGE = 8192  # edge of the blocks of most products


@dataclass(frozen=True)
class KernelChoice:
    """What decides which kernel multiplies.

    Attributes
    ----------
    device, dtype, precision
        Where, the result type, and the least accuracy.
    name : str, optional
        The kernel that the user asks for.
    planned : str, optional
        The kernel that the plan has chosen for all workers, where the user asks for none.
    """

    device: Literal["cpu", "cuda"]
    dtype: np.dtype
    precision: Precision = "highest"
    name: str | None = None
    planned: str | None = None

    @classmethod
    def of(cls, plan: Plan) -> KernelChoice:
        """Return what the tasks of a plan need to know of their kernel."""
        planned = None if plan.kernel is not None else plan.cluster.kernel
        return cls(plan.cluster.device, plan.problem.multiplied, plan.precision, plan.kernel, planned)


@lru_cache(maxsize=256)
def kernel_for(choice: KernelChoice, m: int, k: int, n: int, batch: tuple[int, ...]) -> Kernel:
    """Return this process's kernel for blocks ``(*batch, m, k)`` and ``(*batch, k, n)``.

    Raises
    ------
    RuntimeError
        If the product was planned for GPUs and this process cannot use one.
    ValueError
        If the named kernel is unknown or cannot multiply such blocks here.
    """
    from distmm_kernels import config, select
    from distmm_kernels.gemm import cpu

    here = _here(choice)
    problem = config.Problem(m=m, k=k, n=n, dtype=config.operand_dtype(choice.dtype), batch=batch)
    name = choice.name
    # not for blocks larger than it can count, nor with a plan that was made for other GPUs
    if name is None and choice.planned is not None and select.serves(choice.planned, problem, here):
        name = choice.planned
    # Blocks of a product may differ in size, and must not differ in the kernel that multiplies them.
    reproducible = here.kind == "cuda" and name is None
    kernel = select.select(problem, here, choice.precision, reproducible=reproducible, name=name)
    if isinstance(kernel, cpu.CpuKernel) and block_memory.blocks.reuses:
        kernel.empty = block_memory.blocks.new
    return kernel


def check_named(name: str | None, device: str, dtype: np.dtype) -> None:
    """Refuse a kernel that does not run on the caller's choice of device, or multiplies no operands of a type on any.

    Raises
    ------
    InputError
        With the device or the types of the kernel.
    """
    if name is None:
        return
    from distmm_kernels import candidates, config

    row = next(each for each in candidates.CANDIDATES if each.name == name)
    needs = "cpu" if row.device_kind == "cpu" else "gpu"
    if device not in ("auto", needs):
        raise InputError(f"kernel {name!r} needs device {needs!r}, and the device is {device!r}: leave one of them out")
    if config.operand_dtype(dtype).name not in row.dtypes:
        raise InputError(
            f"kernel {name!r} does not multiply {dtype}, but {', '.join(sorted(row.dtypes))}: leave it out"
        )


def _here(choice: KernelChoice) -> Device:
    """Return the device of this process that a product was planned for."""
    from distmm_kernels import device

    here = device.cpu() if choice.device == "cpu" else device.current()
    if here.kind != choice.device:
        raise RuntimeError(f"this product was planned for GPUs, but this worker cannot use one: {device.why_no_gpu()}")
    return here


def kernel_facts(
    choice: KernelChoice, reproducible: bool = False, absent: tuple[str, tuple[int, int]] | None = None
) -> dict[str, Any]:
    """Return what plans need to know of the kernels for large blocks, or under "no kernel" why there is none.

    The kernels are those of this process's device, or of a GPU that is `absent`, given by its model and its compute
    capability. Under "kernels" stand the facts of each that may be chosen, by name; `distmm_kernels.select.facts` says
    which. If the choice has a name, it is that one alone. "unmeasured" says whether they are guesses, from the rates of
    another model, which `measure` would replace; "build", the seconds that a compiled kernel takes if they are still
    being built.
    """
    from distmm_kernels import background, device, measured, select

    problem = _large(choice)
    try:
        here = _here(choice) if absent is None else device.Device("cuda", absent[0], 0, 0, absent[1], 0)
        # It begins while the product is planned.
        building = absent is None and background.begin(problem.dtype.name, here.compute_capability)
        needed = absent is None and choice.name is None and not measured.is_shipped(here)
        rates = measured.rates_for(problem, here, choice.precision) if needed else None
        items = None if rates is None else tuple(rates.items())
        how = {"reproducible": reproducible, "name": choice.name, "measured": items}
        kept = select.facts(problem, here, choice.precision, **how)
        kernels = {name: {**known} for name, known in kept.items()}  # the caller may change them
    except (ValueError, RuntimeError) as error:
        return {"no kernel": str(error)}
    return {"kernels": kernels, "unmeasured": needed and rates is None, "build": building * background.BUILD_SECONDS}


def measure(choice: KernelChoice) -> None:
    """Measure this process's GPU for a type and precision, unless its rates are known; it takes about a second."""
    from distmm_kernels import measured

    problem, here = _large(choice), _here(choice)
    if not measured.is_shipped(here) and measured.kept(problem, here, choice.precision) is None:
        measured.measure(problem, here, choice.precision)


def _large(choice: KernelChoice) -> Problem:
    """Return a product of large blocks."""
    from distmm_kernels import config

    return config.Problem(m=LARGE, k=LARGE, n=LARGE, dtype=config.operand_dtype(choice.dtype))
