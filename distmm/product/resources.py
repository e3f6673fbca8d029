"""What the cluster has for a product: memory, rates and kernels; and where its operands are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from distmm.all_workers import everywhere
from distmm.clusters import cluster, view
from distmm.clusters.measured import link_rate, load_rate
from distmm.errors import InputError
from distmm.planning.blocks import Blocking
from distmm.planning.cluster_spec import ClusterSpec, Residence
from distmm.planning.owners import Places
from distmm.planning.plan import Plan
from distmm.product.aliasing import same
from distmm.product.operand import Operand
from distmm.product.operand_pair import is_transpose
from distmm.transfer.gpu_allocations import is_on_gpu
from distmm.worker.tasks.kernel_choice import KernelChoice
from distmm.worker.tasks.rows import WORKSPACE

if TYPE_CHECKING:
    from distributed import Client

    from distmm.product.request import PlanRequest


@dataclass(frozen=True)
class FileJob:
    """What a job from files to a file has of the cluster: other memory and other rates than a product.

    Attributes
    ----------
    spare : float
        Share of the free memory that blocks do not get.
    loads : dict
        Rate at which blocks of A and B are read, in bytes/s: of one thread of a CPU worker ("cpu"), and of a GPU worker
        ("cuda").
    gpu_host_memory : int
        Bytes of host memory for the blocks of one GPU. More is used only if the product needs it.
    prepare : callable
        Runs on all workers before their free memory is read, with a `KernelChoice`.
    read_rate : callable
        Measures how fast each worker reads an operand. Takes client, operand, device, and the threads of the worker
        that this process stands for without a client. Returns bytes/s, or None for an operand that is not a file.
    """

    spare: float
    loads: dict[str, float]
    gpu_host_memory: int
    prepare: Callable[[KernelChoice], None]
    read_rate: Callable[[Client | None, Operand, Literal["cpu", "cuda"], int], float | None]


def cluster_for(request: PlanRequest, client: Client | None, old: bool = False) -> ClusterSpec:
    """Return a description of the cluster for this product: free memory, rates and kernels.

    `old` is as in `distmm.clusters.view.ask`.
    """
    problem, a, b, choices, job = request.problem, request.a, request.b, request.choices, request.job
    on_gpu = a.kind == "cupy" and job is None
    if on_gpu and choices.device == "cpu":
        raise InputError(
            "device is 'cpu', but A and B have CuPy blocks: convert them with x.map_blocks(cupy.asnumpy), or drop "
            "device='cpu'"
        )

    # A job, which may go on elsewhere, has one kernel.
    flops = problem.flops if job is None else math.inf
    spec = choices.described(client, problem.multiplied, on_gpu, old, flops)
    if job is not None:
        if client is not None:
            # Libraries take memory: they are loaded before the free memory is read.
            everywhere(
                client, job.prepare, KernelChoice(spec.device, problem.multiplied, choices.precision, choices.kernel)
            )
            view.forget(client)
            spec = choices.described(client, problem.multiplied, on_gpu)
        load = job.loads[spec.device] * (spec.threads if spec.device == "cpu" else 1)
        spec = replace(spec, memory=int(spec.memory * (1 - job.spare)), load=load)
    if request.most is not None:
        spec = replace(spec, memory=min(spec.memory, request.most))
    if request.kept is not None:
        spec = _with_room_for_parts(spec, request.kept)
    if job is None and choices.hardware is None and spec.device == "cuda":
        return replace(spec, load=cluster.LOADS[_memory_of(a, b, spec.workers)])
    return spec


def _memory_of(a: Operand, b: Operand, workers: int) -> str:
    """Return where GPUs load operands from that are in this process, by the name in `LOADS`."""
    if is_on_gpu(a.source) or is_on_gpu(b.source):
        return "cuda, its own" if workers == 1 else "cuda, others"
    return "cuda, pageable" if a.pageable or b.pageable else "cuda"


def _with_room_for_parts(spec: ClusterSpec, kept: int) -> ClusterSpec:
    """Subtract the memory of reduced blocks and results, and on GPUs the workspace of the reduction."""
    each = -(-kept // spec.workers) if spec.workers else 0
    if spec.device == "cpu":
        return replace(spec, memory=max(0, spec.memory - each))
    host = None if spec.host_memory is None else max(0, spec.host_memory - each)
    # A GPU reduces one block at a time, and merges parts of one line (see the locks in `distmm.worker.gpu`).
    return replace(spec, host_memory=host, memory=max(0, spec.memory - 2 * WORKSPACE))


def measured(request: PlanRequest, plan: Plan, spec: ClusterSpec, client: Client | None) -> ClusterSpec:
    """Return the description of the cluster with measured rates of its links, files and copies, if they are lower.

    Only the rates that the plan uses are measured.
    """
    job = request.job
    links = [link_rate(client, spec.device)] if client is not None and plan.bytes_moved else []
    loads: list[float | None] = []
    if job is not None:
        loads = [job.read_rate(client, each, spec.device, spec.threads) for each in (request.a, request.b)]
    elif client is not None and spec.device == "cuda" and request.a.kind == "numpy":
        loads = [load_rate(client)]
    return replace(
        spec,
        link=min([spec.link, *(rate for rate in links if rate is not None)]),
        load=min([spec.load, *(rate for rate in loads if rate is not None)]),
    )


def with_homes(request: PlanRequest, ranks: int, client: Client | None) -> PlanRequest:
    """Find out which ranks of a plan hold the chunks of A and B."""
    if client is None or request.job is not None or request.choices.hardware is not None or request.problem.batch:
        return request
    sources = [each.source if each.chunks is not None else None for each in (request.a, request.b)]
    if all(source is None for source in sources):
        return request
    from distmm.clusters.homes import chunk_homes  # late: only persisted arrays need it, and it needs Dask arrays

    a, b = chunk_homes(client, sources, ranks)
    a, b = (
        tuple(zip(*homes, strict=True)) if homes is not None and each.transposed else homes
        for homes, each in ((a, request.a), (b, request.b))
    )
    return replace(request, homes=Places(a, b))


def places(request: PlanRequest, blocking: Blocking, device: Literal["cpu", "cuda"]) -> Places:
    """Return the ranks that hold the blocks of A and of B."""
    if not request.homes.known:
        return request.homes
    from distmm.clusters.homes import homes_of_blocks

    (of_a, of_b, _), a, b = request.homes, request.a, request.b
    at = (
        homes_of_blocks(of_a, a.chunks or (), (blocking.m, blocking.k)),
        homes_of_blocks(of_b, b.chunks or (), (blocking.k, blocking.n)),
    )
    # Blocks that are copied to GPUs are copied for each operand. For GPUs, A and its transpose count as two arrays.
    is_same = a.transposed == b.transposed and same(a.source, b.source) and (device == "cpu" or a.kind == "cupy")
    is_same &= blocking.m == blocking.k == blocking.n
    is_turned = not is_same and blocking.m == blocking.n and device == "cpu" and is_transpose(a, b)
    if not (is_same or is_turned) or at[0] is None or min(map(min, at[0])) < 0:
        return Places(*at)
    return Places(at[0], at[0], "same") if is_same else Places(at[0], tuple(zip(*at[0], strict=True)), "transposed")


def residence(
    operand: Operand,
    cuts: tuple[tuple[int, ...], tuple[int, ...]] | None,
    request: PlanRequest,
    streamed: bool,
    device: Literal["cpu", "cuda"],
) -> Residence:
    """Return where the operand's blocks are in memory during the product, for the planner's memory model.

    After a rechunk several blocks read the same chunk, and the chunk stays in memory until its last read. An array of
    this process is not rechunked (`Operand.here`). Jobs read the blocks of A and B from their files. The waves of a
    streamed product load their blocks again if that is possible. GPUs multiply copies of NumPy blocks.
    """
    resident = operand.resident and (device == "cpu" or operand.kind == "cupy")
    others = cuts != (operand.chunks or ())[-2:] or (request.shared and not resident)
    if operand.chunks is not None and request.job is None and others and operand.here is None:
        return "whole"
    if resident:
        return "resident"
    if streamed and not operand.loads_again:
        return "kept"
    return "made" if operand.made_from_resident else "loaded"
