"""What hides behind what on GPUs: loads and transfers, products, and the way of C to the host."""

from __future__ import annotations

import math
from typing import Literal

from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.geometry import Blocking, Grid, Problem, accumulator_dtype

__all__ = ["Resource", "leaving", "still_leaving", "sum_seconds", "together"]

# What a product may be bound by; "storing" is C's way from the GPUs.
Resource = Literal["arithmetic", "transfers", "loading", "storing", "scheduler"]

# Time from the end of one step to the start of the next where it loads its blocks: from the end of the step that opens
# it to its first load, and from its last load to a product. Fitted to plans on virtual GPUs under Dask's own scheduler
# and workers (`tests/bench/simulation.py`, and copies of C to the host beside).
LOAD_SECONDS = 9e-3


def together(
    problem: Problem,
    blocking: Blocking,
    grid: Grid,
    cluster: ClusterSpec,
    result: Literal["workers", "host", "out"],
    waves: int,
    lookahead: int,
    seconds: dict[Resource, float],
) -> float:
    """Seconds until GPUs have made C in `waves`, and it has left them if it does; their resources are busy `seconds`.

    A worker's blocks of a wave are finished one after the other, by the products of its last step, and leave one after
    the other. Where a block takes longer than a product, nothing hides the rest in the last wave; in those before,
    products of the next wave do (see `distmm.worker.worker_slots`). And if blocks leave without a gap from the first
    one on, C has left with the last one.

    Where blocks are loaded, a step takes longer than its loads: they begin when an earlier step is done, and then the
    blocks go to other workers. The more steps may be under way, the more of this overlaps.

    With layers, the last sums are taken to follow one another like the last products.
    """
    if result == "workers":
        return max(seconds.values())
    product, block = _paces(problem, blocking, cluster, result)
    chains = max(1, math.ceil(blocking.whole.c_blocks / grid.rows / grid.columns / waves))
    steps = blocking.chain_steps(grid.layers)
    busy = max(each for resource, each in seconds.items() if resource != "storing")
    if seconds["loading"]:
        rests = (steps * waves * LOAD_SECONDS + seconds["transfers"]) / max(1, lookahead - 1)
        busy = max(busy, seconds["loading"] + rests)
    late = (chains - 1) * max(0.0, block - product)
    first = busy * (1 - 1 / steps) / waves + product
    return max(busy + block + late, first + seconds["storing"])


def still_leaving(problem: Problem, blocking: Blocking, cluster: ClusterSpec, result: str, chains: int) -> int:
    """Count the finished blocks of a wave that a worker needs room for beside those of the next, of at most `chains`.

    With as many, the last chain of the next wave begins as soon as the others have. The first block leaves when one
    product is done, and this chain begins ``2 * chains - 2`` products after that. One block more is on its way.
    """
    product, block = _paces(problem, blocking, cluster, result)
    left = math.floor((2 * chains - 2) * product / block) if block else chains
    return min(chains, 1 + max(0, chains - left))


def _paces(problem: Problem, blocking: Blocking, cluster: ClusterSpec, result: str) -> tuple[float, float]:
    """Seconds in which a worker makes a step of the largest block of C, and in which that leaves it when finished."""
    m, k, n = blocking.largest
    elements = m * n * math.prod(map(max, blocking.batch))
    panels = min(blocking.panels, len(blocking.k))
    per_panel = k * problem.element_flops / max(1, problem.k) / cluster.rate + sum_seconds(problem, cluster)
    return elements * panels * per_panel, (leaving(blocking, result) * elements * problem.dtype.itemsize / cluster.load)


def sum_seconds(problem: Problem, cluster: ClusterSpec) -> float:
    """Seconds in which a kernel reads and writes the sum of one element of C, for each panel."""
    return 2 * accumulator_dtype(problem.dtype).itemsize / cluster.sums


def leaving(blocking: Blocking, result: str) -> float:
    """Blocks of C that leave a GPU for each one that is multiplied there; mirror images are written by themselves."""
    mirrored = blocking.mirrored(blocking.whole) if result == "out" else 0
    return 0.0 if result == "workers" else 1 + mirrored / max(1, blocking.whole.c_blocks)
