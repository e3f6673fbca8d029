"""The record of a product: the sum of its events. Pure, and small enough to send from scheduler to client."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distmm.planning.owners import Owners
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

# States of a product that has not ended. The other states are "complete", "failed" and "cancelled".
UNDER_WAY = ("waiting", "running", "stalled")

# Most runs and transfers, and most reads and writes, that are kept for the timeline. They take 20 MB. Plans have far
# fewer tasks, and one read or write for each block.
MOST_RUNS, MOST_ACCESSES = 200_000, 50_000


class Figures(NamedTuple):
    """The progress of a product.

    Attributes
    ----------
    done, total : int
        Steps that are done, and all steps.
    blocks_done, blocks : int
        Blocks of C that are done, and all blocks.
    flops, seconds, rate : float
        Operations so far, seconds since the first step began, and FLOP/s over this time.
    left : float
        Seconds left at the recent rate (`distmm.telemetry.time_left`); for a job, until the last block is checked and
        on disk. Infinite before the first step, and while the product is stalled.
    moved, bound : int
        Bytes that workers received from others, and the lower bound of a 2-D product.
    again, interrupted : int
        Results of steps that were lost and computed again; runs of steps that ended without a result.
    failed : int
        Tasks that failed after all retries.
    resumed : int
        Blocks of C that were on disk before.
    refuted : int
        Blocks of C whose last check failed.
    state : {"waiting", "running", "stalled", "complete", "failed", "cancelled"}
    error : str
        The first failure, if the state is "failed".
    workers, planned : int
        Workers that send heartbeats, and workers of the plan.
    idle : float
        Seconds since the last step, check or write.
    silent : float
        Seconds since the last heartbeat, of the worker for which this is longest.
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
    """One product: its plan, the steps that are done, and the activity of each worker over time.

    Parameters
    ----------
    product : str
        Name of C as a Dask array, or the name of a job, whose waves are separate products.
    plan : Plan
    submitted : float
        When the scheduler received the graph, in seconds since the epoch.
    title : str, optional
        Path of a job's C. A job computes all blocks except those in `kept`.
    kept : sequence of int, optional
        Chains whose blocks were on disk before.
    numbers : dict, optional
        Number of each worker, which determines its colour. All products of a scheduler share this dictionary.

    Attributes
    ----------
    done : array of bool, shape (chains, steps)
        Whether a step is done. There is one chain for each block of C (`chain`).
    owners : list of str, by chain
        Worker that ran the last step of the chain so far, or that will run the first one.
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
        self.whole = bool(title) or len(plan.waves) > 1  # the graph of later waves arrives later
        b = plan.blocking
        self.batches = tuple(len(edges) for edges in b.batch)
        self.rows, self.columns = len(b.m), len(b.n)
        depths, tasks = _depths(plan)
        self.chains, self.steps = b.c_blocks, depths.shape[1]
        self.steps_of = tasks  # number of steps of each chain, or one number for all
        # The chain that makes each block. In a symmetric product, the chain of its mirror image makes a block above the
        # diagonal.
        self.source = np.arange(self.chains)
        if b.triangle:
            matrices = self.source.reshape(-1, self.rows, self.columns)
            self.source = np.where(np.tri(self.rows, dtype=bool), matrices, matrices.swapaxes(1, 2)).ravel()
        self.done = np.zeros((self.chains, self.steps), dtype=bool)
        self.wanted = np.zeros((self.chains, self.steps), dtype=bool)
        self.again = np.zeros(self.chains, dtype=np.int32)
        self.resumed = np.zeros(self.chains, dtype=bool)
        self.resumed[list(kept)] = True
        self.computed = ~self.resumed & ~self.mirrored  # chains with tasks
        self.count = int((self.computed * self.steps_of).sum()) if self.whole else 0  # expected steps
        self.to_do = self.count  # those of them that are not done; counted, since every event and sample may ask for it
        self.certified = np.zeros(self.chains, dtype=bool)
        self.refuted = np.zeros(self.chains, dtype=bool)  # failed its last check
        self.rejections = np.zeros(self.chains, dtype=np.int32)
        self.interrupted = 0  # runs of steps that ended without a result and are repeated
        self.unwritten = 0  # submitted tasks that check, reduce or write blocks and have not finished
        self.failed = 0  # tasks that failed, also if a client had them run again
        self.failures: dict[Hashable, str] = {}  # key of each failed task that does not run again -> its error
        self.owners: list[str] = [""] * self.chains
        self.lanes: dict[str, Lane] = {}
        self.numbers = {} if numbers is None else numbers
        self.before: dict[str, int] = {}  # bytes of blocks that each worker held before the product
        self.runs: deque[StepRun] = deque(maxlen=MOST_RUNS)
        self.transfers: deque[Transfer] = deque(maxlen=MOST_RUNS)
        self.accesses: deque[Access] = deque(maxlen=MOST_ACCESSES)  # reads of A and B, writes of C
        self.history = History(submitted)  # of operations, repeated ones included
        self.incidents = Incidents()
        self.seen: Mapping[str, float] | None = None  # last heartbeat of each worker of the cluster
        self.advanced = submitted  # time of the last step, check or write
        self.started: float | None = None
        self.stopped: float | None = None
        self.pace: Pace | None = None  # of operations, repeated ones included
        self.ends = np.zeros(self.chains)  # end of the last step of each chain so far
        self.afterwards = 0.0  # recent seconds from the last step of a chain until its block is checked and written
        self.ended: str = ""  # state of a product that ended without being complete
        areas = np.outer(b.m, b.n).ravel()
        counts = np.ones(1)
        for edges in b.batch:
            counts = np.outer(counts, edges).ravel()
        unit = plan.problem.element_flops / max(1, plan.problem.k)
        self.step_flops = np.outer(counts, areas).ravel()[:, None] * depths * unit

    def chain(self, batch: tuple[int, ...], i: int, j: int) -> int:
        """Return the index of the chain of block ``C[*batch, i, j]``."""
        at = 0
        for index, length in zip(batch, self.batches, strict=True):
            at = at * length + index
        return (at * self.rows + i) * self.columns + j

    def block(self, chain: int) -> str:
        """Return the name of a chain's block, as in ``C[0, 3]``."""
        *batch, i, j = np.unravel_index(chain, (*self.batches, self.rows, self.columns))
        return f"C[{', '.join(str(int(x)) for x in (*batch, i, j))}]"

    def lane(self, worker: str) -> Lane:
        """Return the totals of a worker; a new worker gets new ones."""
        return self.lanes.setdefault(worker, Lane())

    def color(self, worker: str) -> str:
        """Return the colour of a worker."""
        return theme.worker_color(self.numbers.setdefault(worker, len(self.numbers)))

    @property
    def shape(self) -> str:
        """Shapes and type of the product as text."""
        return self.plan.rows()[0][1].rpartition(", ")[0]

    @property
    def mirrored(self) -> np.ndarray:
        """Whether each block is the mirror image of another one, shape (chains,)."""
        return np.not_equal(self.source, np.arange(self.chains))

    @property
    def refutations(self) -> int:
        """Number of failed checks."""
        return int(self.rejections.sum())

    def want(self, chain: int, step: int, owner: str, time: float = 0.0) -> None:
        """Add a step that was submitted to the scheduler."""
        self._begin_anew(time)
        if not self.whole and not self.wanted[chain, step]:
            self.count += 1
            self.to_do += not self.done[chain, step]
        self.wanted[chain, step] = True
        self.owners[chain] = self.owners[chain] or owner
        self.lane(owner)
        self.ended = ""

    @property
    def expected(self) -> np.ndarray:
        """Steps to do, shape (chains, steps): the submitted ones, and those of later waves."""
        steps = np.arange(self.steps) < np.reshape(self.steps_of, (-1, 1))
        return np.broadcast_to(self.computed[:, None] & steps, self.done.shape) if self.whole else self.wanted

    @property
    def made(self) -> bool:
        """Whether all expected steps are done."""
        return self.count > 0 and not self.to_do

    @property
    def complete(self) -> bool:
        """Whether all steps are done, and all tasks that check, reduce and write the blocks."""
        return not self.unwritten and self.made

    @property
    def progress(self) -> np.ndarray:
        """Fraction of each block that is done, shape (chains,); 1 for blocks that were on disk before."""
        return np.where(self.resumed, 1.0, self.done.sum(axis=1) / self.steps_of)[self.source]

    def figures(self, now: float) -> Figures:
        """Return the progress of the product at the time `now` (seconds since the epoch)."""
        expected = self.expected
        flops, remaining = (float(self.step_flops[steps].sum()) for steps in (self.done, expected & ~self.done))
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
            left=math.inf if stalled else self._left(now, remaining),
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
        """Return when the last step, check or write of an ended product was; `now` for a running one."""
        return self.advanced if self.over else now

    @property
    def over(self) -> bool:
        """Whether the product has ended: complete, failed or cancelled."""
        return bool(self.failures) or self.complete or bool(self.ended)

    @property
    def _state(self) -> str:
        if self.failures:
            return "failed"
        return "complete" if self.complete else self.ended or ("running" if self.runs else "waiting")

    def _left(self, now: float, flops: float) -> float:
        if self.pace is None:
            return math.inf
        return self.pace.left(now, flops) + self.afterwards if flops else 0.0

    def add(self, event: Event) -> None:
        """Add an event."""
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
                self._set_done(chain, step, False)
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
        self._set_done(run.chain, run.step, True)
        self.owners[run.chain] = run.worker
        self.runs.append(run)
        self.advanced = max(self.advanced, run.stop)
        self.ends[run.chain] = max(self.ends[run.chain], run.stop)
        self.pace = self.pace or Pace(run.start)
        self.pace.add(run.stop, flops)
        self.history.add(run.worker, run.start, run.stop, flops)
        self.started = run.start if self.started is None else min(self.started, run.start)
        self.stopped = run.stop if self.stopped is None else max(self.stopped, run.stop)

    def _set_done(self, chain: int, step: int, done: bool) -> None:
        expected = self.computed[chain] if self.whole else self.wanted[chain, step]
        self.to_do += int(expected) * (int(self.done[chain, step]) - done)
        self.done[chain, step] = done

    def _begin_anew(self, time: float) -> None:
        """Restart the idle time at `time` if the product had no work until then."""
        if time - self.advanced > liveness.STALLED_SECONDS and self.made:
            self.advanced = time


def _depths(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements along k of each step, and how many steps each block of C has.

    Their shapes are ``(blocks, steps)`` and ``(blocks,)``, or with 1 in place of `blocks` if all blocks are alike.

    The sums of partial blocks of C are steps too. Their few operations are not counted. All blocks of C have the same
    steps, unless a table says who multiplies what.
    """
    blocking, schedule = plan.blocking, plan.schedule
    blocks = [(i, j) for i in range(len(blocking.m)) for j in range(len(blocking.n))]
    if not isinstance(plan.grid, Owners):
        blocks = blocks[:1]
    chains = [schedule.chains((0,) * len(blocking.batch), i, j) for i, j in blocks]
    products = [[sum(blocking.k[p] for p in panels) for _, steps in made for panels in steps] for made in chains]
    tasks = np.array([len(steps) + len(made) - 1 for steps, made in zip(products, chains, strict=True)])
    depths = np.zeros((len(blocks), int(tasks.max())))
    for row, steps in zip(depths, products, strict=True):
        row[: len(steps)] = steps
    return depths, tasks
