"""Which kernel the tasks of a product use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distmm.planning.precision import Precision

if TYPE_CHECKING:
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


def kernel_facts(choice: KernelChoice) -> dict[str, Any]:
    """Return name and granule of the kernel for large blocks, or under "no kernel" why there is none."""
    try:
        kernel = kernel_for(choice, LARGE, LARGE, LARGE, ())
    except (ValueError, RuntimeError) as error:
        return {"no kernel": str(error)}
    return {"kernel": kernel.name, "granule": kernel.granule}
