"""The sum of a product's events. Pure, and small enough to be sent from scheduler to client."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distmm.planning.plan import Plan
from distmm.telemetry import liveness, theme
from distmm.telemetry.events import (
    Access,
    Again,
    Checked,
    Dropped,
    Event,
    Failed,
    Heard,
    Noted,
    Retried,
    Sample,
    StepRun,
    Transfer,
    Unwritten,
    WorkerLeft,
)
from distmm.telemetry.history import History
from distmm.telemetry.incidents import Incidents
from distmm.telemetry.time_left import Pace
from distmm.telemetry.worker_totals import Lane

__all__ = ["UNDER_WAY", "Figures", "Record"]

# States of a product that is not over. The others: "complete", "failed" and "cancelled".
UNDER_WAY = ("waiting", "running", "stalled")

# Runs and transfers kept for the timeline: 20 MB. Plans have far fewer tasks, as the scheduler bounds their number.
# Reads and writes are one a block.
MOST_RUNS, MOST_ACCESSES = 200_000, 50_000


class Figures(NamedTuple):
    """How far a product is. Counts are steps; `rate` is FLOP/s since the first step began.

    `left` is seconds at the recent rate (see `distmm.telemetry.time_left`). For a job it counts until the last block is
    checked and on the disk; it is infinite while nothing is known, and while the product is stalled. `error` says what
    failed first, where the state is "failed". `workers` of `planned` workers are heard of. `idle` is seconds since the
    product did something, `silent` seconds since the heartbeat of the worker that has sent none for longest.
    """

    done: int
    total: int
    blocks_done: int
    blocks: int
    flops: float
    seconds: float
    rate: float
    left: float
    moved: int
    bound: int
    again: int
    interrupted: int
    failed: int
    resumed: int
    refuted: int
    state: str
    error: str = ""
    workers: int = 0
    planned: int = 0
    idle: float = 0.0
    silent: float = math.inf


class Record:
    """One product: its plan, which steps of which chains are done, and who did what when.

    Parameters
    ----------
    product : str
        Name of C as a Dask array, or the name of a job, whose waves are products of their own.
    plan : Plan
    submitted : float
        When the scheduler got its graph.
    title : str, optional
        Where a job's C goes. A job computes all blocks but those in `kept`.
    kept : sequence of int, optional
        Chains whose blocks were on disk before.
    numbers : dict, optional
        Number of each worker, which its colour follows: that of the scheduler, for all its products.

    Attributes
    ----------
    done : array of bool, shape (chains, steps)
        A chain is a block of C: see `chain`.
    owners : list of str, by chain
        Worker that ran the chain's last step so far, or that is to run it.
    """

    def __init__(
        self,
        product: str,
        plan: Plan,
        submitted: float,
        title: str = "",
        kept: Sequence[int] = (),
        numbers: dict[str, int] | None = None,
    ) -> None:
        self.product, self.plan, self.submitted = product, plan, submitted
        self.title = title or product
        self.whole = bool(title) or len(plan.waves) > 1  # more steps will come than have come
        b = plan.blocking
        self.batches = tuple(len(edges) for edges in b.batch)
        self.rows, self.columns = len(b.m), len(b.n)
        parts = b.parts(plan.grid.layers)
        # The sums of partial blocks, where k is split, are steps too, of few operations that no formula counts.
        depths = np.zeros(b.chain_tasks(plan.grid.layers))
        products = [sum(b.k[p] for p in panels) for steps in parts for panels in steps]
        depths[: len(products)] = products
        self.chains, self.steps = b.c_blocks, len(depths)
        # The chain that makes each block: above the diagonal of a symmetric product, that of its mirror image.
        self.source = np.arange(self.chains)
        if b.triangle:
            matrices = self.source.reshape(-1, self.rows, self.columns)
            self.source = np.where(np.tri(self.rows, dtype=bool), matrices, matrices.swapaxes(1, 2)).ravel()
        self.done = np.zeros((self.chains, self.steps), dtype=bool)
        self.wanted = np.zeros((self.chains, self.steps), dtype=bool)
        self.again = np.zeros(self.chains, dtype=np.int32)
        self.resumed = np.zeros(self.chains, dtype=bool)
        self.resumed[list(kept)] = True
        self.certified = np.zeros(self.chains, dtype=bool)
        self.refuted = np.zeros(self.chains, dtype=bool)  # until a new block passes
        self.rejections = np.zeros(self.chains, dtype=np.int32)
        self.interrupted = 0  # runs that ended without a result and are repeated
        self.unwritten = 0  # tasks that are still to judge, reduce or write blocks, of those that have come
        self.failed = 0  # tasks that failed for good, those that were tried again included
        self.failures: dict[Hashable, str] = {}  # key of each task that has failed, and was not tried again -> why
        self.owners: list[str] = [""] * self.chains
        self.lanes: dict[str, Lane] = {}
        self.numbers = {} if numbers is None else numbers
        self.before: dict[str, int] = {}  # bytes of blocks that workers held when the product came
        self.runs: deque[StepRun] = deque(maxlen=MOST_RUNS)
        self.transfers: deque[Transfer] = deque(maxlen=MOST_RUNS)
        self.accesses: deque[Access] = deque(maxlen=MOST_ACCESSES)  # reads of A and B, writes of C
        self.history = History(submitted)  # of the operations, repeated ones too
        self.incidents = Incidents()
        self.seen: Mapping[str, float] | None = None  # when the workers of the cluster were last heard of, by name
        self.advanced = submitted  # when something was last done: a step, a check, a write
        self.started: float | None = None
        self.stopped: float | None = None
        self.pace: Pace | None = None  # of the operations, repeated ones too
        self.ends = np.zeros(self.chains)  # when the last step of each chain so far ended
        self.afterwards = 0.0  # seconds from there until the block is checked and written, of late
        self.ended: str = ""  # why nothing more will come, where the product is not complete
        areas = np.outer(b.m, b.n).ravel()
        counts = np.ones(1)
        for edges in b.batch:
            counts = np.outer(counts, edges).ravel()
        unit = plan.problem.element_flops / max(1, plan.problem.k)
        self.step_flops = np.outer(np.outer(counts, areas).ravel(), depths) * unit

    def chain(self, batch: tuple[int, ...], i: int, j: int) -> int:
        """Index of the chain that makes block ``C[*batch, i, j]``."""
        at = 0
        for index, length in zip(batch, self.batches, strict=True):
            at = at * length + index
        return (at * self.rows + i) * self.columns + j

    def block(self, chain: int) -> str:
        """Name of a chain's block, as in ``C[0, 3]``."""
        *batch, i, j = np.unravel_index(chain, (*self.batches, self.rows, self.columns))
        return f"C[{', '.join(str(int(x)) for x in (*batch, i, j))}]"

    def lane(self, worker: str) -> Lane:
        """Totals of a worker."""
        return self.lanes.setdefault(worker, Lane())

    def color(self, worker: str) -> str:
        """Colour of a worker."""
        return theme.worker_color(self.numbers.setdefault(worker, len(self.numbers)))

    @property
    def shape(self) -> str:
        """What is multiplied: shapes and type."""
        return self.plan.rows()[0][1].rpartition(", ")[0]

    @property
    def mirrored(self) -> np.ndarray:
        """Whether a block is the mirror image of another one, by chain."""
        return np.not_equal(self.source, np.arange(self.chains))

    @property
    def refutations(self) -> int:
        """How often a block failed its check."""
        return int(self.rejections.sum())

    def want(self, chain: int, step: int, owner: str, time: float = 0.0) -> None:
        """Count a step that has come to the scheduler."""
        self._begin_anew(time)
        self.wanted[chain, step] = True
        self.owners[chain] = self.owners[chain] or owner
        self.lane(owner)
        self.ended = ""

    @property
    def expected(self) -> np.ndarray:
        """Steps that are to be done, shape (chains, steps): those that have come, and those of later waves."""
        to_come = ~self.resumed & ~self.mirrored
        return np.broadcast_to(to_come[:, None], self.done.shape) if self.whole else self.wanted

    @property
    def made(self) -> bool:
        """Whether every step that is to be done is done."""
        expected = self.expected
        return bool(expected.any()) and not bool((expected & ~self.done).any())

    @property
    def complete(self) -> bool:
        """Whether every step is done, and all that judges, reduces and writes the blocks."""
        return not self.unwritten and self.made

    @property
    def progress(self) -> np.ndarray:
        """Fraction of each block that is done, shape (chains,); blocks that were on disk already are done."""
        return np.where(self.resumed, 1.0, self.done.mean(axis=1))[self.source]

    def figures(self, now: float) -> Figures:
        """How far the product is at the time `now`."""
        expected = self.expected
        flops, to_come = (float(self.step_flops[steps].sum()) for steps in (self.done, expected & ~self.done))
        end = self.stopped if self.over and self.stopped else now
        seconds = max(0.0, end - self.started) if self.started is not None else 0.0
        rate = flops / seconds if seconds else 0.0
        planned, seen = self.plan.grid.size, self.seen
        workers = planned if seen is None else liveness.heard_of(planned, self.lanes, seen, now)
        idle = max(0.0, now - self.advanced)
        stalled = not self.over and liveness.stalled(workers, idle, self.pace.pause if self.pace else None)
        return Figures(
            done=int(self.done.sum()),
            total=int(expected.sum()),
            blocks_done=int(np.count_nonzero(self.progress == 1)),
            blocks=self.chains,
            flops=flops,
            seconds=seconds,
            rate=rate,
            left=math.inf if stalled else self._left(now, to_come),
            moved=sum(lane.received for lane in self.lanes.values()),
            bound=self.plan.cost.bytes_bound,
            again=int(self.again.sum()),
            interrupted=self.interrupted,
            failed=self.failed,
            resumed=int(self.resumed.sum()),
            refuted=int(self.refuted.sum()),
            state="stalled" if stalled else self._state,
            error=next(iter(self.failures.values()), ""),
            workers=workers,
            planned=planned,
            idle=idle,
            silent=max((now - at for name, at in (seen or {}).items() if name in self.lanes), default=math.inf),
        )

    def end(self, now: float) -> float:
        """When the last step, check or write of a product was, that is over; else now."""
        return self.advanced if self.over else now

    @property
    def over(self) -> bool:
        """Whether nothing more will come of the product."""
        return bool(self.failures) or self.complete or bool(self.ended)

    @property
    def _state(self) -> str:
        if self.failures:
            return "failed"
        return "complete" if self.complete else self.ended or ("running" if self.runs else "waiting")

    def _left(self, now: float, to_come: float) -> float:
        if self.pace is None:
            return math.inf
        return self.pace.left(now, to_come) + self.afterwards if to_come else 0.0

    def add(self, event: Event) -> None:
        """Count an event."""
        match event:
            case StepRun():
                self._run(event)
            case Transfer():
                self.transfers.append(event)
            case Access():
                self.accesses.append(event)
                self.lane(event.worker).access(event)
            case Again(time, chain, step, finished):
                self._begin_anew(time)
                self.done[chain, step] = False
                self.again[chain] += finished
                self.interrupted += not finished
                self.incidents.add(time, "step lost, computed again" if finished else "run interrupted, repeated")
            case WorkerLeft(time, worker):
                lane = self.lane(worker)
                lane.left, lane.lost = time, lane.lost or time
                self.incidents.add(time, f"worker {worker} lost")
            case Dropped():
                self.ended = "cancelled"
            case Failed(time, cause, what, error) if cause not in self.failures:
                self.failed += 1
                self.failures[cause] = f"{what}: {error}"
                self.incidents.add(time, self.failures[cause])
            case Unwritten(time, tasks):
                self.unwritten, self.advanced = tasks, max(self.advanced, time)
            case Noted(time, what):
                self.incidents.add(time, what)
            case Heard(seen):
                self.seen = seen
            case Retried(cause=cause):
                self.failures.pop(cause, None)
            case Sample(worker=worker, received=received):
                lane = self.lane(worker)
                lane.received += received
                lane.sample(event)
            case Checked(time, chain, passed):
                self.certified[chain], self.refuted[chain] = passed, not passed
                self.advanced = max(self.advanced, time)
                self.rejections[chain] += not passed
                if self.ends[chain]:
                    after = max(0.0, time - self.ends[chain])
                    self.afterwards = (self.afterwards + after) / 2 if self.afterwards else after
                if not passed:
                    self.incidents.add(time, f"{self.block(chain)} failed its check")

    def _run(self, run: StepRun) -> None:
        flops = float(self.step_flops[run.chain, run.step])
        lane = self.lane(run.worker)
        lane.flops += flops
        lane.seconds += max(0.0, run.stop - max(run.start, lane.until))
        lane.until = max(lane.until, run.stop)
        lane.steps += 1
        lane.left = None
        lane.recent.append((run.start, run.stop, flops))
        self.done[run.chain, run.step] = True
        self.owners[run.chain] = run.worker
        self.runs.append(run)
        self.advanced = max(self.advanced, run.stop)
        self.ends[run.chain] = max(self.ends[run.chain], run.stop)
        self.pace = self.pace or Pace(run.start)
        self.pace.add(run.stop, flops)
        self.history.add(run.worker, run.start, run.stop, flops)
        self.started = run.start if self.started is None else min(self.started, run.start)
        self.stopped = run.stop if self.stopped is None else max(self.stopped, run.stop)

    def _begin_anew(self, time: float) -> None:
        """Let the time without work begin now, if there was nothing to do until now."""
        if time - self.advanced > liveness.STALLED_SECONDS and self.made:
            self.advanced = time
