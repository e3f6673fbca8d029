"""A plan: a product, its cluster, the chosen schedule, and the seconds and bytes that this takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from distmm.errors import DoesNotFitError
from distmm.planning import description, early_end
from distmm.planning.blocks import Blocking, Wave
from distmm.planning.cluster_spec import ClusterSpec, Residence, Result
from distmm.planning.grid_layout import GridLayout
from distmm.planning.memory import MemoryModel, Peak
from distmm.planning.owners import Grid, Owners
from distmm.planning.precision import Precision
from distmm.planning.problem import Problem
from distmm.planning.schedule import Schedule
from distmm.planning.table_layout import TableLayout
from distmm.planning.time_model import Cost, TimeModel
from distmm.units import count, size

# A worker that would need so many times its free memory is full: more workers like it would not help.
MANY_TIMES = 100

# Seconds of a short product task. Dask takes 1 to 2 ms for a task of a GPU worker.
SHORT_SECONDS = 0.01


@dataclass(frozen=True)
class Plan:
    """What will be done: the blocks, their owners, the kernel, and the predicted cost.

    A plan holds no data and does nothing: `distmm.matmul` builds the graph that it describes. `str` writes its schedule
    as one line, ``g2x1x1 b8192x8192x8192 p1 w1 l2``, which `distmm.matmul` and ``distmm multiply --plan`` take back.
    `repr` is the table of `rows`.

    Attributes
    ----------
    problem : Problem
    schedule : Schedule
        What was chosen: blocks, grid, waves and lookahead.
    cluster : ClusterSpec
    precision, kernel
        For the workers' kernel selection.
    operands : pair of {"resident", "loaded", "made", "kept", "whole"}
        Where A and B are; see `distmm.planning.cluster_spec.Residence`.
    result : {"workers", "host", "out", "reduced"}
        Where finished blocks of C stay.
    streamed : bool
        Whether C is too large to stay: its blocks leave when their readers are done, and further blocks wait for that.
    run_seconds : float, optional
        Seconds after which a run may be stopped. Waves are so short that it loses little (`distmm.planning.early_end`).
    fewest : float, optional
        How few of these workers would be enough; infinity if no number is, None for a cluster that is there.
    on_disk : bool
        Whether workers read A and B from files and write C to one. The predicted time does not count the writes.
    """

    problem: Problem
    schedule: Schedule
    cluster: ClusterSpec
    precision: Precision = "highest"
    kernel: str | None = None
    operands: tuple[Residence, Residence] = ("loaded", "loaded")
    result: Result = "workers"
    streamed: bool = False
    run_seconds: float | None = None
    fewest: float | None = None
    on_disk: bool = False

    @property
    def blocking(self) -> Blocking:
        """Edges of the blocks, and panels a task."""
        return self.schedule.blocking

    @property
    def grid(self) -> Grid | Owners:
        """Owners of the blocks."""
        return self.schedule.grid

    @property
    def lookahead(self) -> int:
        """Steps whose blocks of A and B may be in memory at once."""
        return self.schedule.lookahead

    @property
    def waves(self) -> tuple[Wave, ...]:
        """What is computed together, in this order."""
        return self.schedule.waves

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Edges (m, k, n) of the largest block."""
        return self.blocking.largest

    @property
    def layout(self) -> GridLayout | TableLayout:
        """Bytes by rank; not kept, because a plan travels to the scheduler."""
        kind = TableLayout if isinstance(self.grid, Owners) else GridLayout
        return kind(self.problem, self.schedule)

    @cached_property
    def peak(self) -> Peak:
        """Bytes at the peak, and limits for the runtime: a part of `cost` that takes much less time to compute."""
        return self._memory_model.peak()

    @property
    def _memory_model(self) -> MemoryModel:
        return MemoryModel(self.layout, self.cluster, self.operands, self.result, self.streamed)

    @cached_property
    def cost(self) -> Cost:
        """Bytes, peak memory, tasks and seconds (see `distmm.planning.time_model.Cost`)."""
        moved, seconds, bound_by = self._time_model.predict()
        if isinstance(self.grid, Owners) and self.grid.fewest is not None:
            bound = self.grid.fewest
        elif self.schedule.wave_count == 1:
            bound = moved
        else:
            layout = self.layout
            bound = int(layout.operand_bytes(self.blocking.whole).received.sum()) + layout.summed_bytes()
        return Cost(moved, bound, self.peak.worker, self.peak.host, self.schedule.tasks, seconds, bound_by)

    @property
    def least_seconds(self) -> float:
        """A lower bound of the predicted seconds, from a few numbers."""
        return self._time_model.least_seconds()

    @property
    def _time_model(self) -> TimeModel:
        return TimeModel(self.layout, self.cluster, self.operands, self.result)

    @property
    def bytes_moved(self) -> int:
        """Bytes that workers will send one another."""
        return self.cost.bytes_moved

    @property
    def wave_seconds(self) -> float:
        """Predicted seconds until all that is made together is finished: what a run that ends early may lose."""
        return self.cost.seconds * early_end.largest_share(self.schedule, by_rows=self.result == "reduced")

    @property
    def waves_too_long(self) -> int:
        """How often waves must be halved until a run that ends early loses little."""
        return early_end.doublings_too_long(self.wave_seconds, self.run_seconds) if self.run_seconds else 0

    @property
    def idle_workers(self) -> int:
        """Workers that make no block of C."""
        busy = int((self.layout.chains(self.blocking.whole) > 0).sum())
        return max(0, self.cluster.workers - busy)

    @property
    def keeps_bits(self) -> bool:
        """Whether k is cut so that C has the bits of an uncut product by the same kernel."""
        at_granules = all(edge % self.cluster.granule == 0 for edge in self.blocking.k[:-1])
        return self.cluster.promises_bits and at_granules and self.grid.layers == 1

    @property
    def c_stays(self) -> bool:
        """Whether finished blocks of C stay in the memory of the workers that made them."""
        return self.result == "workers" and not self.streamed

    @cached_property
    def has_short_tasks(self) -> bool:
        """Whether Dask's own time for a task counts beside that of a product task."""
        return self._time_model.paces()[0] < SHORT_SECONDS

    @cached_property
    def is_even(self) -> bool:
        """Whether each worker makes less than twice its share of the blocks of C, rounded up."""
        chains = self.layout.chains(self.blocking.whole)
        return bool(chains.max() < 2 * math.ceil(chains.sum() / self.cluster.workers))

    @property
    def fuses_readers(self) -> bool:
        """Whether the task that finishes a block of C may also be the task that reads it, if that is the only one.

        The reader then runs where the block is made, so the workers need similar numbers of blocks.
        """
        return self.result == "workers" and self.has_short_tasks and self.is_even

    @property
    def slots_that_fit(self) -> float:
        """Blocks of C that fit into a worker's memory with all else that the plan needs.

        Infinite if C is one wave, or has no elements.
        """
        peak, cluster = self.peak, self.cluster
        if peak.output_slots is None or not peak.slot:
            return math.inf
        if self.result == "host":
            free = math.inf if cluster.host_memory is None else cluster.host_memory - peak.host
        else:
            free = cluster.memory - peak.worker
        return peak.output_slots + free // peak.slot

    @property
    def shortfall(self) -> int:
        """Bytes that are missing on each worker, of its own memory and its host's; 0 where all fits."""
        return self.cluster.missing(self.peak.worker, self.peak.host)

    @property
    def least_shortfall(self) -> int:
        """A lower bound of `shortfall` that takes less time to compute."""
        peak = replace(self._memory_model, least=True).peak()
        return self.cluster.missing(peak.worker, peak.host)

    @property
    def fits(self) -> bool:
        """Whether `validate` has nothing to refuse."""
        try:
            self.validate()
        except DoesNotFitError:
            return False
        return True

    def validate(self) -> None:
        """Refuse a plan that cannot fit. Unless C is written with ``out=``, all of it has to stay.

        A streamed product can be computed nevertheless, if its blocks need not stay: its callers ask `check_memory`.

        Raises
        ------
        DoesNotFitError
            If a worker would hold more than it may. The error says how much is short and how many workers would do.
        """
        self.check_memory(self.layout.busiest if self.streamed else 0)

    def validate_run(self) -> None:
        """Refuse a plan that finishes no block of C in `run_seconds`.

        Raises
        ------
        DoesNotFitError
            With the figures, and what would do.
        """
        if self.run_seconds is not None:
            workers = self.cluster.workers
            early_end.refuse(self.wave_seconds, self.cost.seconds, self.run_seconds, workers, self.block_shape)

    def check_memory(self, blocks: int = 0, workers: int | None = None) -> None:
        """Refuse a plan that does not fit into memory while each worker holds up to `blocks` blocks of C.

        The plan's own number of blocks counts where it is larger. With fewer `workers` than the plan's, some do the
        work of several.

        Raises
        ------
        DoesNotFitError
            As `validate`.
        """
        gpu, host = self.cluster.device == "cuda", self.cluster.host_memory
        more = max(0, blocks - (self.peak.output_slots or blocks)) * self.peak.slot
        on_host = self.result == "host"
        workers = self.cluster.workers if workers is None else workers
        ranks = math.ceil(self.grid.size / workers)
        for where, peak, have in (
            ("", ranks * (self.peak.worker + more * (not on_host)), self.cluster.memory),
            (" of host memory", ranks * (self.peak.host + more * on_host), math.inf if host is None else host),
        ):
            if peak > have:
                what = "GPUs" if gpu else "workers"
                use = f"use about {math.ceil(workers * peak / max(1, have))} {what},"
                if self.fewest is not None:
                    none_does = f"no number of these {what} would do: take others,"
                    use = none_does if self.fewest == math.inf else f"use {self.fewest} {what},"
                kept = " or write C as it is made, with out=," if self.result in ("workers", "host") else ""
                if more:
                    kept = " or read C block by block (C.sum(), da.topk(C, 10)), or write it as it is made, with out=,"
                remedy = f"{use}{kept} or more memory for each, or smaller blocks"
                if self.fewest is None and peak > MANY_TIMES * have:
                    remedy = "a worker has almost none: end what fills its memory, or start workers with more of it"
                held = f", with {count(blocks, 'block of C')} in memory at a time" if more else ""
                raise DoesNotFitError(
                    f"this product needs {size(peak)}{where} on each of {workers} {what}{held}, "
                    f"{size(have)} is free there: short by {size(peak - have)}; "
                    f"{remedy} (blocks are now {'x'.join(map(str, self.block_shape))})"
                )

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as a table.

        Returns
        -------
        list of tuple of str
            Label and value of each row.
        """
        return description.rows(self)

    def __str__(self) -> str:
        return str(self.schedule)

    def __repr__(self) -> str:
        return "\n".join(f"{label:11} {value}" for label, value in self.rows())

    def _repr_html_(self) -> str:
        return description.html(self.rows(), self.schedule)
