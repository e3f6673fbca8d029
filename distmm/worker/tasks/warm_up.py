"""Tasks that do before the first product what it would wait for: load the kernel, connect the workers."""

from __future__ import annotations

from typing import Any

import numpy as np

from distmm.worker.tasks.kernel_choice import LARGE, KernelChoice, kernel_for

DEPTH = 512  # of the product that loads a kernel

EDGE = 512  # of the block that tries a connection


def warm(choice: KernelChoice) -> None:
    """Load (or compile) the kernel for large blocks and use it as a chain does."""
    kernel = kernel_for(choice, LARGE, LARGE, LARGE, ())
    kernel.prepare_a(np.zeros((1, LARGE), choice.dtype))  # long rows are prepared by another kernel than short ones
    a = kernel.prepare_a(np.zeros((LARGE, DEPTH), choice.dtype))
    b = kernel.prepare_b(np.zeros((DEPTH, LARGE), choice.dtype))
    one, joined = [(a, b)], kernel.joined([(a, b), (a, b)])
    for panels in (one, joined) if len(joined) == 1 else (one,):
        c = None
        for left, right in (*panels, *panels):  # a first step, and one between
            c = kernel.multiply(left, right, c)
        kernel.multiply(*panels[-1], c, dtype=choice.dtype)  # a last one


def small_block() -> Any:
    """Return a block that travels between GPUs as large ones do."""
    import cupy

    return cupy.zeros((EDGE, EDGE), "f4")


def touch(block: Any) -> None:
    """Receive a block, which Dask transfers for this task."""
