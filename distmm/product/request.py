"""Requests to the planner: the caller's choices, the chunks of arrays and files, and the cluster's resources."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from distmm.clusters import view
from distmm.errors import InputError
from distmm.planning.blocks import Blocking, cut, even_edges
from distmm.planning.cluster_spec import ClusterSpec, Result
from distmm.planning.few_workers import MOST_SERVED, few_workers
from distmm.planning.owners import NOWHERE, Places
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.schedule import EXAMPLE, parse
from distmm.planning.search import checked_edges, make_plan
from distmm.product.choices import Choices
from distmm.product.operand import Operand
from distmm.product.resources import FileJob, cluster_for, measured, places, residence, with_homes
from distmm.product.users_blocks import Chunks, storage_multiples, users_blocking

if TYPE_CHECKING:
    from distributed import Client

# Products that are predicted to take at least so many seconds measure the rates of links, files and copies from host
# memory first. Each of these measurements takes up to half a second, once.
WORTH_MEASURING_SECONDS = 1.0

# Share of a worker's free memory up to which a product is planned with the workers' last answers, without a question.
SMALL_SHARE = 1 / 8

# Shares of memory tried for parts of reduced blocks. Plans with less memory for blocks have smaller waves, fewer parts.
ROOM = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 15 / 16)

# Most plans of arrays in memory that `_plan` remembers for later products of the same sizes.
MOST_PLANS = 32


@dataclass(frozen=True)
class PlanRequest:
    """A product for the planner.

    Attributes
    ----------
    problem : Problem
    a, b : Operand
        In a symmetric product, B is the transpose of A.
    choices : Choices
    written : bool
        Whether finished blocks of C are written, and do not stay on the workers.
    c_chunks : tuple of tuple of int, optional
        Chunks that C will have. They are also the blocks, along dimensions that the operands' chunks do not cut.
    unit : tuple of int, optional
        Shape of the part of C that one write covers, such as a chunk. If the planner chooses the blocks, they are
        multiples of it, provided that each worker gets a block and the blocks fit.
    job : FileJob, optional
        For a job from files to a file. Its blocks have equal edges, no longer than the operands' largest chunks.
    kept : int, optional
        For products whose finished blocks are reduced: bytes that the reduced blocks and the results take in the memory
        of all workers together.
    shared : bool
        Whether other tasks also read the blocks of A and B, if these are Dask arrays.
    run_seconds : float, optional
        Seconds that a run of a job takes before it may be stopped.
    most : int, optional
        Bytes that blocks may take on each worker, if that is less than the worker's free memory.
    homes : Places
        Ranks that hold the chunks of A and of B, if these are Dask arrays that are made from persisted chunks.
    is_trial : bool
        Whether the plan replaces another one only if it fits: how few workers would do is not searched.
    """

    problem: Problem
    a: Operand
    b: Operand
    choices: Choices
    written: bool = False
    c_chunks: Chunks | None = None
    unit: tuple[int, ...] | None = None
    job: FileJob | None = None
    kept: int | None = None
    shared: bool = False
    run_seconds: float | None = None
    most: int | None = None
    homes: Places = NOWHERE
    is_trial: bool = False


def plan_for(request: PlanRequest, client: Client | None) -> Plan:
    """Plan a product, or return the plan that the caller gave.

    Raises
    ------
    InputError
        For a plan of another product, and for choices that the cluster or the product does not allow.
    """
    problem, choices = request.problem, request.choices
    if isinstance(choices.plan, Plan):
        if choices.plan.problem != problem:
            raise InputError(
                f"the plan is for {choices.plan.problem}, the operands are {problem}: make a new plan with "
                f"distmm.plan({'A, B' if problem.symmetry is None else 'A'})"
            )
        _check_blocks(choices, choices.plan)
        return choices.plan
    if choices.plan is not None and not isinstance(choices.plan, str):
        raise InputError(
            f"plan is {choices.plan!r}: give one that distmm.plan has made, or its text, such as {EXAMPLE}"
        )
    old = request.job is None and request.kept is None
    spec = cluster_for(request, client, old)
    ranks = spec.workers if choices.plan is None else parse(choices.plan, problem).grid.size
    request = with_homes(request, ranks, client)
    plan = _plan(request, spec)
    if old and not is_modest(plan):
        spec = cluster_for(request, client)
        plan = _plan(request, spec)
    if plan.shortfall and client is not None and view.forget(client):  # workers may have more free memory by now
        spec = cluster_for(request, client)
        plan = _plan(request, spec)
    if choices.plan is not None:
        _check_blocks(choices, plan)
    hardware = choices.hardware
    if hardware is not None and not hardware.here:
        return plan if choices.plan is not None or request.is_trial else replace(plan, fewest=_fewest(request, plan))
    if (client is None and (hardware is None or hardware.workers > 1)) or plan.cost.seconds < WORTH_MEASURING_SECONDS:
        return plan
    with_rates = measured(request, plan, spec, client)
    return plan if with_rates == spec else _plan(request, with_rates)


def is_modest(plan: Plan) -> bool:
    """Whether a product takes so little memory that last answers about the free memory are enough."""
    return plan.peak.worker <= SMALL_SHARE * plan.cluster.memory


def plan_reduced(plan: Callable[[int], Plan], parts: Callable[[Plan], int]) -> Plan:
    """Plan a product whose finished blocks are reduced at once: their parts get as little memory as is enough.

    `plan` takes the bytes that all workers together have for parts (`PlanRequest.kept`) and plans the product. `parts`
    takes a plan and returns the bytes that its parts take at most.
    """
    made = plan(0)
    if made.shortfall:
        return made
    spec = made.cluster
    memory = spec.memory if spec.device == "cpu" else spec.host_memory
    for room in sorted([parts(made), *(int((memory or 0) * share) * spec.workers for share in ROOM)]):
        made = plan(room)
        if made.shortfall or parts(made) <= room:
            return made
    return plan(parts(made))


def _check_blocks(choices: Choices, plan: Plan) -> None:
    """Refuse block edges that are not those of the plan that the caller gave, too."""
    if choices.blocks is None:
        return
    p = plan.problem
    edges = tuple(map(min, checked_edges(choices.blocks, p), (p.m, p.k, p.n)))
    if edges != plan.block_shape:
        raise InputError(
            f"blocks are {choices.blocks}, and the plan {plan} has blocks {plan.block_shape}: leave out blocks, or plan"
        )


def _fewest(request: PlanRequest, plan: Plan) -> float:
    """Return how few workers of the plan's kind the product fits on (`few_workers`). Infinity if no number does.

    For other numbers of workers, plans of many waves are not searched, which takes longer. If blocks are given, no more
    workers are tried than there are block products.
    """
    spec = plan.cluster
    asked = replace(request, run_seconds=None)  # how long a run takes does not change what fits

    def fits(workers: int) -> bool:
        there = workers == spec.workers
        return (plan if there else _planned_for(asked, replace(spec, workers=workers), quick=True)).fits

    given = _given_blocking(request, request.unit)
    most = MOST_SERVED if given is None else min(MOST_SERVED, given.whole.c_blocks * len(given.k))
    return few_workers(fits, spec.workers if plan.fits else most) or math.inf


_plans: dict[Any, Plan] = {}


def _plan(request: PlanRequest, spec: ClusterSpec) -> Plan:
    """Plan for a cluster. A plan of arrays in this process's memory, which depends on sizes and choices, is kept."""
    a, b, choices = request.a, request.b, request.choices
    if request.job is not None or request.kept is not None or not (a.in_memory and b.in_memory):
        return _within_host_memory(request, spec)
    given = choices.precision, choices.kernel, choices.reproducible, choices.plan, repr(choices.blocks)
    key = request.problem, spec, given, request.written, request.c_chunks, request.unit, a.kind
    if (plan := _plans.get(key)) is None:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _within_host_memory(request, spec)
    return plan


def _within_host_memory(request: PlanRequest, spec: ClusterSpec) -> Plan:
    """Plan for a cluster. A job on GPUs gets `gpu_host_memory`, and all host memory only if the product needs it.

    Blocks and plans that the caller chose are planned with all host memory.
    """
    choices, job = request.choices, request.job
    if job is None or spec.device == "cpu" or choices.blocks is not None or choices.plan is not None:
        return _planned_for(request, spec)
    modest = min(spec.host_memory or job.gpu_host_memory, job.gpu_host_memory)
    plan = _planned_for(request, replace(spec, host_memory=modest))
    return _planned_for(request, spec) if plan.shortfall else plan


def _given_blocking(request: PlanRequest, unit: tuple[int, ...] | None) -> Blocking | None:
    """Return the blocks that the caller asks for, or those that follow the chunks of the operands, if there are any."""
    problem, blocks = request.problem, request.choices.blocks
    if blocks is not None:
        return cut(problem, checked_edges(blocks, problem))
    return users_blocking(problem, request.a, request.b, request.c_chunks, unit)


def _planned_for(request: PlanRequest, spec: ClusterSpec, quick: bool = False) -> Plan:
    """Plan for a cluster. Blocks are the given chunks, or else the planner's choice.

    If C stays on the workers and does not fit, it is streamed. `quick` is as in `make_plan`; a C that may be streamed
    is then, and no chunks are united.
    """
    problem, a, b, choices, unit = request.problem, request.a, request.b, request.choices, request.unit
    c_chunks, text = request.c_chunks, choices.plan
    assert not isinstance(text, Plan)
    result: Result = "host" if spec.device == "cuda" and a.kind == "numpy" else "workers"
    if request.written or request.kept is not None:
        result = "out" if request.written else "reduced"

    may_unite = request.job is None and choices.blocks is None and text is None
    may_unite &= c_chunks is None or None not in (a.chunks, b.chunks)  # the chunks of both cut C, and not `c_chunks`

    # Neither of these functions calls itself: it would keep itself and the operands alive until the next collection.
    def made(blocking: Blocking | None, unit: tuple[int, ...] | None, streamed: bool) -> Plan:
        blocks = blocking
        if text is not None:
            asked = parse(text, problem)
            *batch, m, k, n = asked.cuts  # of the chunks, where the text's blocks unite chunks
            blocks = replace(asked.blocking, m=m, k=k, n=n, batch=tuple(batch))
        cuts = ((blocks.m, blocks.k), (blocks.k, blocks.n)) if blocks else (None, None)
        c_is_freed = streamed or result == "reduced"
        return make_plan(
            problem,
            spec,
            blocking=blocking,
            multiples=storage_multiples(a, b, unit),
            precision=choices.precision,
            kernel=choices.kernel,
            text=text,
            result=result,
            operands=(
                residence(a, cuts[0], request, c_is_freed, spec.device),
                residence(b, cuts[1], request, c_is_freed, spec.device),
            ),
            streamed=c_is_freed,
            run_seconds=request.run_seconds,
            homes=NOWHERE if blocks is None else places(request, blocks, spec.device),
            reproducible=choices.reproducible,
            quick=quick,
            unions=may_unite and not quick,
            on_disk=request.job is not None,
        )

    def best(blocking: Blocking | None, unit: tuple[int, ...] | None = None) -> Plan:
        # A lazy product that cannot stay may be read block by block.
        may_stream = result not in ("out", "reduced")
        plan = made(blocking, unit, streamed=quick and may_stream)
        if quick or not plan.shortfall or not may_stream:
            return plan
        leaves = made(blocking, unit, streamed=True)
        return plan if leaves.shortfall and plan.shortfall <= leaves.shortfall else leaves

    if unit is not None and problem.symmetry is not None:
        unit = (*unit[:-2], *[math.lcm(*unit[-2:])] * 2)  # its blocks are cut alike along m and n
    blocking = _given_blocking(request, unit)
    if blocking is not None and request.job is not None:
        blocking = cut(problem, blocking.largest)
    if unit is not None:
        units = math.prod(-(-size // n) for size, n in zip(problem.shape, unit, strict=True))
        unit = unit if units >= spec.workers else None
    plan = best(blocking, unit)
    if unit is not None and plan.shortfall:
        plan = best(blocking)
    if blocking is not None or text is not None or c_chunks is None:
        return plan
    if problem.symmetry is not None and c_chunks[-2] != c_chunks[-1]:
        return plan
    # Only C has chunks: they are the blocks, and the planner chooses the edge of k.
    *batch, m, n = c_chunks
    k = even_edges(problem.k, plan.block_shape[1])
    return best(Blocking(m, k, n, tuple(batch), triangle=problem.symmetry is not None))
