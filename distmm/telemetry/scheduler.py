"""Scheduler plugin: turns the transitions of products' tasks into events, and keeps the record of each product.

It changes nothing: `distmm.scheduler.plugin` decides what runs where. Dask logs and suppresses errors of its handlers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from distributed import SchedulerPlugin
from distributed.protocol.pickle import dumps
from distributed.scheduler import Scheduler, TaskState

from distmm.graph.dask_tasks import PlacedTask, ProductTask, stores
from distmm.planning.plan import Plan
from distmm.scheduler.plugin import PlacementPlugin
from distmm.telemetry import dashboard, failed_tasks, metrics, prometheus_targets
from distmm.telemetry.events import (
    JOB_TOPIC,
    Access,
    Again,
    Checked,
    Dropped,
    Failed,
    Noted,
    Retried,
    StepRun,
    Unwritten,
    WorkerLeft,
)
from distmm.telemetry.faults import tolerated
from distmm.telemetry.heartbeats import Heartbeats
from distmm.telemetry.record import Figures, Record
from distmm.telemetry.worker import WorkerTelemetry
from distmm.worker.gpu import HEALED_TOPIC

__all__ = ["Telemetry"]

logger = logging.getLogger(__name__)

# Number of records that are kept: page and report also show products that have ended.
KEPT = 8

# States of a task that has still to run.
TO_DO = ("waiting", "no-worker", "queued", "processing")


class Telemetry(SchedulerPlugin):
    """Keeps the records of the last products on one scheduler.

    Attributes
    ----------
    records : dict
        Records by name of the product or job, the newest last.
    """

    name = "distmm-telemetry"
    idempotent = True

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.past: Counter[str] = Counter()  # counters of the records that were dropped (see `metrics`)
        self.names: dict[str, str] = {}  # address -> name of the worker
        self.numbers: dict[str, int] = {}  # name -> number of the worker, which determines its colour
        self.known: Counter[str] = Counter()  # product -> number of tasks that the scheduler knows
        self.arrays: defaultdict[str, set[str]] = defaultdict(set)  # product -> names of the arrays that it reads
        self.readers: dict[str, str] = {}  # array -> the last product that reads it
        self.jobs: dict[str, str] = {}  # product -> the job that it is a wave of
        self.begin_messages: dict[str, dict[str, Any]] = {}  # job -> its "begin" message
        # Product -> unfinished tasks that check, reduce or write its blocks.
        self.unwritten: defaultdict[str, set[Hashable]] = defaultdict(set)
        self.causes: defaultdict[Hashable, set[str]] = defaultdict(set)  # failed task -> products that failed with it
        self.repeating: set[object] = set()  # keys whose run ended without a result

    async def start(self, scheduler: Scheduler) -> None:
        """Start listening; add the page, the series and the plugin of the workers."""
        if scheduler.plugins.setdefault(self.name, self) is not self:
            return  # another client was first
        self.scheduler = scheduler
        for worker in scheduler.workers.values():
            self.add_worker(scheduler, worker.address)
        self.heartbeats = Heartbeats(scheduler, self.records, self.arrays, self._name)
        self.heartbeats.start()
        with tolerated("/metrics of the scheduler"):
            metrics.expose(self)
        with tolerated("the page of the dashboard"):
            dashboard.install(scheduler)
        with tolerated("the list of workers for Prometheus"):
            prometheus_targets.install(scheduler)
        with tolerated("telemetry on workers"):
            reporter = WorkerTelemetry()
            await scheduler.register_worker_plugin(None, dumps(reporter), reporter.name, idempotent=True)

    async def close(self) -> None:
        """Stop listening."""
        self.heartbeats.stop()
        metrics.withdraw(self)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Store the worker's name, since a restart changes its address; choose its number, which sets its colour."""
        name = str(scheduler.workers[worker].name)
        self.names[worker] = name = name.rpartition("//")[2]
        if name not in self.numbers:
            known = {*self.names.values(), *(lane for record in self.records.values() for lane in record.lanes)}
            for gone in self.numbers.keys() - known:
                del self.numbers[gone]
            self.numbers[name] = min(set(range(len(self.numbers) + 1)) - set(self.numbers.values()))

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """Record the loss in the running products."""
        name = self.names.pop(worker, worker)
        self.heartbeats.forget(worker)
        for record in self.heartbeats.active(time.time()):
            if name in record.lanes:
                record.add(WorkerLeft(time.time(), name))

    def transition(self, key: object, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Add the event for a transition of a task to the product's record."""
        if self.causes and key in self.causes and finish in (*TO_DO, "forgotten"):
            self._note_retry(key, finish)
        if finish == "processing" or (start == "memory" and finish == "released"):
            return  # most transitions: a result is released, or a task is sent to its worker
        ts = self.scheduler.tasks.get(key)
        if ts is None:
            return
        if finish == "erred":
            self._note_failure(ts)
            return
        if not isinstance(ts.run_spec, ProductTask):
            self._count_unwritten(ts, finish)
            if finish == "memory":
                self._note_access(ts, **kwargs)
            return
        now, task = time.time(), ts.run_spec
        found = self._add_step(task, now) if start == "released" and finish in TO_DO else None
        if found is None and (record := self.records.get(self._record_key(task))):
            found = (record, *_place(record, task))
        if found is None:
            return
        record, chain, step = found
        if finish == "memory":
            self.repeating.discard(key)
            for entry in kwargs.get("startstops") or ():
                if entry["action"] == "compute":
                    record.add(StepRun(chain, step, self._name(kwargs["worker"]), entry["start"], entry["stop"]))
        elif start == "processing" and finish == "released":
            self.repeating.add(key)
        elif start == "released" and finish in TO_DO:
            finished = bool(record.done[chain, step])
            if finished or key in self.repeating:
                record.add(Again(now, chain, step, finished))
            self.repeating.discard(key)
        elif finish == "forgotten":
            self.repeating.discard(key)
            self.known[record.product] -= 1
            if not record.done[chain, step] and not record.over:
                record.add(Dropped(now, chain, step))

    def _products(self, ts: TaskState) -> set[str]:
        """Return the products of a task of distmm, or of a task of Dask that writes their blocks."""
        if isinstance(ts.run_spec, PlacedTask):
            return {self._record_key(ts.run_spec)}
        if stores(ts.key):
            return {self._record_key(of.run_spec) for of in ts.dependencies if isinstance(of.run_spec, ProductTask)}
        return set()

    def _count_unwritten(self, ts: TaskState, finish: str) -> None:
        """Count the unfinished tasks that check, reduce or write the blocks of a product."""
        for product in self._products(ts):
            if finish in TO_DO:  # may come before the first step, which opens the record
                self.unwritten[product].add(ts.key)
            elif product in self.unwritten:
                self.unwritten[product].discard(ts.key)
            if product in self.records:
                self.records[product].add(Unwritten(time.time(), len(self.unwritten[product])))
            if not self.unwritten[product]:
                del self.unwritten[product]

    def _note_access(
        self, ts: TaskState, worker: str = "", startstops: Iterable[dict[str, Any]] | None = (), **_: Any
    ) -> None:
        """Record that a worker read a block of A or B, or checked and wrote a block of C."""
        products = self._products(ts)
        writes = bool(products)
        if not writes and isinstance(ts.key, tuple) and ts.key[0] in self.readers:
            products = {self.readers[ts.key[0]]}
        for product in products:
            if record := self.records.get(product):
                for entry in startstops or ():
                    if entry["action"] == "compute":
                        record.add(Access(self._name(worker), writes, entry["start"], entry["stop"]))

    def _note_failure(self, ts: TaskState) -> None:
        """Record a failed task in its products. It may be a step, or a task that loads, checks or writes a block.

        All tasks that need the result of a failed task fail too, and name it as their cause.
        """
        now, task, cause = time.time(), ts.run_spec, ts.exception_blame or ts
        if isinstance(task, ProductTask):
            self._add_step(task, now)  # opens the record of a product none of whose steps can start
        else:
            self._count_unwritten(ts, "erred")
        for product in self._products(ts) & self.records.keys():
            record = self.records[product]
            if cause.key not in record.failures:
                record.add(Failed(now, cause.key, failed_tasks.name(record, cause), failed_tasks.error(cause)))
                if len(record.failures) == 1:  # log one only: a lost mount fails every load
                    logger.error("product %s has failed: %s", record.title, record.failures[cause.key])
                self.causes[cause.key].add(product)

    def _note_retry(self, key: Hashable, finish: str) -> None:
        """Record that a failed task will run again, unless it is forgotten."""
        for product in self.causes.pop(key):
            if finish != "forgotten" and product in self.records:
                self.records[product].add(Retried(time.time(), key))

    def _add_step(self, task: ProductTask, now: float) -> tuple[Record, int, int] | None:
        """Add a submitted step to its product's record; the first step opens the record.

        Returns the record with the numbers of the chain and of the step; None if the product has no plan.
        """
        product = self._record_key(task)
        record = self.records.get(product)
        if record is None or (not self.known[product] and (record.made or record.over)):
            if task.plan is None:  # in a graph that the client expanded, tasks have no plan
                return None
            record = self._store_record(self._new_record(product, task.plan, now))
        chain, step = _place(record, task)
        self.known[product] += not record.wanted[chain, step]
        if not record.wanted[chain, step] or record.ended:
            record.want(chain, step, self._owner(task), now)
            arrays = self.arrays[product]
            if task.placement.product not in arrays:
                operands = {operand[0] for operand in task.operands()}
                arrays |= {task.placement.product, *operands}
                self.readers |= dict.fromkeys(operands, product)
            arrays.add(task.key[0])
        return record, chain, step

    def _record_key(self, task: PlacedTask) -> str:
        """Return the key of the record that a task belongs to: its job, or its product."""
        return self.jobs.get(task.placement.product, task.placement.product)

    def _new_record(self, product: str, plan: Plan, now: float) -> Record:
        begin = self.begin_messages.pop(product, None)
        if begin is None:
            return Record(product, plan, now, numbers=self.numbers)
        columns = len(plan.blocking.n)
        kept = [i * columns + j for i, j in begin["kept"]]
        record = Record(product, plan, now, begin["path"], kept, self.numbers)
        if note := begin.get("note"):
            record.add(Noted(now, note))
        return record

    def _owner(self, task: ProductTask) -> str:
        """Return the name of the worker that will run a task."""
        placing = self.scheduler.plugins.get(PlacementPlugin.name)
        ranks = placing.ranks if placing else ()
        return self._name(ranks[task.placement.rank % len(ranks)]) if ranks else ""

    def log_event(self, topic: str, msg: Any) -> None:
        """Record messages of jobs (`distmm.telemetry.events.JOB_TOPIC`), and of workers whose GPU's memory was full."""
        if topic == HEALED_TOPIC:
            self._note_healed(msg["task"], msg["worker"], msg["what"])  # Dask has added the worker's address
        if topic != JOB_TOPIC:
            return
        match msg:
            case {"event": "begin", "job": job}:
                self.begin_messages[job] = msg
                self.past["distmm_resumes"] += bool(msg["kept"])
            case {"event": "wave", "job": job, "product": product}:
                self.jobs[product] = job
            case {"event": "failed", "job": job, "error": error}:
                record = self.records.get(job)
                if record is None:  # the job failed before its first wave
                    self.past["distmm_failures"] += 1
                    self.begin_messages.pop(job, None)
                    self.jobs = {wave: of for wave, of in self.jobs.items() if of != job}
                elif not record.failures:
                    record.add(Failed(time.time(), job, "job", error))
                    logger.error("job %s has failed: %s", record.title, error)
            case {"event": "certified" | "certificate-failure" as event, "job": job, "blocks": blocks}:
                if record := self.records.get(job):
                    for i, j in blocks:
                        record.add(Checked(time.time(), record.chain((), i, j), event == "certified"))
                elif event == "certificate-failure":  # a block on disk was found wrong before the first wave
                    self.past["distmm_certificate_failures"] += len(blocks)

    def _note_healed(self, task: Hashable, address: str, what: str) -> None:
        """Record that a task ran again because a GPU's memory was full, except loads: their product is unknown."""
        ts = self.scheduler.tasks.get(task)
        for product in self._products(ts) & self.records.keys() if ts is not None else ():
            text = f"the GPU's memory was full on worker {self._name(address)}: {what} ran again, alone"
            self.records[product].add(Noted(time.time(), text))

    def figures(self, product: str) -> Figures | None:
        """Return the progress of a product; None if it has no record."""
        record = self.records.get(product)
        return record.figures(time.time()) if record else None

    def readings(self) -> Iterator[metrics.Reading]:
        """Return the scheduler's Prometheus series."""
        return metrics.of_records(list(self.records.values()), self.past)

    def _store_record(self, record: Record) -> Record:
        # The plan does not count blocks from before the product, such as resident operands.
        record.before = {self._name(ws.address): ws.nbytes for ws in self.scheduler.workers.values()}
        # A product that is computed again gets a new record at the end of the dictionary.
        outdated = [product for product in self.records if product == record.product] or list(self.records)[: 1 - KEPT]
        for product in outdated:
            self.past.update(metrics.counts(self.records.pop(product)))
            self.arrays.pop(product, None)
            self.known.pop(product, None)
            self.jobs = {wave: job for wave, job in self.jobs.items() if job != product}
            self.readers = {array: reader for array, reader in self.readers.items() if reader != product}
        self.heartbeats.read()
        self.records[record.product] = record
        record.add(Unwritten(record.submitted, len(self.unwritten.get(record.product, ()))))
        return record

    def _name(self, address: str) -> str:
        return self.names.get(address, address.rpartition("//")[2])


def _place(record: Record, task: ProductTask) -> tuple[int, int]:
    """Return chain and step of a task."""
    return record.chain(*task.placement.chain), task.placement.step
