"""The search for a plan: of the schedules that fit into memory, the one that is predicted to be fastest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from distmm.errors import InputError
from distmm.planning import candidates
from distmm.planning.blocks import Blocking, cut
from distmm.planning.cluster_spec import NEAR, SCHEDULER_SECONDS, ClusterSpec
from distmm.planning.memory import staying
from distmm.planning.owners import NOWHERE, Grid, Owners, Places
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.schedule import LOOKAHEAD, MOST_BLOCKS, Schedule, least_edge, parse
from distmm.units import whole

# Edge of the textbook kernel's tile. Blocks that are multiples of it leave no partial tile inside the matrix, and
# with k cut at multiples of it the bits of C do not depend on the cut.
TILE = 32

# A plan that moves blocks to ranks with less work must be faster by this factor: 400,000 x 256 float64 in 16 chunks, of
# which 5, 4, 4 and 3 were on four CPU workers, times its transpose took 0.30 s with two chunks moved. dask.array, which
# moves none, took 0.20 s. The model gives both about the same time.
PRICE_OF_BALANCE = 1.25

# If the copies of C from GPUs to their hosts take less than this share of a product's seconds, the search does not try
# more waves than the product needs to fit: they would gain at most about that share.
STORING_SHARE = 0.02

# What the edges of chosen blocks are multiples of; None for blocks that are given.
Multiples = tuple[int, int, int] | None


def make_plan(
    problem: Problem,
    cluster: ClusterSpec,
    *,
    blocking: Blocking | None = None,
    text: str | None = None,
    multiples: tuple[int, int, int] = (TILE, TILE, TILE),
    homes: Places = NOWHERE,
    reproducible: bool = False,
    unions: bool = False,
    quick: bool = False,
    **asked_for: Any,
) -> Plan:
    """Choose blocks, grid, waves, panels a task and lookahead for a product.

    Parameters
    ----------
    problem : Problem
    cluster : ClusterSpec
    blocking : Blocking, optional
        Blocks that are given: the user's chunks, or those that he asks for.
    text : str, optional
        A plan's ``str``: nothing is left to choose.
    multiples : tuple of int, optional
        Chosen edges are multiples of these (the kernel's tile, or the chunks of a file), and along k of the kernel's
        granule, so that the cut does not change the bits of C.
    homes : Places
        Ranks that hold the blocks of A and of B, if the blocks are given and some are in the workers' memory.
    reproducible : bool
        Whether the cuts of k may depend on the shape alone, and not on `homes`.
    unions : bool
        Whether blocks may be unions of those of `blocking`, which are the user's chunks.
    quick : bool
        Whether any plan that fits will do. The first one that is found is returned. Plans of more than a thousand waves
        are left out if C could fit in fewer, because their search takes longest where nothing fits.
    **asked_for
        Other fields of the `Plan`, such as `operands`, `result` and `run_seconds`.

    Returns
    -------
    Plan
        The fastest one that fits and has waves as short as `run_seconds` asks for; where none fits, the one that lacks
        the fewest bytes, and where waves are too long in all, one of the shortest.

    Raises
    ------
    InputError
        For a cluster without workers, or a text that is no plan for this product.
    """
    if cluster.workers < 1:
        raise InputError("the cluster has no workers: start some, or give the address of a cluster that has")
    uncut = Schedule(blocking or cut(problem, [max(1, x) for x in (problem.m, problem.k, problem.n)]), Grid(1, 1))
    asked = Plan(problem, uncut, cluster, **asked_for)
    if text is not None:
        return replace(asked, schedule=parse(text, problem, homes))
    multiples = (multiples[0], _common(multiples[1], cluster.granule, problem.k), multiples[2])
    best = None
    if blocking is not None and (homes.known or unions):
        best = _placed(asked, homes, reproducible, unions)
        if best is not None and (homes.known or quick):
            return best
    plain = (_any if quick else _best)(asked, multiples if blocking is None else None)
    return plain if best is None or _score(plain) < _score(best) else best


def checked_edges(edges: object, problem: Problem) -> Sequence[int]:
    """Return the caller's block edges (m, k, n). Of a plan's edges, one is 0 if the problem has no elements there.

    Raises
    ------
    InputError
        If they are not three positive whole numbers, or make too many blocks.
    """
    least = map(least_edge, (problem.m, problem.k, problem.n))
    if not isinstance(edges, Sequence) or len(edges) != 3 or not all(map(_is_edge, edges, least)):
        raise InputError(
            f"blocks {edges!r}: give three positive edges, those of m, k and n, for at most {MOST_BLOCKS} blocks along "
            f"a dimension"
        )
    return list(map(int, edges))


def _is_edge(edge: object, least: int) -> bool:
    return (found := whole(edge)) is not None and found >= least


@lru_cache(maxsize=256)
def _placed(asked: Plan, homes: Places, reproducible: bool, unions: bool) -> Plan | None:
    """Return the fastest plan for operands some of whose blocks are in memory. None if C does not fit as one wave."""
    operands = asked.operands[: 1 if asked.problem.symmetry is not None else 2]
    stays = all(where in NEAR for where in operands)
    schedules = candidates.placed(asked.problem, asked.blocking, asked.cluster, homes, stays, reproducible, unions)
    plans = [replace(asked, schedule=schedule) for schedule in schedules]
    best = _fastest(plans, None, useless=0) if plans else None
    if best is None or not _is_settled(best):
        return None
    if isinstance(best.grid, Grid):
        return best
    return replace(best, schedule=replace(best.schedule, grid=replace(best.grid, homes=homes)))


@lru_cache(maxsize=256)
def _best(asked: Plan, multiples: Multiples) -> Plan:
    """Return the fastest plan that fits, with blocks at `multiples`, or without them with those asked for.

    The answer is kept: a caller who repeats a product would wait each time for a search of 10 to 300 ms.
    """
    best = None
    stay = staying(asked.operands, asked.result, asked.streamed)
    for waves in candidates.waves(asked.problem, asked.cluster, asked.c_stays, stay):
        best = _in_waves(asked, multiples, waves, best)
        for tried, steps in itertools.pairwise((candidates.STEPS[-1], *candidates.DEEPER_STEPS)):
            # Blocks cannot be shorter along k than one multiple.
            if multiples is not None and best.shortfall and tried * multiples[1] < asked.problem.k:
                best = _in_waves(asked, multiples, waves, best, (steps,))
        if not best.shortfall:
            break
    assert best is not None
    if multiples is None or best.shortfall or best.lookahead == LOOKAHEAD:
        return best
    return _fastest([replace(best, schedule=replace(best.schedule, lookahead=LOOKAHEAD))], best)


def _in_waves(
    asked: Plan,
    multiples: Multiples,
    tried: list[tuple[int, int]],
    best: Plan | None,
    lengths: tuple[int, ...] = candidates.STEPS,
) -> Plan:
    """Return the fastest plan with the first number of waves that fits, or the next one; `lengths` as in `free`."""
    # GPUs load the blocks of a step while they multiply. With a step more in memory, they do not wait for them.
    lookaheads = (LOOKAHEAD + 1, LOOKAHEAD) if multiples and asked.cluster.device == "cuda" else (LOOKAHEAD,)
    for waves in tried:
        fitted = best is not None and _is_settled(best)
        if best is not None and fitted and not _may_gain_by_waves(best):
            break
        for lookahead in lookaheads:
            best = _fastest(_plans(asked, multiples, waves, lengths, lookahead), best)
            if not best.shortfall:
                break
        if fitted:
            break
    assert best is not None
    return best


@lru_cache(maxsize=256)
def _any(asked: Plan, multiples: Multiples) -> Plan:
    """Return a plan that fits, of those that `_best` compares without many waves; if there is none, one of them.

    The answer is kept, as that of `_best`: to find how few workers would do takes up to seven of these searches.
    """
    stay = staying(asked.operands, asked.result, asked.streamed)
    lengths = candidates.STEPS + candidates.DEEPER_STEPS
    for waves in next(candidates.waves(asked.problem, asked.cluster, asked.c_stays, stay)):
        # The last schedules have the smallest blocks.
        for plan in [*_plans(asked, multiples, waves, lengths, LOOKAHEAD)][::-1]:
            if not plan.least_shortfall and not plan.shortfall:
                return plan
    return plan


def _plans(
    asked: Plan, multiples: Multiples, waves: tuple[int, int], lengths: tuple[int, ...], lookahead: int
) -> Iterator[Plan]:
    """Plans with so many waves, for given blocks or with chosen ones; `lengths` as in `free`."""
    problem, cluster = asked.problem, asked.cluster
    if multiples is None:
        schedules = candidates.given(problem, asked.blocking, cluster, waves)
    else:
        schedules = candidates.free(problem, cluster, multiples, waves, lengths, lookahead, asked.operands)
    return (replace(asked, schedule=schedule) for schedule in schedules)


def _may_gain_by_waves(plan: Plan) -> bool:
    """Whether a product may be faster in more waves than it needs to fit.

    On CPUs, more waves have fewer and deeper tasks. On GPUs, C is copied to the host while the next wave is made. This
    is not so if C stays on the hosts: the waves are then one graph, and the blocks that one wave has loaded stay for
    the next.
    """
    problem, cluster = plan.problem, plan.cluster
    if cluster.device == "cpu":
        return True
    storing = math.prod(problem.shape) * problem.dtype.itemsize / cluster.workers / cluster.load
    return plan.result == "out" and storing > STORING_SHARE * plan.cost.seconds


def _common(multiple: int, granule: int, size: int) -> int:
    """Multiple of both, if `size` has room for it; else the kernel's granule, or what `size` has room for."""
    both = math.lcm(multiple, granule)
    return both if both <= size else min(granule, max(size, multiple))


def _fastest(plans: Iterable[Plan], best: Plan | None, useless: float = math.inf) -> Plan:
    """Return the plan of the least score, the first of equals.

    Most of the hundreds of plans are slower because of their many tasks alone, or need more memory than the best one.
    They are sorted by the lower bound of their seconds. If one cannot be faster than the best, none after it can. Where
    the best one does not fit, those that certainly lack more bytes, or more than `useless`, are left out at once.
    """
    bounded = ((_weighed(plan, plan.least_seconds), plan) for plan in plans)
    for least, plan in sorted(bounded, key=lambda each: each[0]):
        if best is not None:
            if _is_settled(best) and least > _weighed(best, best.cost.seconds):
                break
            if best.shortfall and plan.least_shortfall > min(best.shortfall, useless):
                continue
            if plan.shortfall > best.shortfall:
                continue
        if best is None or _score(plan) < _score(best):
            best = plan
    assert best is not None
    return best


def _is_settled(plan: Plan) -> bool:
    """Whether a plan fits, and its waves are short enough."""
    return not plan.shortfall and not plan.waves_too_long


def _score(plan: Plan) -> tuple[float, ...]:
    """Bytes that are missing, then waves that are too long, then predicted seconds, bytes and tasks."""
    seconds, moved = _weighed(plan, plan.cost.seconds), plan.cost.bytes_moved
    return plan.shortfall, plan.waves_too_long, seconds, moved, plan.peak.worker, plan.schedule.tasks


def _weighed(plan: Plan, seconds: float) -> float:
    """Seconds, or more if the scheduler were busy for more than 30 % of them, with a price for memory and loads.

    A step more of lookahead must gain more than 1 %: it takes memory. So must twice as many waves on GPUs: they load A
    and B more often, and the model counts only roughly how much of that overlaps with products.
    """
    doublings = math.log2(math.prod(plan.schedule.wave_cuts)) if plan.cluster.device == "cuda" else 0.0
    paced = max(seconds, plan.schedule.tasks * SCHEDULER_SECONDS / 0.3)
    if isinstance(plan.grid, Owners) and plan.grid.stays.isupper():  # ranks pass on some of what they hold
        paced *= PRICE_OF_BALANCE
    return paced * (1 + 0.01 * plan.lookahead) * (1 + 0.01 * doublings)
