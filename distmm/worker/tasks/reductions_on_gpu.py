"""What kernels find in blocks in GPU memory: the k largest elements of each row, and those above a threshold."""

from __future__ import annotations

from typing import Any

from distmm.planning.problem import accumulator_dtype
from distmm.worker.tasks.metrics import Metric, weighing

Block = Any  # a CuPy array


def finds_largest(block: Block, k: int) -> bool:
    """Whether `largest` can reduce this block: on a GPU, for small k, of types that the kernel compares."""
    if not hasattr(block, "__cuda_array_interface__") or block.size == 0:
        return False
    from distmm_kernels.reductions import largest as kernel

    return kernel.suits(block.dtype, k, block.shape[-1])


def largest(block: Block, k: int, metric: Metric | None, squares: Any) -> tuple[Block, Block]:
    """Return the k largest elements of each row ``(*batch, m, n)``, or scores of them, and their columns.

    Parameters
    ----------
    block : cupy.ndarray
    k : int
    metric : {"inner", "cosine", "euclidean"}, optional
        With it scores are compared, and a NaN is near nothing; without it, elements, and NaN is the largest.
    squares : cupy.ndarray ``(n,)``, optional
        Squared norms of the rows of Y, for a metric that needs them.
    """
    from distmm_kernels import device
    from distmm_kernels.reductions import largest as kernel

    if metric is None:
        return kernel.largest(block, k, device.current())
    how, weights = weighing(metric, squares, accumulator_dtype(block.dtype))
    return kernel.largest(block, k, device.current(), how, weights)


def finds_above(block: Block, least: float) -> bool:
    """Whether `above` can reduce this block: on a GPU, of types that the kernel compares."""
    if not hasattr(block, "__cuda_array_interface__") or block.size == 0:
        return False
    from distmm_kernels.reductions import above as kernel

    return kernel.suits(block.dtype, block.shape[-1], least)


def above(block: Block, least: float, most: int) -> tuple[int, Block | None, Block | None, Block | None]:
    """Return how many elements reach `least`, and their rows, columns and values if they are at most `most`."""
    from distmm_kernels import device
    from distmm_kernels.reductions import above as kernel

    return kernel.above(block, least, most, device.current())
