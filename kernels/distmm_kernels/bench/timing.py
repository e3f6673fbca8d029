"""Times of one product: wall clock on the CPU, CUDA events on the GPU; the median of several runs."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

from distmm_kernels.measured import event_seconds

# A call slower than this many seconds (plain Python, NumPy's integers) has no repetition and no warm-up.
BUDGET = 2.0

Returned = TypeVar("Returned")


def wall_seconds(call: Callable[[], Returned], repeat: int) -> tuple[Returned, float]:
    """Return the result of the call, and the median wall-clock seconds of up to ``repeat`` calls after a warm-up."""

    def once() -> tuple[Returned, float]:
        start = time.perf_counter()
        result = call()
        return result, time.perf_counter() - start

    result, first = once()
    return result, _median(first, lambda: once()[1], repeat)


def cuda_seconds(call: Callable[[int], Any], repeat: int) -> float:
    """Return the median seconds between two CUDA events around ``call(i)`` on the current stream, after a warm-up."""
    numbers = itertools.count()

    def once() -> float:
        return event_seconds(call, [next(numbers)])

    return _median(once(), once, repeat)


def _median(first: float, once: Callable[[], float], repeat: int) -> float:
    """Return the median of up to ``repeat`` more runs; the first run counts only if it has used up the budget."""
    taken: list[float] = []
    while first < BUDGET and len(taken) < repeat and sum(taken) < BUDGET:
        taken.append(once())
    return statistics.median(taken or [first])


def rotation(operand_bytes: int, l2_bytes: int) -> int:
    """Return how many copies of the operands to use in rotation, so that none is still in the L2 cache."""
    return max(1, min(32, -(-2 * l2_bytes // max(1, operand_bytes))))
