"""The client's side of a job: submit waves, collect written blocks, have bad ones made again, stop cleanly."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any
from weakref import WeakValueDictionary

import dask
import dask.array as da
from dask.highlevelgraph import HighLevelGraph
from distributed import Client, Future, Scheduler, Worker

from distmm.all_workers import everywhere
from distmm.api.operands import Operand
from distmm.errors import Stopped, WrongResultError
from distmm.graph import layer
from distmm.job.folder import Json
from distmm.job.inputs import Seen
from distmm.job.spec import RECHUNK, Spec
from distmm.job.stop import Stop
from distmm.job.wave import Names, Writer, WritingLayer
from distmm.planning.blocks import Wave
from distmm.planning.plan import Plan
from distmm.telemetry.events import TOPIC
from distmm.telemetry.record import Figures
from distmm.telemetry.scheduler import Telemetry
from distmm.worker.tasks import Epilogue

__all__ = ["Loop", "Submitted"]

# Seconds between two looks at the futures, which tell this process by themselves that they are done, and between two
# at the cluster, each of which costs a round trip and a line in the scheduler's log.
POLL_SECONDS = 0.05
LOOK_SECONDS = 0.5

# Seconds that blocks which are complete get to reach the disk when the job stops.
GRACE_SECONDS = 60.0

# Seconds without any worker after which the job stops: a nanny needs a few to start another one.
LONELY_SECONDS = 60.0

# Times that a block is made before the product is given up as wrong.
ATTEMPTS = 3

Block = tuple[int, int]


@dataclass
class Submitted:
    """One wave on the scheduler: how many blocks it has, which are made, and the tasks that have not written theirs."""

    blocks: int
    made: set[Block] = field(default_factory=set)
    pending: set[Future] = field(default_factory=set)


class Loop:
    """Brings all `missing` blocks of C to the disk.

    Parameters
    ----------
    client : distributed.Client
    spec : Spec
    plan : Plan
    writer : Writer
    stop : Stop
    progress : callable
        Called with how far the job is, twice a second.
    """

    def __init__(
        self, client: Client, spec: Spec, plan: Plan, writer: Writer, stop: Stop, progress: Callable[[Figures], None]
    ) -> None:
        self.client, self.spec, self.plan, self.writer, self.stop = client, spec, plan, writer, stop
        self.progress = progress
        self.job = uuid.uuid4().hex[:12]
        self.seen = Seen()  # what all blocks were made from, those of earlier runs too
        self.records: dict[Block, Json] = {}  # what the writing tasks said of blocks that are on the disk
        self.rejected: list[Json] = []  # and of blocks that were not right
        self.waves: dict[str, Submitted] = {}  # by product; without those that are complete, but for the last one
        self.pending: dict[Future, tuple[Wave, Block, Submitted]] = {}
        self.futures: WeakValueDictionary[tuple[str, int, int], Future] = WeakValueDictionary()  # by product and block
        self.writing: deque[Future] = deque()  # tasks whose blocks are made
        self.news = Event()  # a block is made
        self.lonely_since: float | None = None
        self.looked = 0.0

    def run(self, missing: Iterable[Block]) -> None:
        """Compute and write the missing blocks.

        Raises
        ------
        Stopped
            If the job is to stop, or the cluster is lost; finished blocks are on the disk.
        WrongResultError
            If a block is wrong however often it is made.
        InputError, OSError
            What workers met on the disk.
        """
        missing = set(missing)
        queue = deque(_waves(self.plan, missing))
        kept = [[i, j] for _, i, j in self.plan.blocking.c_indices() if (i, j) not in missing]
        self._event("begin", path=self.writer.folder.target, kept=kept)
        self.client.subscribe_topic(self.writer.topic, self._made)
        try:
            while queue or self.pending:
                if self.stop.reason is not None:
                    raise Stopped(self.stop.reason)
                if queue and self._at_the_tail():
                    self._submit(*queue.popleft(), self.plan, self.writer)
                look = time.monotonic() - self.looked > LOOK_SECONDS
                for future in self._done(look):
                    self._take(future)
                if look:
                    self._look()
                    self.looked = time.monotonic()
                if self.pending:
                    self.news.wait(POLL_SECONDS)
                    self.news.clear()
            self._look()
        except BaseException:
            self._wind_up()
            raise
        finally:
            if self.client.status == "running":
                self.client.unsubscribe_topic(self.writer.topic)

    def _made(self, event: tuple[float, tuple[str, int, int]]) -> None:
        """Note a block that is made, and has only to be written. Runs in the client's own thread."""
        _, (product, i, j) = event
        if (wave := self.waves.get(product)) is not None:
            wave.made.add((i, j))
        if (future := self.futures.get((product, i, j))) is not None:
            self.writing.append(future)
        self.news.set()

    def _done(self, look: bool) -> Iterator[Future]:
        """Yield writing tasks that have ended: those whose blocks are made, or where one is to `look`, any.

        Some fail before their blocks are made. To look at all of them at each piece of news takes a time that grows
        with the square of the blocks: with 40,000 of them, 20 ms each time.
        """
        if look:
            yield from [future for future in self.pending if future.done()]
        for _ in range(len(self.writing)):
            future = self.writing.popleft()
            if future in self.pending and not future.done():
                self.writing.append(future)
            elif future in self.pending:
                yield future

    def _at_the_tail(self) -> bool:
        """Whether the last wave leaves workers without work: less than half of it, and a block a worker, is to come.

        Earlier, two waves would share the memory that is planned for one. The plan has room for the blocks of one wave
        that are being written while the next one begins: those before it have to be on the disk. The user's own tasks
        keep their results for as long as a wave that is known needs them: with such operands, nothing of the last wave
        may be left.
        """
        if not self.waves or not self.pending:
            return True
        *earlier, last = self.waves.values()
        if any(map(_lazy, (self.spec.a, self.spec.b, self.spec.c0))) or any(wave.pending for wave in earlier):
            return False
        to_come = min(last.blocks - len(last.made), len(last.pending))
        return to_come <= min(self.plan.cluster.workers, last.blocks // 2)

    def _submit(self, wave: Wave, blocks: tuple[Block, ...], plan: Plan, writer: Writer) -> None:
        """Send the graph of some blocks of a wave to the scheduler.

        Each wave loads matrices under new names: with the same ones, the blocks of A and B of this wave would stay in
        memory for the next one.
        """
        spec, blocking, device = self.spec, plan.blocking, plan.cluster.device
        token = uuid.uuid4().hex
        with dask.config.set(RECHUNK):
            a = spec.a.blocked((blocking.m, blocking.k), device, self.client)
            b = spec.b.blocked((blocking.k, blocking.n), device, self.client)
            c0 = None if spec.c0 is None else spec.c0.blocked((blocking.m, blocking.n), "cpu", self.client)
        product = f"distmm-matmul-{token}"
        epilogue = Epilogue(spec.dtype, "numpy", spec.alpha, spec.beta)
        choice = layer.kernel_choice(plan)
        chains = layer.build(product, plan, a, b, choice, epilogue, c0, wave=wave, run=self.job)
        names = Names(a.name, b.name, product, None if c0 is None else c0.name)
        writing = WritingLayer(f"distmm-write-{token}", names, writer, wave, blocks)
        reads = {name for name in (names.a, names.b, names.c, names.c0) if name is not None}
        layers = HighLevelGraph({**chains.layers, writing.name: writing}, {**chains.dependencies, writing.name: reads})
        submitted = Submitted(len(blocks))
        self.waves = {name: one for name, one in self.waves.items() if one.pending} | {product: submitted}
        self._event("wave", product=product)
        futures = self.client.get(layers, [writing.key(*block) for block in blocks], sync=False)
        for future, block in zip(futures, blocks, strict=True):
            self.pending[future] = wave, block, submitted
            self.futures[product, *block] = future
            submitted.pending.add(future)

    def _take(self, future: Future) -> None:
        """Take what a writing task says; a block that it rejected is made again, on another worker if there is one."""
        record = future.result()
        self.seen.add(record)
        wave, block, submitted = self.pending.pop(future)
        submitted.pending.discard(future)
        if record.pop("written"):
            self.records[block] = record
            if self.writer.tolerance is not None:
                self._event("certified", i=block[0], j=block[1])
            return
        self._event("certificate-failure", i=block[0], j=block[1])
        before = next((r for r in reversed(self.rejected) if (r["i"], r["j"]) == block), None)
        self.rejected.append(record)
        attempt = record["attempt"] + 1
        same = before is not None and before["crc32c"] == record["crc32c"]
        systematic = same and (record["residual"] is None or record["residual"] > 1)
        if attempt == ATTEMPTS or systematic:
            raise WrongResultError(_wrong(record, before if systematic else None))
        shift = attempt if self.plan.cluster.workers > 1 else 0
        moved = replace(self.plan.schedule, grid=replace(self.plan.grid, shift=shift))
        plan = replace(self.plan, schedule=moved)
        writer = replace(self.writer, plan=plan, attempt=attempt, before=record)
        self._submit(wave, (block,), plan, writer)

    def _event(self, event: str, **facts: Any) -> None:
        """Tell telemetry what the scheduler cannot see (`distmm.telemetry.events.TOPIC`)."""
        self.client.log_event(TOPIC, {"event": event, "job": self.job, **facts})

    def _look(self) -> None:
        """Report the progress; notice that the cluster is gone."""
        job = self.job

        def look(dask_scheduler: Scheduler) -> tuple[int, Figures | None]:
            return len(dask_scheduler.workers), dask_scheduler.plugins[Telemetry.name].figures(job)

        if self.client.status != "running":
            raise Stopped(f"the scheduler at {self.client.scheduler.address} is lost")
        try:
            workers, figures = self.client.run_on_scheduler(look)
        except (OSError, TimeoutError) as error:
            raise Stopped(f"the scheduler is lost ({type(error).__name__}: {error})") from error
        now = time.monotonic()
        self.lonely_since = None if workers else self.lonely_since or now
        if self.lonely_since is not None and now - self.lonely_since > LONELY_SECONDS:
            raise Stopped(f"the cluster has had no workers for {LONELY_SECONDS:.0f} s")
        if figures is not None:
            self.progress(figures)

    def _wind_up(self) -> None:
        """Let blocks that are complete reach the disk, cancel the rest, and wait until no worker runs a task."""
        if self.client.status != "running" or self.stop.at_once:
            return
        keys = [future.key for future in self.pending]

        def complete(dask_scheduler: Scheduler) -> list[Any]:
            return [
                key for key in keys if key in dask_scheduler.tasks and dask_scheduler.tasks[key].state == "processing"
            ]

        try:
            reaching = set(self.client.run_on_scheduler(complete))
            writing = [future for future in self.pending if future.key in reaching]
            self.client.cancel([future for future in self.pending if future.key not in reaching], force=True)
            deadline = time.monotonic() + GRACE_SECONDS
            while not all(future.done() for future in writing) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
            self.client.cancel(writing, force=True)
            while any(everywhere(self.client, _running).values()) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        except (OSError, TimeoutError):
            return  # the scheduler went away meanwhile, and with it the tasks


def _wrong(record: Json, before: Json | None) -> str:
    """Say what is known of a block that stays wrong; `before` is the record of an attempt with the same bits."""
    error = "differs" if record["residual"] is None else f"is {record['residual']:.2g} times its bound off"
    attempts, cause = f"after {record['attempt'] + 1} attempts", "A kernel or a bound is wrong"
    if before is not None and before["worker"] != record["worker"]:
        attempts = f"with the same bits on worker {before['worker']} of {before['host']}"
    elif before is not None:
        attempts, cause = "with the same bits twice on one worker", "A kernel, a bound or this worker is wrong"
    return (
        f"C is not A @ B: block C[{record['i']}, {record['j']}] {error} in its row {record['row']}, {attempts}, the "
        f"last one on worker {record['worker']} of {record['host']}; it is not written. {cause}: try --kernel or "
        f"--check none, and report it"
    )


def _running(dask_worker: Worker) -> int:
    """Count the tasks of this worker that have begun: cancelling stops none of them, and they may be writing."""
    return len(dask_worker.state.executing) + len(dask_worker.state.long_running)


def _waves(plan: Plan, missing: set[Block]) -> Iterable[tuple[Wave, tuple[Block, ...]]]:
    """Waves with their missing blocks, without those that are complete."""
    for wave in plan.waves:
        blocks = tuple((i, j) for _, i, j in plan.blocking.c_indices(wave) if (i, j) in missing)
        if blocks:
            yield wave, blocks


def _lazy(operand: Operand | None) -> bool:
    """Whether the blocks are made by tasks of the user's graph, whose keys are the same for every wave."""
    return operand is not None and isinstance(operand.source, da.Array) and not operand.resident
