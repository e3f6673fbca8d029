"""What kernels find in blocks in GPU memory: the k largest elements of each row, and those above a threshold."""

from __future__ import annotations

from typing import Any

from distmm.planning.problem import accumulator_dtype
from distmm.worker.tasks.metrics import Metric, weighing

Block = Any  # a CuPy array


def largest(block: Block, k: int, metric: Metric | None = None, squares: Any = None) -> tuple[Block, Block] | None:
    """Return the k largest elements of each row ``(*batch, m, n)``, or scores of them, and their columns.

    None if the kernel does not find them: in host memory, for a large k, for types that it does not compare.

    Parameters
    ----------
    block : cupy.ndarray
    k : int
    metric : {"inner", "cosine", "euclidean"}, optional
        With it scores are compared, and a NaN is near nothing; without it, elements, and NaN is the largest.
    squares : cupy.ndarray ``(n,)``, optional
        Squared norms of the rows of Y, for a metric that needs them.
    """
    if not _is_on_gpu(block):
        return None
    from distmm_kernels import device
    from distmm_kernels.reductions import largest as kernel

    if not kernel.suits(block.dtype, k, block.shape[-1]):
        return None
    if metric is None:
        return kernel.largest(block, k, device.current())
    how, weights = weighing(metric, squares, accumulator_dtype(block.dtype))
    return kernel.largest(block, k, device.current(), how, weights)


def above(block: Block, least: float, most: int) -> tuple[int, Block | None, Block | None, Block | None] | None:
    """Return how many elements reach `least`, and their rows, columns and values if they are at most `most`.

    None if the kernel does not find them, as for `largest`.
    """
    if not _is_on_gpu(block):
        return None
    from distmm_kernels import device
    from distmm_kernels.reductions import above as kernel

    if not kernel.suits(block.dtype, block.shape[-1], least):
        return None
    return kernel.above(block, least, most, device.current())


def _is_on_gpu(block: Block) -> bool:
    """Whether it has elements, in GPU memory."""
    return hasattr(block, "__cuda_array_interface__") and block.size > 0
