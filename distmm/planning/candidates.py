"""Schedules that are worth comparing: blocks, grid, panels a task, waves. `distmm.planning.search` picks the best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from distmm.planning.blocks import Blocking, cut
from distmm.planning.cluster_spec import SCHEDULER_SECONDS, ClusterSpec, Residence
from distmm.planning.families import candidates, unions_of
from distmm.planning.memory import BY_STEP
from distmm.planning.owners import Chunks, Grid, Owners, Places
from distmm.planning.problem import Problem
from distmm.planning.schedule import LOOKAHEAD, Schedule
from distmm.planning.table_layout import TableLayout

# Chains per worker, as blocks of C down and across. With one chain, a worker waits for the scheduler between steps.
# More than 4 x 4 chains add tasks and gain nothing.
CHAINS = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (4, 4))
STEPS = (1, 2, 4, 8, 16, 32, 64)

# Numbers of steps that are tried where no plan with the ones above fits: they make blocks of A and B smaller, and tasks
# more numerous. A scheduler cannot serve more than MOST_PANELS panels.
DEEPER_STEPS = (256, 1024, 4096, 16384, 65536)
MOST_PANELS = 1 << 17

# Owners that move more than so many times the fewest bytes are left out if that takes longer than all arithmetic.
# Unions of chunks, which save tasks alone, are left out if it takes longer than a worker's share of the arithmetic.
# A @ v moved a third of A: the model counts milliseconds for each task, and little for bytes, as links are measured for
# long products only.
MORE_BYTES = 1.25

# On GPUs, a chain of so few panels is tried as one task too. Such a product takes about as long as Dask needs for its
# tasks: bfloat16 on two H100, blocks of n / 4, n = 16384, 32768, 46080 and 65536: 0.086, 0.087, 0.163 and 0.428 s with
# four panels a task, 0.115, 0.109, 0.174 and 0.439 s with one. A kernel multiplies up to 8 panels in one launch. Chains
# that take longer gain little, and a lost worker would lose more.
SHORT_CHAIN, SHORT_CHAIN_SECONDS = 8, 0.5

# The same for a symmetric product. Its busiest workers have n (n + 1) / 2 blocks of C instead of n^2 / 2, and this
# excess falls with n.
TRIANGLE_CHAINS = ((1, 1), (2, 2), (4, 4), (8, 8), (16, 16))

# Most blocks of C down a wave of a symmetric product: a scheduler cannot serve the tasks of more.
TRIANGLE_ROWS = 256

# Numbers of waves down and across. Each is tried if the plans with the one before need more memory than there is. If C
# has no room in any of them, the longer edge of a wave is halved again, until there are `MOST_WAVES`.
WAVES = ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (32, 32))
MOST_WAVES = 1 << 16

# Share of C a worker below which k is split: smaller blocks run at a fraction of a kernel's rate.
SMALLEST_SHARE = 512 * 512


def waves(
    problem: Problem, cluster: ClusterSpec, stays: bool, operands_stay: tuple[bool, bool] = (False, False)
) -> Iterator[list[tuple[int, int]]]:
    """Yield a list of numbers of waves down and across, ascending, and then one of many waves.

    The second list is for a C that does not fit in fewer waves. If C cannot fit at all, there is one list with one
    entry: the error of its plan says what is missing. `stays` says whether finished blocks of C stay in the memory of
    the workers, and `operands_stay` whether those of A, and of B, that a wave has loaded stay for the next ones.
    """
    triangle = problem.symmetry is not None
    elements = math.prod(problem.shape) / (2 if triangle else 1) / cluster.workers
    accumulators = elements * problem.accumulator_bytes
    kept = elements * problem.dtype.itemsize if stays else 0
    a, b = (edge * problem.k * problem.dtype.itemsize / cluster.workers for edge in (problem.m, problem.n))

    def fits(cuts: tuple[int, int]) -> bool:
        share = (2 if triangle else 1) / math.prod(cuts)  # of C, in the largest wave: a square below the diagonal
        of_operands = 0.0
        if not problem.batch:  # each row of waves reads all of B, and its own rows of A; those of a triangle read all
            rows = 1 if triangle else cuts[0]
            of_operands = a / rows * (operands_stay[0] and cuts[1] > 1)
            of_operands += b * (operands_stay[1] and cuts[0] > 1 and not triangle)
        return accumulators * share + kept * (1 - share) + of_operands < cluster.memory

    smaller = [WAVES[-1]]
    while math.prod(smaller[-1]) < MOST_WAVES:
        down, across = smaller[-1]
        higher = problem.m * across > problem.n * down
        smaller.append((2 * down, across) if higher else (down, 2 * across))
    few, many = ([w for w in tried if w[0] == w[1] or not triangle] for tried in (WAVES, smaller))
    fitting = [[w for w in tried if fits(w)] for tried in (few, many)]
    yield from filter(None, fitting if any(fitting) else [few[:1] if stays or any(operands_stay) else many[-1:]])


def given(
    problem: Problem,
    blocking: Blocking,
    cluster: ClusterSpec,
    waves: tuple[int, int],
    chunks: tuple[Chunks, ...] | None = None,
) -> Iterator[Schedule]:
    """Schedules for blocks that are given: the grid, the panels a task and the lookahead are free.

    `chunks` are those that the blocks unite.
    """
    count = len(blocking.k)
    seconds, enough = _pace(problem, blocking, cluster)
    for grid in Grid.all_of(cluster.workers):
        # A step with as many panels as the grid is wide reads from as many homes. With fewer, one home sends to all.
        # Of a long chain never the whole: its inputs would all be in memory at once.
        tried = {min(panels, max(1, count // 4)) for panels in (enough, max(enough, grid.rows, grid.columns))}
        if cluster.device == "cuda" and count <= SHORT_CHAIN and count * seconds <= SHORT_CHAIN_SECONDS:
            tried.add(max(1, count))
        for panels in sorted(tried):
            cut_k = replace(blocking, panels=panels)
            for lookahead in (LOOKAHEAD, LOOKAHEAD + 2):
                yield Schedule(cut_k, replace(grid, chunks=chunks), (1, *waves), lookahead)


def placed(
    problem: Problem,
    blocking: Blocking,
    cluster: ClusterSpec,
    homes: Places,
    stays: bool,
    one_chain: bool,
    unions: bool = False,
) -> Iterator[Schedule]:
    """Schedules for blocks some of which are in the workers' memory: what stays, and the panels a task, are free.

    Batched products have grids. Of these, here are those whose blocks are unions of chunks.

    Parameters
    ----------
    problem : Problem
    blocking : Blocking
    cluster : ClusterSpec
    homes : Places
        Ranks that hold the blocks of A and of B.
    stays : bool
        Whether all blocks of A and B are in memory, or made from such blocks. A task may then take all panels of its
        chain.
    one_chain : bool
        Whether k is not split, so that cuts depend on the shape alone.
    unions : bool
        Whether blocks may be unions of the given ones, which are the user's chunks.
    """
    if problem.batch:
        for united_blocks, chunks in unions_of(blocking, cluster):
            yield from given(problem, united_blocks, cluster, (1, 1), chunks)
        return
    # Without homes, grids without a table are as good, and have waves. Nothing is gained then by cutting k.
    whole = list(candidates(blocking, homes, cluster.workers, one_chain)) if homes.known else []
    tables = [(blocking, owners) for owners in whole]
    apart = homes if homes.alike == "same" else homes._replace(alike="")
    for united_blocks, chunks in unions_of(blocking, cluster) if unions else ():
        found = candidates(united_blocks, homes, cluster.workers, one_chain or not whole, chunks)
        tables += [(united_blocks, owners) for owners in found]

    def moved(blocks: Blocking, owners: Owners) -> int:
        layout = TableLayout(problem, Schedule(blocks, owners))
        return layout.summed_bytes() + int(layout.operand_bytes(blocks.whole).received.sum())

    bytes_of = [moved(*table) for table in tables]
    held = any(max(line) >= 0 for each in (homes.a, homes.b) for line in each or ())
    fewest = min(bytes_of, default=None) if held else None
    arithmetic = problem.element_flops * blocking.c_elements / cluster.rate
    for (blocks, table), count in zip(tables, bytes_of, strict=True):
        transfers = count / cluster.link / cluster.workers
        hidden = arithmetic if table.chunks is None else arithmetic / cluster.workers
        if fewest is not None and count > MORE_BYTES * fewest and transfers > hidden:
            continue
        # Plans are compared as if A and its transpose were two arrays. Then a tall X stays, even if one worker would
        # gather a small X sooner than workers add their sums.
        owners = replace(table, fewest=fewest, homes=apart)
        longest = Schedule(blocks, owners).steps
        _, enough = _pace(problem, blocks, cluster)
        tried = {min(enough, longest), max(1, min(longest, max(enough, longest // 4)))}
        if stays:
            tried.add(longest)
        most = _most_read(problem, blocks, cluster, homes) if stays and cluster.device == "cpu" else longest
        for panels in sorted({min(each, most) for each in tried}):
            yield Schedule(replace(blocks, panels=panels), owners)


def _most_read(problem: Problem, blocking: Blocking, cluster: ClusterSpec, homes: Places) -> int:
    """Return how many panels a task may read: a worker has room for the inputs of all tasks that it runs at a time.

    Dask reads all inputs of a task before it starts, also those that a full worker has spilled to its disk.
    """
    m, k, n = blocking.largest
    across = m if homes.alike or blocking.triangle else m + n
    tasks = min(cluster.threads, blocking.whole.c_blocks)
    return max(1, cluster.memory // max(1, tasks * k * across * problem.dtype.itemsize))


def _pace(problem: Problem, blocking: Blocking, cluster: ClusterSpec) -> tuple[float, int]:
    """Return the seconds of one block product, and the panels a task that keep the scheduler idle 70 % of the time."""
    products = blocking.whole.c_blocks * len(blocking.k)
    seconds = problem.element_flops * blocking.c_elements / cluster.rate / max(1, products)
    return seconds, math.ceil(cluster.workers * SCHEDULER_SECONDS / 0.3 / max(seconds, 1e-9))


def free(
    problem: Problem,
    cluster: ClusterSpec,
    multiples: tuple[int, int, int],
    waves: tuple[int, int],
    lengths: tuple[int, ...],
    lookahead: int,
    operands: tuple[Residence, Residence],
) -> Iterator[Schedule]:
    """Schedules of blocks of one size, at multiples of the kernel's tile or of a file's chunks.

    `lengths` are the steps of a chain that are tried. Schedules that certainly need more memory than there is are left
    out, unless all do: then those stay that need about the least.
    """
    found: dict[tuple[tuple[int, int, int], int, Grid], float] = {}
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
                    m, k, n = (
                        max(1, min(size, math.ceil(math.ceil(size / count) / multiple) * multiple))
                        for size, count, multiple in zip(whole, counts, multiples, strict=True)
                    )
                    if ((m, k, n), panels, grid) not in found:
                        least = _least_bytes(problem, (m, k, n), panels * lookahead, grid, waves, operands)
                        found[(m, k, n), panels, grid] = least
    most = max(cluster.memory, 1.1 * min(found.values()))
    for (edges, panels, grid), least in found.items():
        if least <= most:
            yield Schedule(cut(problem, edges, panels), grid, (1, *waves), lookahead)
    if problem.batch:
        yield from _by_batch(problem, cluster)


def _least_bytes(
    problem: Problem,
    edges: tuple[int, int, int],
    open_panels: int,
    grid: Grid,
    waves: tuple[int, int],
    operands: tuple[Residence, Residence],
) -> float:
    """Return a lower bound of the bytes on the fullest worker, with `open_panels` panels of its operands in memory.

    It has at least one block of C, and at least an even share of a wave.
    """
    m, k, n = edges
    high, wide = problem.m / waves[0] / grid.rows, problem.n / waves[1] / grid.columns
    depth = max(k, min(k * open_panels, problem.k / grid.layers))
    item = problem.dtype.itemsize
    of_c = min(item, problem.accumulator_bytes) * math.prod(problem.batch)
    a, b = (
        depth * item * math.prod(batch) * (where in BY_STEP)
        for batch, where in zip((problem.a_batch, problem.b_batch), operands, strict=True)
    )
    if problem.symmetry is not None:
        return max(high * wide / 2 * of_c, m * (m * of_c + a))
    high, wide = max(m, high), max(n, wide)
    return high * wide * of_c + high * a + wide * b


def _grids(problem: Problem, workers: int) -> Iterator[Grid]:
    """Grids that move the fewest bytes. They have layers if C has too few elements to keep all workers busy."""

    def between(grid: Grid) -> int:
        return problem.m * (grid.columns - 1) + problem.n * (grid.rows - 1)

    share = math.prod(problem.shape) / (1 if problem.symmetry is None else 2) / workers
    layers = 1
    while layers <= workers and (layers == 1 or share * layers < 4 * SMALLEST_SHARE):
        yield from sorted(Grid.all_of(workers, layers), key=between)[:2]
        layers *= 2


def _by_batch(problem: Problem, cluster: ClusterSpec) -> Iterator[Schedule]:
    """Whole matrices, dealt to the workers along the longest batch dimension."""
    longest = max(range(len(problem.batch)), key=lambda d: problem.batch[d])
    for chains in (1, 2, 4):
        edges = [max(1, size) for size in (*problem.batch, problem.m, problem.k, problem.n)]
        edges[longest] = max(1, math.ceil(problem.batch[longest] / cluster.workers / chains))
        yield Schedule(cut(problem, edges), Grid(1, cluster.workers))
