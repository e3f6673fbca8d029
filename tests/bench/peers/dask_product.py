"""`dask.array.matmul` on the cluster and the matrices of distmm's resident products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dask.array as da
from distributed import Client
from experiment import matrices
from experiment.cases import Case
from experiment.measuring_process import Task
from experiment.products import operands, persisted, started, until_empty

__all__ = ["program"]


@contextmanager
def program(task: Task) -> Iterator[Callable[[Case, int], dict[str, Any]]]:
    """Start a cluster, and yield what measures a case on it."""
    with started(task) as client:

        def measure(case: Case, seed: int) -> dict[str, Any]:
            until_empty(client)
            A, B, _ = operands(client, task, case, seed)
            return persisted(client, task, A, B, da.matmul, lambda C: _finish(client, task, C))

        yield measure


def _finish(client: Client, task: Task, C: da.Array) -> None:
    """Wait until C is computed: what Dask calls finished, CuPy may only have queued (0.14 s for 11 s of products)."""
    matrices.finish(C)
    if task.device == "gpu":
        client.run(_wait_for_gpu)


def _wait_for_gpu() -> None:
    """Wait until the GPU has done all that is queued. Runs on GPU workers."""
    import cupy

    cupy.cuda.Device().synchronize()
