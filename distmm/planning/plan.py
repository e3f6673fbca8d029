"""A plan: how a product is cut into blocks, which worker owns which, and what that will take.

Pure: worker count, memory and rates are arguments; nothing here talks to a cluster or a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import index
from typing import Literal, SupportsIndex

from distmm.errors import DoesNotFitError, InputError
from distmm.planning import candidates, memory, picture
from distmm.planning.candidates import Shape
from distmm.planning.cluster_spec import LOOKAHEAD, SCHEDULER_SECONDS, ClusterSpec, Residence
from distmm.planning.cost import Cost, Peak, cost, least_seconds
from distmm.planning.geometry import Blocking, Grid, Problem, Wave
from distmm.planning.layout import Layout
from distmm.planning.precision import Precision, check_precision

__all__ = ["LOOKAHEAD", "Plan", "make_plan"]

# Edge of the textbook kernel's tile. Blocks that are multiples of it leave no partial tile inside the matrix, and
# with k cut at multiples of it the bits of C do not depend on the cut.
TILE = 32

# Share of a product's seconds that C's way out from GPUs takes by itself, at least, for more waves to be tried than it
# needs to fit: they gain about that at most.
STORING_SHARE = 0.02


@dataclass(frozen=True)
class Plan:
    """What will be done: the blocks, their owners, the kernel, and the predicted cost.

    A plan holds no data and does nothing: `distmm.matmul` builds the graph that it describes. `str` writes its shape
    as one line, ``g2x1x1 b8192x8192x8192 p1 w1 l2``, which `distmm.matmul` and ``distmm multiply --plan`` take back.

    Attributes
    ----------
    problem : Problem
    blocking : Blocking
        Edges of the blocks, and panels a task.
    grid : Grid
        Owners of the blocks.
    cluster : ClusterSpec
    precision, kernel
        For the workers' kernel selection.
    operands : pair of {"resident", "streamed", "whole"}
        Where A and B are; see `distmm.planning.cluster_spec.Residence`.
    result : {"workers", "host", "out"}
        Where finished blocks of C stay.
    lookahead : int
        Steps whose blocks of A and B may be in memory at once.
    wave_cuts : tuple of int
        Most waves along the batch blocks, block rows and block columns of C.
    """

    problem: Problem
    blocking: Blocking
    grid: Grid
    cluster: ClusterSpec
    precision: Precision = "highest"
    kernel: str | None = None
    operands: tuple[Residence, Residence] = ("streamed", "streamed")
    result: Literal["workers", "host", "out"] = "workers"
    lookahead: int = LOOKAHEAD
    wave_cuts: tuple[int, int, int] = (1, 1, 1)

    @property
    def shape(self) -> Shape:
        """How the product is cut, without what it is and where it runs."""
        return Shape(self.blocking, self.grid, self.wave_cuts, self.lookahead)

    @property
    def layout(self) -> Layout:
        """Bytes by rank; not kept, because a plan travels to the scheduler."""
        return Layout(self.problem, self.blocking, self.grid)

    @cached_property
    def peak(self) -> Peak:
        """Bytes at the peak, and bounds for the runtime: part of `cost`, and much sooner known."""
        return memory.peak(self.layout, self.waves, self.cluster, self.operands, self.result, self.lookahead)

    @cached_property
    def cost(self) -> Cost:
        """Bytes, peak memory, tasks and seconds (see `distmm.planning.cost.Cost`)."""
        return cost(self.layout, self.waves, self.cluster, self.operands, self.result, self.lookahead, self.peak)

    @property
    def least_seconds(self) -> float:
        """A lower bound of the predicted seconds, from a few numbers."""
        cut = self.problem, self.blocking, self.grid, self.cluster
        return least_seconds(*cut, self.operands, self.result, self.wave_cuts, self.lookahead)

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Edges (m, k, n) of the largest block."""
        return self.blocking.largest

    @cached_property
    def waves(self) -> tuple[Wave, ...]:
        """What is computed together, in this order: the blocks of C of one wave fit into the workers' memory."""
        return self.blocking.waves(self.wave_cuts, (self.grid.rows, self.grid.columns))

    @property
    def bytes_moved(self) -> int:
        """Bytes that workers will send one another."""
        return self.cost.bytes_moved

    @property
    def keeps_bits(self) -> bool:
        """Whether k is cut so that C has the bits of an uncut product by the same kernel."""
        return all(edge % self.cluster.granule == 0 for edge in self.blocking.k[:-1]) and self.grid.layers == 1

    @property
    def shortfall(self) -> int:
        """Bytes that are missing on each worker, of its own memory and its host's; 0 where all fits."""
        host = self.cluster.host_memory
        missing = max(0, self.peak.worker - self.cluster.memory)
        return missing + (0 if host is None else max(0, self.peak.host - host))

    def validate(self) -> None:
        """Refuse a plan that cannot fit.

        Raises
        ------
        DoesNotFitError
            If a worker would hold more than it may: says how much is short and how many workers would do.
        """
        gpu, host = self.cluster.device == "cuda", self.cluster.host_memory
        for where, peak, have in (
            ("", self.peak.worker, self.cluster.memory),
            (" of host memory", self.peak.host, math.inf if host is None else host),
        ):
            if peak > have:
                enough = math.ceil(self.cluster.workers * peak / max(1, have))
                what = "GPUs" if gpu else "workers"
                kept = " or write C as it is made, with out=," if self.result != "out" else ""
                raise DoesNotFitError(
                    f"this product needs {peak / 1e9:.3g} GB{where} on each of {self.cluster.workers} {what}, "
                    f"{have / 1e9:.3g} GB is free there: short by {(peak - have) / 1e9:.3g} GB; use about {enough} "
                    f"{what},{kept} or more memory for each, or smaller blocks "
                    f"(now {'x'.join(map(str, self.block_shape))})"
                )

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as a table.

        Returns
        -------
        list of tuple of str
            Label and value of each row.
        """
        p, b, c, grid = self.problem, self.blocking, self.cost, self.grid
        m, k, n = b.largest
        what = "GPUs" if self.cluster.device == "cuda" else "CPU workers"
        batch = f" x {math.prod(p.batch)} (batch {p.batch})" if p.batch else ""
        chained = f" of {b.panels} panels" if b.panels > 1 else ""
        layers = f" x {grid.layers} (k is split)" if grid.layers > 1 else ""
        steps = b.chain_steps(grid.layers)
        waves = f", in {len(self.waves)} waves" if len(self.waves) > 1 else ""
        what_by_what = f"{p.m} x {p.k} times {p.k} x {p.n}"
        blocks = f"{b.c_blocks} blocks of C"
        if p.symmetry is not None:
            what_by_what = f"{p.m} x {p.k} times its {'conjugate ' * (p.symmetry == 'hermitian')}transpose"
            blocks = f"{b.whole.c_blocks} of {blocks} (its lower triangle)"
        bits = (
            "as if C were one block"
            if self.keeps_bits
            else f"differ with the cuts along k (multiples of {self.cluster.granule} keep them the same)"
        )
        host = [("host memory", f"{c.peak_host_bytes / 1e9:.3g} GB for each GPU")] if c.peak_host_bytes else []
        return [
            ("product", f"{what_by_what}{batch}, {p.dtype}, {p.flops:.3g} operations"),
            ("kernel", f"{self.kernel or 'automatic'}, precision {self.precision}"),
            ("workers", f"{grid.rows} x {grid.columns}{layers} {what}"),
            ("blocks", f"{m} x {k} x {n} (m x k x n), {blocks}{waves}, {steps} steps each{chained}"),
            ("tasks", f"{c.tasks}"),
            (
                "memory",
                f"{c.peak_bytes / 1e9:.3g} GB a worker at most, {self.cluster.memory / 1e9:.3g} GB are free",
            ),
            ("lookahead", f"blocks of A and B of {self.lookahead} steps in memory"),
            *host,
            (
                "moved",
                f"{c.bytes_moved / 1e9:.3g} GB between workers (2-D bound {c.bytes_bound / 1e9:.3g} GB)",
            ),
            ("bits", bits),
            ("time", f"about {c.seconds:.2g} s, limited by {c.bound_by}"),
            ("plan", str(self)),
        ]

    def __str__(self) -> str:
        return str(self.shape)

    def _repr_html_(self) -> str:
        return picture.html(self.rows(), self.blocking, self.grid)


def make_plan(
    problem: Problem,
    cluster: ClusterSpec,
    *,
    blocking: Blocking | None = None,
    edges: tuple[int, ...] | None = None,
    text: str | None = None,
    multiples: tuple[int, int, int] = (TILE, TILE, TILE),
    precision: Precision = "highest",
    kernel: str | None = None,
    operands: tuple[Residence, Residence] = ("streamed", "streamed"),
    result: Literal["workers", "host", "out"] = "workers",
) -> Plan:
    """Choose blocks, grid, waves, panels a task and lookahead for a product.

    Parameters
    ----------
    problem : Problem
    cluster : ClusterSpec
    blocking : Blocking, optional
        Blocks that are given (the user's chunks).
    edges : tuple of int, optional
        Block edges (m, k, n) that the user asks for.
    text : str, optional
        A plan's ``str``: nothing is left to choose.
    multiples : tuple of int, optional
        Chosen edges are multiples of these (the kernel's tile, or the chunks of a file), and along k of the kernel's
        granule, so that the cut does not change the bits of C.
    precision, kernel : str, optional
        Passed through to the workers' kernel selection.
    operands, result
        Where A and B are, and where C stays: see `Plan`.

    Raises
    ------
    InputError
        For an unknown precision, block edges that are not positive, or a text that is no plan for this product.
    """
    check_precision(precision)
    if cluster.workers < 1:
        raise InputError("the cluster has no workers: start some, or give the address of a cluster that has")
    if edges is not None:
        if not isinstance(edges, Sequence) or len(edges) != 3 or not all(map(_is_edge, edges)):
            raise InputError(f"blocks {edges!r}: give three positive edges, those of m, k and n")
        blocking = candidates.cut(problem, edges)

    cut = blocking or candidates.cut(problem, [max(1, size) for size in (problem.m, problem.k, problem.n)])
    asked = Plan(problem, cut, Grid(1, 1, 1), cluster, precision, kernel, operands, result)
    if text is not None:
        return _shaped(asked, candidates.parse(text, problem))
    multiples = (multiples[0], _common(multiples[1], cluster.granule, problem.k), multiples[2])
    return _best(asked, multiples if blocking is None else None)


def _is_edge(edge: object) -> bool:
    return isinstance(edge, SupportsIndex) and index(edge) >= 1


def _shaped(plan: Plan, shape: Shape) -> Plan:
    """Return the plan with another way to cut the product."""
    return replace(plan, blocking=shape.blocking, grid=shape.grid, lookahead=shape.lookahead, wave_cuts=shape.wave_cuts)


@lru_cache(maxsize=256)
def _best(asked: Plan, multiples: tuple[int, int, int] | None) -> Plan:
    """Return the fastest plan that fits, with blocks at `multiples`, or without them with those asked for.

    It is kept: who repeats a product would wait each time for a search of 10 to 300 ms.
    """
    problem, cluster, best = asked.problem, asked.cluster, None
    for waves in candidates.waves(problem, cluster, asked.result):
        fitted = best is not None and not best.shortfall
        if best is not None and fitted and not _may_gain_by_waves(best):
            break
        shapes = (
            candidates.given(problem, asked.blocking, cluster, waves)
            if multiples is None
            else candidates.free(problem, cluster, multiples, waves)
        )
        best = _fastest((_shaped(asked, shape) for shape in shapes), best)
        if fitted:
            break
    assert best is not None
    return best if multiples is None or not best.shortfall else _deeper(asked, multiples, best)


def _deeper(asked: Plan, multiples: tuple[int, int, int], best: Plan) -> Plan:
    """Return a plan with more steps than others have, as few as fit, where no other plan fits."""
    problem, cluster = asked.problem, asked.cluster
    for steps in candidates.DEEPER_STEPS:
        for waves in candidates.waves(problem, cluster, asked.result):
            shapes = candidates.free(problem, cluster, multiples, waves, (steps,))
            best = _fastest((_shaped(asked, shape) for shape in shapes), best)
            if not best.shortfall:
                return best
    return best


def _may_gain_by_waves(plan: Plan) -> bool:
    """Whether a product may be faster in more waves than it needs to fit.

    On CPUs by fewer and deeper tasks. On GPUs because C leaves while the next wave is made; not where it stays on the
    hosts: the waves then are one graph, and what one has loaded stays for the next.
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


def _fastest(plans: Iterable[Plan], best: Plan | None) -> Plan:
    """Return the plan of the least score, the first of equals.

    Of hundreds of plans most are slower for the number of their tasks alone, or need more memory than the best one.
    Those that may be fastest come first: behind the first one that cannot be faster than the best, none can.
    """
    bounded = ((_weighed(plan, plan.least_seconds), plan) for plan in plans)
    for least, plan in sorted(bounded, key=lambda each: each[0]):
        if best is not None:
            if not best.shortfall and least > _weighed(best, best.cost.seconds):
                break
            if plan.shortfall > best.shortfall:
                continue
        if best is None or _score(plan) < _score(best):
            best = plan
    assert best is not None
    return best


def _score(plan: Plan) -> tuple[float, ...]:
    """Bytes that are missing, then predicted seconds, and where those are equal bytes and tasks."""
    c = plan.cost
    return plan.shortfall, _weighed(plan, c.seconds), c.bytes_moved, c.peak_bytes, c.tasks


def _weighed(plan: Plan, seconds: float) -> float:
    """Seconds with a scheduler that is busy for 30 % of them at most.

    A step more of lookahead must gain more than 1 %: it takes memory. So must twice as many waves on GPUs: they load A
    and B more often, and what products do not hide of that is counted roughly.
    """
    tasks = plan.blocking.tasks(plan.grid.layers)
    doublings = math.log2(math.prod(plan.wave_cuts)) if plan.cluster.device == "cuda" else 0.0
    return max(seconds, tasks * SCHEDULER_SECONDS / 0.3) * (1 + 0.01 * plan.lookahead) * (1 + 0.01 * doublings)
