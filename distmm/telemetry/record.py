"""The record of a product: what has happened to it. Pure, and small enough to send from scheduler to client.

The scheduler's plugin (`distmm.telemetry.scheduler`) calls its methods. Page, Prometheus, terminal and report show it.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from functools import reduce

import numpy as np

from distmm import units
from distmm.planning.plan import Plan
from distmm.telemetry import theme
from distmm.telemetry.activity import Activity, Incident, Incidents, Kind, Lane
from distmm.telemetry.figures import STALLED_SECONDS, Figures
from distmm.telemetry.time_left import Pace

# Most activities that are kept for the timeline. They take 30 MB. Plans have far fewer tasks.
MOST_ACTIVITIES = 250_000


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
    verb : str
        What is done with C: "topk", "nearest", "threshold"; empty where it is C that is wanted.
    arrays, resident : set of str
        Names of the arrays that the product makes and reads, without operands that were in memory before; and those.
    known : int
        Number of its steps that the scheduler knows.
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
        self.verb = ""
        self.arrays, self.resident, self.known = {product}, set[str](), 0
        self.whole = bool(title) or len(plan.waves) > 1  # the graph of later waves arrives later
        b = plan.blocking
        self.grid = tuple(map(len, (*b.batch, b.m, b.n)))
        *self.batches, self.rows, self.columns = self.grid
        depths, self.steps_of = plan.schedule.depths()  # the second: number of steps of each chain, or one for all
        self.chains, self.steps = b.c_blocks, depths.shape[1]
        # The chain that makes each block: for one above the diagonal of a symmetric product, that of its mirror image.
        self.source = np.arange(self.chains)
        if b.triangle:
            matrices = self.source.reshape(-1, self.rows, self.columns)
            self.source = np.where(np.tri(self.rows, dtype=bool), matrices, matrices.swapaxes(1, 2)).ravel()
        self.mirrored = np.not_equal(self.source, np.arange(self.chains))  # of each block: whether it is such an image
        self.done, self.wanted = (np.zeros((self.chains, self.steps), dtype=bool) for _ in range(2))
        self.again = np.zeros(self.chains, dtype=np.int32)
        self.resumed = np.zeros(self.chains, dtype=bool)
        self.resumed[list(kept)] = True
        self.computed = ~self.resumed & ~self.mirrored  # chains with tasks
        self.count = int((self.computed * self.steps_of).sum()) if self.whole else 0  # expected steps
        self.to_do = self.count  # those of them that are not done; counted, since every event and sample may ask for it
        self.certified, self.refuted = (np.zeros(self.chains, dtype=bool) for _ in range(2))  # by its last check
        self.rejections = np.zeros(self.chains, dtype=np.int32)
        self.interrupted = 0  # runs of steps that ended without a result and are repeated
        self.unwritten = 0  # submitted tasks that check, reduce or write blocks and have not finished
        self.failed = 0  # tasks that failed, also if a client had them run again
        self.failures: dict[Hashable, str] = {}  # key of each failed task that does not run again -> its error
        self.owners: list[str] = [""] * self.chains
        self.lanes: dict[str, Lane] = {}
        self.numbers = {} if numbers is None else numbers
        self.activities: deque[Activity] = deque(maxlen=MOST_ACTIVITIES)
        self.transfers: list[Activity] = []  # `distmm.telemetry.client.read` asks the workers for them
        self.others: defaultdict[str, float] = defaultdict(float)  # seconds of tasks of others on the product's workers
        self.incidents, self.silence = Incidents(), dict[str, Incident]()  # the second: of workers that are silent now
        self.seen: Mapping[str, float] | None = None  # last heartbeat of each worker of the cluster
        self.advanced = submitted  # time of the last step, check or write
        self.pace: Pace | None = None  # of operations, repeated ones included; None before the first step
        self.ends = np.zeros(self.chains)  # end of the last step of each chain so far
        self.afterwards = 0.0  # recent seconds from the last step of a chain until its block is checked and written
        self.ended: str = ""  # state of a product that ended without being complete
        elements = reduce(np.multiply.outer, map(np.array, (*b.batch, b.m, b.n)))
        self.step_flops = elements.reshape(-1, 1) * depths * (plan.problem.element_flops / max(1, plan.problem.k))

    def chain(self, batch: tuple[int, ...], i: int, j: int) -> int:
        """Return the index of the chain of block ``C[*batch, i, j]``."""
        return int(np.ravel_multi_index((*batch, i, j), self.grid))

    def block(self, chain: int) -> str:
        """Return the name of a chain's block, as in ``C[0, 3]``."""
        return f"C[{', '.join(str(int(x)) for x in np.unravel_index(chain, self.grid))}]"

    def lane(self, worker: str) -> Lane:
        """Return the totals of a worker; a new worker gets new ones."""
        return self.lanes.setdefault(worker, Lane())

    def color(self, worker: str) -> str:
        """Return the colour of a worker: by its number, the same in all figures; grey while it is silent."""
        if (lane := self.lanes.get(worker)) is not None and lane.silent_since is not None:
            return theme.NOBODY
        return theme.WORKERS[self.numbers.setdefault(worker, len(self.numbers)) % len(theme.WORKERS)]

    @property
    def shape(self) -> str:
        """What is computed, as text: shapes and type of the product, and what is done with it."""
        return f"{self.verb} of " * bool(self.verb) + self.plan.rows()[0][1].rpartition(", ")[0]

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
        return Figures(self, now)

    def end(self, now: float) -> float:
        """Return when the last step, check or write of an ended product was; `now` for a running one."""
        return self.advanced if self.over else now

    @property
    def over(self) -> bool:
        """Whether the product has ended: complete, failed or cancelled."""
        return bool(self.failures) or self.complete or bool(self.ended)

    @property
    def state(self) -> str:
        """State without regard to the time: see `Figures`."""
        if self.failures:
            return "failed"
        return "complete" if self.complete else self.ended or ("running" if self.pace else "waiting")

    def step(self, chain: int, step: int, worker: str, start: float, stop: float) -> None:
        """Add a run of a step of a chain on a worker."""
        flops, lane = float(self.step_flops[chain, step]), self.lane(worker)
        lane.step(start, stop, flops)
        self.activities.append(Activity(worker, "multiply", start, stop))
        self._set_done(chain, step, True)
        self.owners[chain] = worker
        self.advanced = max(self.advanced, stop)
        self.ends[chain] = max(self.ends[chain], stop)
        self.pace = self.pace or Pace(start)
        self.pace.times[0] = min(self.pace.times[0], start)  # a step may begin earlier and end later than another
        self.pace.add(stop, flops)

    def work(self, worker: str, kind: Kind, start: float, stop: float, what: str = "") -> None:
        """Add a task that is no step, on a worker. `what` names a task of others, as people know it."""
        lane, start = self.lane(worker), min(stop, max(start, self.submitted))
        seconds = stop - start - lane.asleep(start, stop)
        lane.seconds[kind] += seconds
        if kind == "other":
            self.others[what] += seconds
        else:
            self.activities.append(Activity(worker, kind, start, stop))

    def repeat(self, time: float, chain: int, step: int, finished: bool) -> None:
        """Note that a step runs again: it was `finished` and a worker was lost with its result, or its run had none."""
        self._begin_anew(time)
        self._set_done(chain, step, False)
        self.again[chain] += finished
        self.interrupted += not finished
        self.incidents.add(time, "step lost, computed again" if finished else "run interrupted, repeated")

    def fall_silent(self, worker: str, since: float) -> None:
        """Note that a worker has sent no heartbeat for too long. What it did since the last one is nobody's work."""
        lane = self.lane(worker)
        if lane.silent_since is None:
            lane.silences.append((since, math.inf))
            self.silence[worker] = self.incidents.add(since, f"{self.named(worker)} is silent")

    def wake(self, worker: str, time: float) -> None:
        """Note that a silent worker sends heartbeats again, or has left the cluster."""
        lane = self.lane(worker)
        if (since := lane.silent_since) is not None:
            lane.silences[-1] = since, time
            self.silence.pop(worker).what = f"{self.named(worker)} was silent {units.span(since, time)}"

    def lose(self, time: float, worker: str) -> None:
        """Note that a worker left the cluster while the product ran."""
        self.wake(worker, time)
        lane = self.lane(worker)
        lane.lost = lane.lost or time
        self.incidents.add(time, f"worker {worker} lost")

    def named(self, worker: str) -> str:
        """Return a worker's name with that of its host, if it is known."""
        host = self.lane(worker).host
        return f"worker {worker}{f' on {host}' if host else ''}"

    def fail(self, time: float, cause: Hashable, what: str, error: str) -> None:
        """Note that a task failed after all retries: a step, a load, a check or a write. The product fails too.

        `cause` is the key of the task, `what` names it for people. Several failures of the same cause count as one: all
        steps that need a block fail with the task that loads it.
        """
        if cause not in self.failures:
            self.failed += 1
            self.failures[cause] = f"{what}: {error}"
            self.incidents.add(time, self.failures[cause])

    def wait_for(self, time: float, tasks: int) -> None:
        """Set how many submitted tasks that check, reduce or write blocks of C have not finished."""
        self.unwritten, self.advanced = tasks, max(self.advanced, time)

    def check(self, time: float, chain: int, passed: bool) -> None:
        """Add the check of the block of a chain by a job."""
        self.certified[chain], self.refuted[chain] = passed, not passed
        self.advanced = max(self.advanced, time)
        self.rejections[chain] += not passed
        if self.ends[chain]:
            after = max(0.0, time - self.ends[chain])
            self.afterwards = (self.afterwards + after) / 2 if self.afterwards else after
        if not passed:
            self.incidents.add(time, f"{self.block(chain)} failed its check")

    def _set_done(self, chain: int, step: int, done: bool) -> None:
        expected = self.computed[chain] if self.whole else self.wanted[chain, step]
        self.to_do += int(expected) * (int(self.done[chain, step]) - done)
        self.done[chain, step] = done

    def _begin_anew(self, time: float) -> None:
        """Restart the idle time at `time` if the product had no work until then."""
        if time - self.advanced > STALLED_SECONDS and self.made:
            self.advanced = time
