"""`numpy.matmul` in one process, with as many threads as other programs have workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from experiment.cases import Case, element
from experiment.matrices import Arena, fill
from experiment.measuring_process import Task
from threadpoolctl import threadpool_limits

from .samples import sampled

__all__ = ["program"]


@contextmanager
def program(task: Task) -> Iterator[Callable[[Case, int], dict[str, Any]]]:
    """Yield what measures a case."""
    arena = Arena(max(3 * case.n**2 * element(case.dtype).itemsize for case in task.cases))

    def measure(case: Case, seed: int) -> dict[str, Any]:
        a, b, c = arena.matrices(case.n, element(case.dtype))
        fill(a, seed)
        fill(b, seed + 1)
        start = time.perf_counter()
        np.matmul(a, b, out=c)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, **sampled(a, b, c, "ieee", seed)}

    with threadpool_limits(task.workers, "blas"):  # this process was started with one thread
        yield measure
