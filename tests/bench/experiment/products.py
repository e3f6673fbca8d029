"""Products of distmm on a Dask cluster of this host, and its kernel alone.

Resident matrices have a two-dimensional block-cyclic distribution, as for ScaLAPACK: block (i, j) is on rank
(i mod rows, j mod columns) of the grid from which the fewest bytes move.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import dask.array as da
import numpy as np
from distributed import Client, Worker

import distmm
from distmm import clusters
from distmm.all_workers import everywhere, workers_of
from distmm.planning.owners import Grid
from distmm.telemetry import client as telemetry
from experiment import matrices
from experiment.cases import KERNEL, Case, element
from experiment.moved_bytes import moved_bytes

if TYPE_CHECKING:
    from experiment.measuring_process import Task

__all__ = [
    "count_allocations",
    "kernel_alone",
    "operands",
    "peak_bytes",
    "persisted",
    "program",
    "start_counting",
    "started",
    "until_empty",
]

# Up to this many bytes of results on a worker, the matrices of the previous case count as freed.
LEFTOVERS = 1 << 20

# Largest allowed error of the sum of C, divided by the standard deviation n^1.5 of that sum. Rounding causes less than
# 1e-5. A block that is lost, or counted twice, causes an error in proportion to its size.
SUM_TOLERANCE = 1e-3

# The kernel alone runs for this time, and only the later half of its products counts: after a pause, a GPU is a few
# per cent faster for a while.
KERNEL_SECONDS = 1.5


def kernel_alone(name: str | None, edge: int, dtype: np.dtype[Any], precision: str, gpu: bool) -> tuple[str, float]:
    """Measure one worker's kernel at its sustained rate. Runs on workers.

    Operands are prepared for each product, and that counts as part of the time.

    Returns
    -------
    tuple
        The kernel's name, and the seconds of one product.
    """
    from distmm_kernels import config, device, select

    problem = config.Problem(edge, edge, edge, config.operand_dtype(dtype))
    kernel = select.select(problem, device.current() if gpu else device.cpu(), precision, name=name)
    x, y = (matrices.normal((edge, edge), dtype, [edge, seed], gpu) for seed in range(2))

    def once() -> float:
        start = time.perf_counter()
        kernel.multiply(kernel.prepare_a(x), kernel.prepare_b(y), None, dtype=dtype)
        return time.perf_counter() - start

    once()  # loads the kernel
    seconds = [once(), once()]
    while sum(seconds) < KERNEL_SECONDS:
        seconds.append(once())
    return kernel.name, float(np.median(seconds[len(seconds) // 2 :]))


def count_allocations() -> None:
    """Let RMM count allocated bytes. Runs on GPU workers."""
    import rmm.statistics

    rmm.statistics.enable_statistics()


def start_counting() -> None:
    """Reset the peak of allocated bytes. Runs on GPU workers."""
    import rmm.statistics

    rmm.statistics.push_statistics()


def peak_bytes() -> int:
    """Return the peak of bytes allocated since `start_counting`. Runs on GPU workers."""
    import rmm.statistics

    counted = rmm.statistics.pop_statistics()
    return int(counted.peak_bytes) if counted else 0


@contextmanager
def started(task: Task) -> Iterator[Client]:
    """Start a cluster that counts the bytes that workers receive, and the memory that they allocate on GPUs."""
    with clusters.local(device=task.device, workers=task.workers, threads=1, dashboard=None) as client:
        telemetry.install(client)
        if task.device == "gpu":
            client.run(count_allocations)
        yield client


@contextmanager
def program(task: Task) -> Iterator[Callable[[Case, int], dict[str, Any]]]:
    """Start a cluster, and yield the function that measures a case on it."""
    with started(task) as client:
        arenas: list[matrices.Arena] = []

        def measure(case: Case, seed: int) -> dict[str, Any]:
            until_empty(client)
            if case.program == KERNEL:
                return _kernel(client, task, case)
            if case.place != "host":
                return (_streamed if case.place == "streamed" else _resident)(client, task, case, seed)
            if not arenas:
                hosted = [each for each in task.cases if each.place == "host"]
                arenas.append(matrices.Arena(max(3 * x.n**2 * element(x.dtype).itemsize for x in hosted), client))
            return _hosted(client, task, case, seed, arenas[0])

        yield measure


def until_empty(client: Client) -> None:
    """Wait until the workers have freed the matrices of the previous case."""
    gc.collect()
    for _ in range(100):
        if max(everywhere(client, _held).values(), default=0) < LEFTOVERS:
            return
        time.sleep(0.1)
    raise RuntimeError(f"blocks of the case before are still there after 10 s: {everywhere(client, _held)} bytes")


def _held(dask_worker: Worker) -> int:
    """Bytes of results on a worker. Runs on workers."""
    return int(dask_worker.state.nbytes)


def _kernel(client: Client, task: Task, case: Case) -> dict[str, Any]:
    alone = [next(iter(workers_of(client)))]
    asked = task.kernel, case.n, element(case.dtype), task.precision, task.device == "gpu"
    name, seconds = client.submit(kernel_alone, *asked, workers=alone, pure=False).result()
    return {"seconds": seconds, "variant": name}


def operands(client: Client, task: Task, case: Case, seed: int) -> tuple[da.Array, da.Array, dict[str, Any]]:
    """Return A and B in the workers' memory, and the options for their product."""
    dtype = element(case.dtype)
    how: dict[str, Any] = {"precision": task.precision, "kernel": task.kernel}
    homes = min(Grid.all_of(task.workers), key=lambda grid: grid.rows + grid.columns)
    on_gpu = task.device == "gpu"
    A, B = (
        matrices.resident(client, operand, case.n, case.block, homes, dtype, seed + i, on_gpu)
        for i, operand in enumerate("AB")
    )
    return A, B, how


def _streamed(client: Client, task: Task, case: Case, seed: int) -> dict[str, Any]:
    """Measure ``C.sum()`` of a product C that is made a quarter at a time."""
    A, B, how = operands(client, task, case, seed)
    whole = distmm.plan(A, B, client=client, **how)
    # blocks that are unions of chunks, which the text names last, are for one wave
    quarters = str(replace(whole.schedule, wave_cuts=(1, 2, 2))).partition(" c")[0]
    plan = replace(distmm.plan(A, B, client=client, plan=quarters, **how), streamed=True)
    with _counted(client, task.device == "gpu") as counted:
        start = time.perf_counter()
        total = float(distmm.matmul(A, B, plan=plan, client=client, **how).sum(dtype="f8").compute())
        seconds = time.perf_counter() - start
    expected = float((A.sum(axis=0, dtype="f8") * B.sum(axis=1, dtype="f8")).sum().compute())
    residual = abs(total - expected) / (SUM_TOLERANCE * case.n**1.5)
    return {"seconds": seconds, "ok": residual <= 1, "residual": residual, **counted, **_planned(plan)}


def _resident(client: Client, task: Task, case: Case, seed: int) -> dict[str, Any]:
    A, B, how = operands(client, task, case, seed)
    plan = distmm.plan(A, B, client=client, **how)
    return persisted(client, task, A, B, partial(distmm.matmul, client=client, **how)) | _planned(plan)


def persisted(
    client: Client,
    task: Task,
    A: da.Array,
    B: da.Array,
    product: Callable[[da.Array, da.Array], da.Array],
    finish: Callable[[da.Array], None] = matrices.finish,
) -> dict[str, Any]:
    """Measure a product whose C stays in the workers' memory, and check C.

    The time ends when ``finish(C)`` returns: it waits until all blocks of C are computed.
    """
    with _counted(client, task.device == "gpu") as counted:
        start = time.perf_counter()
        C = product(A, B).persist()
        finish(C)
        seconds = time.perf_counter() - start
    verdict = distmm.verify(A, B, C, precision=task.precision)
    return {"seconds": seconds, "ok": verdict.ok, "residual": verdict.residual, **counted}


def _hosted(client: Client, task: Task, case: Case, seed: int, arena: matrices.Arena) -> dict[str, Any]:
    A, B, C = arena.matrices(case.n, element(case.dtype))
    for i, matrix in enumerate((A, B)):
        matrices.fill(matrix, seed + i)
    how: dict[str, Any] = {"precision": task.precision, "kernel": task.kernel, "device": task.device}
    plan = distmm.plan(A, B, out=C, client=client, **how)
    with _counted(client, task.device == "gpu") as counted:
        start = time.perf_counter()
        distmm.matmul(A, B, out=C, client=client, **how)
        seconds = time.perf_counter() - start
    verdict = distmm.verify(A, B, C, precision=task.precision)
    return {"seconds": seconds, "ok": verdict.ok, "residual": verdict.residual, **counted, **_planned(plan)}


@contextmanager
def _counted(client: Client, on_gpu: bool) -> Iterator[dict[str, Any]]:
    """Yield a dict. At the end of the block, it receives the bytes moved and the largest peak of any GPU."""
    found: dict[str, Any] = {}
    before = moved_bytes(client)
    if on_gpu:
        client.run(start_counting)
    yield found
    if on_gpu:
        found["peak"] = max(client.run(peak_bytes).values())
    found["moved"] = moved_bytes(client) - before


def _planned(plan: distmm.Plan) -> dict[str, Any]:
    return {"predicted": plan.cost.seconds, "planned_peak": plan.peak.worker, "note": str(plan)}
