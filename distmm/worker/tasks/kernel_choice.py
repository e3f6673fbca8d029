"""Which kernel the tasks of a product use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distmm.planning.precision import Precision
from distmm.planning.problem import accumulator_dtype

if TYPE_CHECKING:
    from distmm_kernels.candidates import Candidate
    from distmm_kernels.kernel import Kernel

__all__ = ["LARGE", "KernelChoice", "kernel_facts", "kernel_for"]

LARGE = 8192  # edge of the blocks of most products


@dataclass(frozen=True)
class KernelChoice:
    """What decides which kernel multiplies: device, result type, precision, and a name if the user asks for one."""

    device: Literal["cpu", "cuda"]
    dtype: np.dtype
    precision: Precision = "highest"
    name: str | None = None


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
    from distmm_kernels import config, device, select

    here = device.cpu() if choice.device == "cpu" else device.current()
    if here.kind != choice.device:
        raise RuntimeError(f"this product was planned for GPUs, but this worker cannot use one: {device.why_no_gpu()}")
    problem = config.Problem(m=m, k=k, n=n, dtype=config.operand_dtype(choice.dtype), batch=batch)
    # Blocks of a product may differ in size, and must not differ in the kernel that multiplies them.
    reproducible = here.kind == "cuda" and choice.name is None
    return select.select(problem, here, choice.precision, reproducible=reproducible, name=choice.name)


def _candidate_for(choice: KernelChoice, m: int, k: int, n: int, model: str, capability: tuple[int, int]) -> Candidate:
    """Return what a worker with such a GPU would take, from the table of kernels alone."""
    from distmm_kernels import config, device, select

    gpu = device.Device("cuda", model, 0, 0, capability, 0)
    problem = config.Problem(m=m, k=k, n=n, dtype=config.operand_dtype(choice.dtype))
    return select.choose(problem, gpu, choice.precision, choice.name is None, choice.name)


def kernel_facts(choice: KernelChoice, absent: tuple[str, tuple[int, int]] | None = None) -> dict[str, Any]:
    """Return name and granule of the kernel for large blocks, or under "no kernel" why there is none.

    The kernel is that of this process's device, or of a GPU that is `absent`, given by its model and its compute
    capability.
    """
    try:
        large = (LARGE, LARGE, LARGE)
        kernel = kernel_for(choice, *large, ()) if absent is None else _candidate_for(choice, *large, *absent)
    except (ValueError, RuntimeError) as error:
        return {"no kernel": str(error)}
    exact = accumulator_dtype(choice.dtype).kind == "i"  # integer sums: cuts of k do not change the result
    return {"kernel": kernel.name, "granule": 1 if exact else kernel.granule}
