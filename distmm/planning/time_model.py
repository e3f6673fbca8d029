"""Time that a schedule takes, predicted from sizes alone; with it the bytes moved.

The model counts what the runtime does by construction: stationary C, one chain for each block of C, 2-D block-cyclic
homes, blocks of A and B of at most `lookahead` steps in memory (`distmm.graph.product_graph`,
`distmm.scheduler.lookahead`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from distmm.planning.cluster_spec import NEAR, SCHEDULER_SECONDS, ClusterSpec, Residence, Result
from distmm.planning.grid_layout import GridLayout
from distmm.planning.table_layout import TableLayout

# What a product may be bound by; "storing" is the copy of C from the GPUs to their hosts.
Resource = Literal["arithmetic", "transfers", "loading", "storing", "scheduler"]

# Time that the scheduler takes for each task of a new graph before it sends out the first one: 60 to 90 us to make and
# order the task, the rest in distmm's plugin.
INSERT_SECONDS = 0.15e-3

# Time on GPU clusters from the call to the first product, without the making of the tasks. 36 ms in all were measured
# on two H200 for 96 tasks, with a plan that took 13 ms.
START_SECONDS = 20e-3

# Added to this if blocks come from the client's memory or go there.
HOST_START_SECONDS = 15e-3

# The same of both for a product of one task, which reads and writes such blocks itself. One H200, CuPy arrays of the
# client, n = 1024: 10.6 ms from the call to its end, where an empty task of Dask takes 9.
ONE_TASK_SECONDS = 10e-3

# For a worker that runs one task at a time: idle time of its GPU after each task. For all workers: the least time from
# the start of one task to the start of the next, however short the tasks are.
ALONE_GAP_SECONDS, TASK_SECONDS = 3.4e-3, 1.4e-3

# On GPU clusters, time from the end of one step to the start of the next in a single chain (the round trip to the
# scheduler), measured. Other chains of the worker run meanwhile.
ROUND_TRIP_SECONDS = 6e-3

# CPU time that Dask spends on one task on CPU clusters: scheduler, connection, the worker's event loop while two
# products run, and the gap between tasks. It is rough: 264 fewer tasks saved 12 ms each on two busy cores, which
# includes fewer additions of C.
CPU_TASK_SECONDS = 10e-3


@dataclass(frozen=True)
class Cost:
    """Predicted cost of one product.

    Attributes
    ----------
    bytes_moved : int
        Sum of the blocks of A and B sent between workers, each sent once to each worker that needs it in each wave,
        and of the partial blocks of C where k is split.
    bytes_bound : int
        The same if all of C is one wave: on a full grid ``mk (columns - 1) + kn (rows - 1)`` elements, and
        ``mn (layers - 1)`` accumulators. No waves move less. If the operands are in the workers' memory: the fewest
        that any table of owners moves from there (`distmm.planning.owners`).
    peak_bytes, peak_host_bytes : int
        `worker` and `host` of `distmm.planning.memory.Peak`.
    tasks : int
        Product tasks in the graph; without the mirror images of a symmetric product.
    seconds : float
        On GPU clusters the longest of arithmetic, transfers, loading, storing and scheduling, and what does not overlap
        with it; on CPU clusters the sum of all.
    bound_by : str
        The largest of these.
    """

    bytes_moved: int
    bytes_bound: int
    peak_bytes: int
    peak_host_bytes: int
    tasks: int
    seconds: float
    bound_by: Resource


@dataclass(frozen=True)
class TimeModel:
    """Predicts seconds, for a schedule on `cluster` with A and B where `operands` says and C where `result` says."""

    layout: GridLayout | TableLayout
    cluster: ClusterSpec
    operands: tuple[Residence, Residence]
    result: Result

    def predict(self) -> tuple[int, float, Resource]:
        """Return bytes moved between workers, seconds, and the resource that is busy longest."""
        layout, cluster, problem, schedule = self.layout, self.cluster, self.layout.problem, self.layout.schedule
        waves, steps, on_gpu = schedule.wave_count, schedule.steps, cluster.device == "cuda"
        arithmetic = loading = storing = 0.0
        reads = 0
        moved, transfers = layout.summed_bytes(), layout.received_sums() / cluster.link
        per_product = problem.element_flops / max(1, problem.k) / cluster.rate
        # On CPU clusters nothing overlaps with products: what counts is all that a worker receives, in whatever step.
        ahead = max(1, min(steps, schedule.lookahead - 1)) if on_gpu else max(1, steps)
        for wave, count in schedule.kinds_of_waves:
            products = layout.multiplied(wave, cluster.triangles)
            if not on_gpu:  # each thread has its own cores, which are idle if there are fewer chains
                chains = max(1, layout.chains_abreast(wave))
                products *= math.ceil(chains / cluster.threads) * cluster.threads / chains
            arithmetic += count * products * per_product
            reads += count * (len(wave.rows) + len(wave.columns)) * len(wave.batches) * len(layout.blocking.k)
            traffic = layout.operand_bytes(wave)
            moved += count * int(traffic.received.sum())
            received, sent, *_ = traffic if ahead >= steps else layout.operand_bytes(wave, slice(0, ahead))
            transfers += count * steps / ahead * float(max(received.max(), sent.max())) / cluster.link
            loaded = sum(x for x, where in zip(traffic.homes, self.operands, strict=True) if where not in NEAR)
            loading += count * float(np.max(loaded)) / cluster.load
            if on_gpu and self.copied:
                stored = float(layout.c_bytes(wave, problem.dtype.itemsize, 1).max())
                storing += count * self.copied * stored / cluster.load
        if on_gpu:  # a chain's next step begins a round trip after its last one; other chains may fill that time
            one_chain = arithmetic * waves / max(1, layout.busiest) + waves * (steps - 1) * ROUND_TRIP_SECONDS
            tasks = layout.busiest * steps
            alone = arithmetic + tasks * ALONE_GAP_SECONDS if cluster.threads == 1 else 0.0
            arithmetic = max(arithmetic, tasks * TASK_SECONDS, alone, one_chain)
            loading = max(loading, self._paced_loading(arithmetic, transfers, loading))
        busy: dict[Resource, float] = {
            "arithmetic": arithmetic,
            "transfers": transfers,
            "loading": loading,
            "storing": storing,
            "scheduler": self.graph_tasks * SCHEDULER_SECONDS,
        }
        return moved, self._overlapped(busy, waves, reads), max(busy, key=lambda name: busy[name])

    def least_seconds(self) -> float:
        """Return a lower bound of the seconds that `predict` returns, from numbers of blocks alone.

        It assumes no transfers between workers, one load of each operand, and no idle worker among those that have
        a chain.
        """
        problem, schedule, cluster = self.layout.problem, self.layout.schedule, self.cluster
        blocking, grid = schedule.blocking, schedule.grid
        workers = max(1, min(grid.size, blocking.whole.c_blocks * grid.layers))
        a = problem.m * math.prod(problem.a_batch)
        b = 0 if problem.symmetry is not None else problem.n * math.prod(problem.b_batch)
        lines = sum(size for size, where in zip((a, b), self.operands, strict=True) if where not in NEAR)
        item, load = problem.dtype.itemsize, grid.size * cluster.load
        copied = self.copied if cluster.device == "cuda" else 0
        busy: dict[Resource, float] = {
            "arithmetic": problem.element_flops * blocking.multiplied(cluster.triangles) / cluster.rate / workers,
            "transfers": 0.0,
            "loading": lines * problem.k * item / load,
            "storing": copied * blocking.c_elements * item / load,
            "scheduler": self.graph_tasks * SCHEDULER_SECONDS,
        }
        rounded = 1 - 1e-9
        return self._overlapped(busy, schedule.wave_count, blocking.loads) * rounded

    def paces(self) -> tuple[float, float]:
        """Seconds of one step of the largest block of C, and of its copy to the host when finished."""
        problem, blocking = self.layout.problem, self.layout.blocking
        m, k, n = blocking.largest
        elements = m * n * math.prod(map(max, blocking.batch))
        panels = min(blocking.panels, len(blocking.k))
        product = elements * panels * k * problem.element_flops / max(1, problem.k) / self.cluster.rate
        return product, self.copied * elements * problem.dtype.itemsize / self.cluster.load

    @cached_property
    def copied(self) -> float:
        """Blocks of C that a GPU copies to its host for each one that it makes. `out` takes mirror images too."""
        if self.result in ("workers", "reduced"):
            return 0.0
        blocking = self.layout.blocking
        images = blocking.mirrored(blocking.whole) if self.result == "out" else 0
        return 1 + images / max(1, blocking.whole.c_blocks)

    @cached_property
    def graph_tasks(self) -> int:
        """Tasks of all products, and of the mirror images of a symmetric one."""
        blocking = self.layout.blocking
        return self.layout.schedule.tasks + blocking.mirrored(blocking.whole)

    def _overlapped(self, busy: dict[Resource, float], waves: int, reads: int) -> float:
        """Seconds of a product whose resources are busy for `busy` seconds each.

        Nothing overlaps with the making of the first wave's tasks and the transfers of the first products. On CPU
        clusters the cores that multiply also load, send, receive and run Dask, so all seconds add up.
        """
        schedule, cluster = self.layout.schedule, self.cluster
        tasks = self.graph_tasks + schedule.blocking.loads
        # Of the first step's transfers, first products wait for this share. On CPUs nothing overlaps.
        share = 1.0 if cluster.device == "cpu" else self.layout.first_products()
        exposed = tasks / waves * INSERT_SECONDS + busy["transfers"] / schedule.steps / waves * share
        if cluster.device == "cpu":
            of_dask = (schedule.tasks + reads) * CPU_TASK_SECONDS / cluster.workers / cluster.threads
            return sum(busy.values()) + of_dask + exposed
        start = START_SECONDS + HOST_START_SECONDS * (busy["loading"] + busy["storing"] > 0)
        exposed += ONE_TASK_SECONDS if self.graph_tasks == 1 else start
        return self._on_gpus(busy, waves) + exposed

    def _paced_loading(self, arithmetic: float, transfers: float, loading: float) -> float:
        """Least seconds from the first load to the last one, if each step waits for an earlier one.

        The blocks of a step are loaded, sent on and multiplied, and the scheduler hears of it. Only then are the blocks
        of the step loaded that comes `lookahead` steps later. So `lookahead` steps are under way at a time.
        """
        if not loading:
            return 0.0
        schedule = self.layout.schedule
        one_by_one = arithmetic + transfers + loading + schedule.steps * schedule.wave_count * ROUND_TRIP_SECONDS
        return one_by_one / schedule.lookahead

    def _on_gpus(self, busy: dict[Resource, float], waves: int) -> float:
        """Seconds until GPUs have made C, and have copied it to their hosts if it does not stay.

        The last step of a wave finishes a worker's blocks one after the other, and they are copied one after the other.
        Where a copy takes longer than a product, the copies of the last wave end later than its products; those of
        earlier waves overlap with products of the next (`distmm.worker.worker_slots`). With layers, the last sums are
        taken to follow one another like the last products.

        Products begin when the blocks of the first step are loaded. The last step begins when its blocks are loaded.
        """
        schedule, loading, arithmetic = self.layout.schedule, busy["loading"], busy["arithmetic"]
        steps = schedule.steps * waves
        first = loading / steps
        longest = max(arithmetic + first, loading + arithmetic / steps, busy["transfers"] + first, busy["scheduler"])
        if not self.copied:
            return longest
        product, copy = self.paces()
        chains = max(1, math.ceil(self.layout.chains_abreast(schedule.blocking.whole) / waves))
        late = (chains - 1) * max(0.0, copy - product)
        return max(longest + copy + late, busy["storing"])
