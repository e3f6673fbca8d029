"""Ways to cut a product that are worth comparing: blocks, grid, steps, waves. Pure; `distmm.plan` picks the best."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from distmm.errors import InputError
from distmm.planning.cluster_spec import LOOKAHEAD, ClusterSpec, shortest_task
from distmm.planning.geometry import Blocking, Grid, Problem, accumulator_dtype, even_edges

__all__ = ["Shape", "cut", "free", "given", "parse"]

# Chains a worker, as blocks of C down and across. One chain a worker waits for the scheduler between its steps; more
# than 4 x 4 only add tasks.
CHAINS = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 4))
STEPS = (1, 2, 4, 8, 16, 32, 64)

# Steps that are tried where nothing fits with those: blocks of A and B become smaller, and tasks more. More panels than
# MOST_PANELS are more than a scheduler can serve.
DEEPER_STEPS = (256, 1024, 4096, 16384, 65536)
MOST_PANELS = 1 << 17

# Of a symmetric product, whose busiest workers have n (n + 1) / 2 blocks of C of n^2 / 2: what they have too many falls
# with n.
TRIANGLE_CHAINS = ((1, 1), (2, 2), (4, 4), (8, 8), (16, 16))

# Blocks of C down a wave of a symmetric product, at most: more have more tasks than a scheduler can serve.
TRIANGLE_ROWS = 256

# Waves down and across that are tried, each where the ones before need more memory than there is.
WAVES = ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (8, 8), (16, 16), (32, 32))

# Share of C a worker below which k is split: smaller blocks run at a fraction of a kernel's rate.
SMALLEST_SHARE = 512 * 512


@dataclass(frozen=True)
class Shape:
    """One way to cut a product; see the attributes of `distmm.planning.plan.Plan`."""

    blocking: Blocking
    grid: Grid
    wave_cuts: tuple[int, int, int] = (1, 1, 1)
    lookahead: int = LOOKAHEAD

    def __str__(self) -> str:
        grid, blocking = self.grid, self.blocking
        edges = [max(e) for e in (*blocking.batch, blocking.m, blocking.k, blocking.n)]
        waves = self.wave_cuts[self.wave_cuts[0] == 1 :] if max(self.wave_cuts) > 1 else (1,)
        lists = ([grid.rows, grid.columns, grid.layers], edges, [blocking.panels], waves, [self.lookahead])
        return " ".join(name + "x".join(map(str, values)) for name, values in zip("gbpwl", lists, strict=True))


def parse(text: str, problem: Problem) -> Shape:
    """Read what `Shape.__str__` wrote: ``g2x1x1 b8192x8192x8192 p1 w1 l2``, for any problem of as many dimensions.

    g: rows, columns and layers of the grid; b: edges of the blocks along batch dimensions, m, k and n; p: panels a
    task; w: waves down and across (before them along the batch); l: lookahead.

    Raises
    ------
    InputError
        For any other text.
    """
    fields = re.fullmatch(r"g(\d+x\d+x\d+) b(\d+(?:x\d+)*) p(\d+) w(\d+(?:x\d+){0,2}) l(\d+)", text.strip())
    lists = [[int(x) for x in group.split("x")] for group in fields.groups()] if fields else [[]]
    grid, edges, panels, waves, lookahead = lists if fields else ([], [], [], [], [])
    if len(edges) != 3 + len(problem.batch) or min(map(min, lists)) < 1:
        raise InputError(
            f"plan {text!r} is none for a product of shape {problem.shape}; a plan reads like g2x1x1 b8192x8192x8192 "
            f"p1 w1 l2: grid, block edges ({', '.join(['batch'] * len(problem.batch) + ['m', 'k', 'n'])}), panels a "
            "task, waves, lookahead; all at least 1"
        )
    cuts = {1: (1, *(waves * 2)), 2: (1, *waves), 3: tuple(waves)}[len(waves)]
    if problem.symmetry is not None and cuts[1] != cuts[2]:
        raise InputError(
            f"plan {text!r}: waves of a symmetric product are as many down as across, not w{cuts[1]}x{cuts[2]}"
        )
    blocking = cut(problem, edges)
    return Shape(replace(blocking, panels=panels[0]), Grid(*grid), (cuts[0], cuts[1], cuts[2]), lookahead[0])


def cut(problem: Problem, edges: tuple[int, ...] | list[int]) -> Blocking:
    """Cut a product at the edges (m, k, n), after those of the batch dimensions, whole by default."""
    *batch, m, k, n = edges
    batch = batch or [max(1, size) for size in problem.batch]
    cuts = (even_edges(size, edge) for size, edge in zip(problem.batch, batch, strict=True))
    across, triangle = even_edges(problem.n, n), problem.symmetry is not None
    return Blocking(even_edges(problem.m, m), even_edges(problem.k, k), across, tuple(cuts), triangle=triangle)


def waves(problem: Problem, cluster: ClusterSpec, result: str) -> Iterator[tuple[int, int]]:
    """Numbers of waves down and across, ascending; where C cannot fit at all, one wave, to say what is missing."""
    triangle = problem.symmetry is not None
    elements = math.prod(problem.shape) / (2 if triangle else 1) / cluster.workers
    accumulators = elements * accumulator_dtype(problem.dtype).itemsize
    kept = elements * problem.dtype.itemsize if result == "workers" else 0

    def fits(cuts: tuple[int, int]) -> bool:
        share = (2 if triangle else 1) / math.prod(cuts)  # of C, in the largest wave: a square below the diagonal
        return accumulators * share + kept * (1 - share) < cluster.memory

    tried = [w for w in WAVES if w[0] == w[1] or not triangle]
    fitting = [w for w in tried if w == (1, 1) or fits(w)]
    skipped = accumulators >= cluster.memory and len(fitting) > 1
    return iter(fitting[skipped:])


def given(problem: Problem, blocking: Blocking, cluster: ClusterSpec, waves: tuple[int, int]) -> Iterator[Shape]:
    """Ways to work on blocks that are given: the grid, the panels a task and the lookahead are free."""
    count = len(blocking.k)
    products = blocking.whole.c_blocks * count
    seconds = problem.element_flops * blocking.c_elements / cluster.rate / max(1, products)
    enough = math.ceil(shortest_task(cluster.workers) / max(seconds, 1e-9))
    for grid in Grid.all_of(cluster.workers):
        # As many panels as the grid is wide come from as many homes: with fewer, one home sends to all others.
        for panels in {enough, max(enough, grid.rows, grid.columns)}:
            # Never the whole chain: its inputs would all be in memory at once.
            cut_k = replace(blocking, panels=min(panels, max(1, count // 4)))
            for lookahead in (LOOKAHEAD, LOOKAHEAD + 2):
                yield Shape(cut_k, grid, (1, *waves), lookahead)


def free(
    problem: Problem,
    cluster: ClusterSpec,
    multiples: tuple[int, int, int],
    waves: tuple[int, int],
    lengths: tuple[int, ...] = STEPS,
) -> Iterator[Shape]:
    """Ways to cut a product into blocks of one size, at multiples of the kernel's tile or of a file's chunks.

    `lengths` are the steps of a chain that are tried.
    """
    seen = set()
    whole = (problem.m, problem.k, problem.n)
    triangle = problem.symmetry is not None
    for grid in _grids(problem, cluster.workers):
        wide = max(grid.rows, grid.columns)
        chains = [c for c in TRIANGLE_CHAINS if c[0] * wide <= TRIANGLE_ROWS] if triangle else CHAINS
        for down, across in ((0, 0), *chains):  # 0: one block of C, for products that are not worth spreading
            for steps in lengths:
                for panels in {1, min(wide, 64)}:
                    counts = (
                        down * (wide if triangle else grid.rows) * waves[0] or 1,
                        min(steps * panels * grid.layers, max(MOST_PANELS, grid.layers)),
                        across * (wide if triangle else grid.columns) * waves[1] or 1,
                    )
                    edges = [
                        max(1, min(size, math.ceil(math.ceil(size / count) / multiple) * multiple))
                        for size, count, multiple in zip(whole, counts, multiples, strict=True)
                    ]
                    if (*edges, panels, grid) not in seen:
                        seen.add((*edges, panels, grid))
                        yield Shape(replace(cut(problem, edges), panels=panels), grid, (1, *waves))
    if problem.batch:
        yield from _by_batch(problem, cluster)


def _grids(problem: Problem, workers: int) -> Iterator[Grid]:
    """Grids that move the fewest bytes; in layers where C has too few elements to keep all workers busy."""

    def between(grid: Grid) -> int:
        return problem.m * (grid.columns - 1) + problem.n * (grid.rows - 1)

    share = math.prod(problem.shape) / (1 if problem.symmetry is None else 2) / workers
    layers = 1
    while layers <= workers and (layers == 1 or share * layers < 4 * SMALLEST_SHARE):
        yield from sorted(Grid.all_of(workers, layers), key=between)[:2]
        layers *= 2


def _by_batch(problem: Problem, cluster: ClusterSpec) -> Iterator[Shape]:
    """Whole matrices, dealt to the workers along the longest batch dimension."""
    longest = max(range(len(problem.batch)), key=lambda d: problem.batch[d])
    for chains in (1, 2, 4):
        edges = [max(1, size) for size in (*problem.batch, problem.m, problem.k, problem.n)]
        edges[longest] = max(1, math.ceil(problem.batch[longest] / cluster.workers / chains))
        for grid in Grid.all_of(cluster.workers)[:1]:
            yield Shape(cut(problem, edges), grid)
