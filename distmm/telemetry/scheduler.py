"""Scheduler plugin: tells the record of each product what happens to its tasks and its workers.

It changes nothing: `distmm.scheduler.plugin` decides what runs where. Dask logs and suppresses errors of its handlers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from dask.utils import key_split
from distributed import SchedulerPlugin
from distributed.protocol.pickle import dumps
from distributed.scheduler import Scheduler, TaskState

from distmm import units
from distmm.graph.dask_tasks import GATHERED, PlacedTask, ProductTask
from distmm.planning.plan import Plan
from distmm.scheduler.plugin import PlacementPlugin
from distmm.telemetry import dashboard, dashboard_server, metrics, task_names
from distmm.telemetry.faults import tolerated
from distmm.telemetry.heartbeats import Heartbeats
from distmm.telemetry.job_events import JOB_TOPIC
from distmm.telemetry.record import Record
from distmm.telemetry.worker import WorkerTelemetry
from distmm.worker.gpu import HEALED_TOPIC

logger = logging.getLogger(__name__)

# Number of records that are kept: page and report also show products that have ended.
KEPT = 8

# States of a task that has still to run.
TO_DO = ("waiting", "no-worker", "queued", "processing")


class Telemetry(SchedulerPlugin):
    """Keeps the records of the last products on one scheduler, by name of the product or job, the newest last."""

    name = "distmm-telemetry"
    idempotent = True

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.past: Counter[str] = Counter()  # counters of the records that were dropped (see `metrics`)
        self.names: dict[str, str] = {}  # address -> name of the worker
        self.numbers: dict[str, int] = {}  # name -> number of the worker, which determines its colour
        self.jobs: dict[str, str] = {}  # product -> the job that it is a wave of
        self.announced: dict[str, dict[str, Any]] = {}  # job without a record yet -> its "begin" message
        # Product -> unfinished tasks that check, reduce or write its blocks.
        self.unwritten: defaultdict[str, set[Hashable]] = defaultdict(set)
        self.repeating: set[object] = set()  # keys whose run ended without a result

    async def start(self, scheduler: Scheduler) -> None:
        """Start listening; add the page, the series and the plugin of the workers."""
        if scheduler.plugins.setdefault(self.name, self) is not self:
            return  # another client was first
        self.scheduler = scheduler
        for worker in scheduler.workers.values():
            self.add_worker(scheduler, worker.address)
        self.heartbeats = Heartbeats(scheduler, self.records, self._name)
        self.heartbeats.sampling.start()
        metrics.SOURCES.add(self)
        with tolerated("the page of the dashboard"):
            dashboard_server.add_page(scheduler, "distmm", dashboard.page)
        with tolerated("the list of workers for Prometheus"):
            dashboard_server.add_handler(scheduler, metrics.PATH, metrics.Targets)
        with tolerated("telemetry on workers"):
            reporter = WorkerTelemetry()
            await scheduler.register_worker_plugin(None, dumps(reporter), reporter.name, idempotent=True)

    async def close(self) -> None:
        """Stop listening."""
        self.heartbeats.sampling.stop()
        metrics.SOURCES.discard(self)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Store the worker's name, since a restart changes its address; choose its number, which sets its colour."""
        self.names[worker] = name = str(scheduler.workers[worker].name).rpartition("//")[2]
        self.numbers.setdefault(name, len(self.numbers))

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """Record the loss in the running products."""
        name = self.names.pop(worker, worker)
        self.heartbeats.forget(worker)
        for record in self.heartbeats.active(time.time()):
            # Dask has told of lost results before, so a complete product has lost none.
            if name in record.lanes and record.state not in ("complete", "cancelled"):
                record.lose(time.time(), name)

    def transition(self, key: object, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Tell the product's record of a transition of a task."""
        if finish in TO_DO:  # a task that had failed runs again
            for record in self.records.values():
                record.failures.pop(key, None)
        if finish == "processing" or (start == "memory" and finish == "released"):
            return  # most transitions: a result is released, or a task is sent to its worker
        ts = self.scheduler.tasks.get(key)
        if ts is None:
            return
        if finish == "erred":
            self._note_failure(ts)
        elif isinstance(ts.run_spec, ProductTask):
            self._note_step(ts, start, finish, **kwargs)
        else:
            self._count_unwritten(ts, finish)
            if finish == "memory" and any(self.heartbeats.active(time.time())):
                self._note_work(ts, **kwargs)

    def _note_step(self, ts: TaskState, start: str, finish: str, **kwargs: Any) -> None:
        """Tell the record of a transition of a step."""
        now, task = time.time(), ts.run_spec
        submitted = start == "released" and finish in TO_DO
        record = self._add_step(task, now) if submitted else self.records.get(self._record_key(task))
        if record is None:
            return
        chain, step = record.chain(*task.placement.chain), task.placement.step
        if finish == "memory":
            self.repeating.discard(ts.key)
            for worker, began, ended in self._runs(**kwargs):
                record.step(chain, step, worker, began, ended)
                self._note_others(units.shortened(record.title), worker, began, ended, but={record.product})
        elif start == "processing" and finish == "released":
            self.repeating.add(ts.key)
        elif submitted:
            finished = bool(record.done[chain, step])
            if finished or ts.key in self.repeating:
                record.repeat(now, chain, step, finished)
            self.repeating.discard(ts.key)
        elif finish == "forgotten":
            self.repeating.discard(ts.key)
            record.known -= 1
            if not record.done[chain, step] and not record.over:
                record.ended = "cancelled"  # no client needs its result any more

    def _runs(
        self, worker: str = "", startstops: Iterable[dict[str, Any]] | None = (), **_: Any
    ) -> list[tuple[str, float, float]]:
        """Return worker, start and stop of each run that a transition tells of."""
        return [(self._name(worker), x["start"], x["stop"]) for x in startstops or () if x["action"] == "compute"]

    def _note_work(self, ts: TaskState, **kwargs: Any) -> None:
        """Tell the records of a task that is no step: it makes a block of A or B, takes one of C, or is of others."""
        tasks, kind = task_names.served(ts)
        keys = set(map(self._record_key, tasks))
        served = [self.records[product] for product in keys & self.records.keys()]
        what = ", ".join(units.shortened(record.title) for record in served) or key_split(ts.key)
        for worker, began, ended in self._runs(**kwargs):
            for record in served:
                record.work(worker, kind, began, ended)
            self._note_others(what, worker, began, ended, but=keys)

    def _note_others(self, what: str, worker: str, start: float, stop: float, but: set[str]) -> None:
        """Tell the running products on a worker that it worked for others."""
        for product, record in self.records.items():
            if product not in but and worker in record.lanes and not record.over:
                record.work(worker, "other", start, stop, what)

    def _count_unwritten(self, ts: TaskState, finish: str) -> None:
        """Count the unfinished tasks that check, reduce or write the blocks of a product."""
        for product in set(map(self._record_key, task_names.of_product(ts))):
            if finish in TO_DO:  # may come before the first step, which opens the record
                self.unwritten[product].add(ts.key)
            elif product in self.unwritten:
                self.unwritten[product].discard(ts.key)
            if product in self.records:
                self.records[product].wait_for(time.time(), len(self.unwritten[product]))
            if not self.unwritten[product]:
                del self.unwritten[product]

    def _note_failure(self, ts: TaskState) -> None:
        """Record a failed task in its products. It may be a step, or a task that loads, checks or writes a block.

        All tasks that need the result of a failed task fail too, and name it as their cause.
        """
        now, task, cause = time.time(), ts.run_spec, ts.exception_blame or ts
        if isinstance(task, ProductTask):
            self._add_step(task, now)  # opens the record of a product none of whose steps can start
        else:
            self._count_unwritten(ts, "erred")
        for taker in task_names.of_product(ts):
            record = self.records.get(self._record_key(taker))
            if record is not None and cause.key not in record.failures:
                record.fail(now, cause.key, task_names.name(record, cause), task_names.error(cause))
                if len(record.failures) == 1:  # log one only: a lost mount fails every load
                    logger.error("product %s has failed: %s", record.title, record.failures[cause.key])

    def _add_step(self, task: ProductTask, now: float) -> Record | None:
        """Add a submitted step to its product's record, and return that; the first step opens the record.

        A product without a plan has none: in a graph that the client expanded, tasks have no plan.
        """
        product = self._record_key(task)
        record = self.records.get(product)
        if record is None or (not record.known and (record.made or record.over)):
            if task.plan is None:
                return None
            record = self._store_record(self._new_record(product, task.plan, now))
        chain, step = record.chain(*task.placement.chain), task.placement.step
        record.known += not record.wanted[chain, step]
        if not record.wanted[chain, step] or record.ended:
            placing = self.scheduler.plugins.get(PlacementPlugin.name)
            record.want(chain, step, self._name(placing.owner(task.placement)) if placing else "", now)
            record.arrays |= {task.placement.product, task.key[0]}
            for array, where in zip(task.arrays(), record.plan.operands, strict=False):  # a sum reads none
                if array is not None:
                    of_user = where == "resident" and not array.startswith(GATHERED)
                    (record.resident if of_user else record.arrays).add(array)
            if record.plan.result == "reduced":
                record.verb = record.verb or task_names.verb(task)
        return record

    def _record_key(self, task: PlacedTask) -> str:
        """Return the key of a task's record: its job, or its product."""
        return self.jobs.get(task.placement.product, task.placement.product)

    def _new_record(self, product: str, plan: Plan, now: float) -> Record:
        begin = self.announced.pop(product, {"path": "", "kept": ()})  # of a job
        kept = [i * len(plan.blocking.n) + j for i, j in begin["kept"]]
        record = Record(product, plan, now, begin["path"], kept, self.numbers)
        record.verb = begin.get("verb", "")
        if note := begin.get("note"):
            record.incidents.add(now, note)
        return record

    def log_event(self, topic: str, msg: Any) -> None:
        """Record messages of jobs (`JOB_TOPIC`), and of workers whose GPU's memory was full."""
        if topic == HEALED_TOPIC:
            self._note_healed(msg["task"], msg["worker"], msg["what"])  # Dask has added the worker's address
        if topic != JOB_TOPIC:
            return
        record = self.records.get(msg["job"])
        match msg:
            case {"event": "begin", "job": job}:
                self.announced[job] = msg
                self.past["distmm_resumes"] += bool(msg["kept"])
            case {"event": "wave", "job": job, "product": product}:
                self.jobs[product] = job
            case {"event": "failed", "job": job, "error": error}:
                if record is None:  # the job failed before its first wave
                    self.past["distmm_failures"] += 1
                    self.announced.pop(job, None)
                    self.jobs = {wave: of for wave, of in self.jobs.items() if of != job}
                elif not record.failures:
                    record.fail(time.time(), job, "job", error)
                    logger.error("job %s has failed: %s", record.title, error)
            case {"event": "accepted" | "rejected" as event, "blocks": blocks}:
                if record is not None:
                    for i, j in blocks:
                        record.check(time.time(), record.chain((), i, j), event == "accepted")
                elif event == "rejected":  # a block on disk was found wrong before the first wave
                    self.past["distmm_rejections"] += len(blocks)

    def _note_healed(self, task: Hashable, address: str, what: str) -> None:
        """Record that a task ran again because a GPU's memory was full, except loads: their product is unknown."""
        ts = self.scheduler.tasks.get(task)
        text = f"the GPU's memory was full on worker {self._name(address)}: {what} ran again, alone"
        for of in task_names.of_product(ts) if ts is not None else ():
            if record := self.records.get(self._record_key(of)):
                record.incidents.add(time.time(), text)

    def readings(self) -> Iterator[metrics.Reading]:
        """Return the scheduler's Prometheus series."""
        now, beats = time.time(), self.heartbeats
        for name in self.numbers:
            yield "distmm_silences", name, beats.silences[name]
            yield "distmm_silent_seconds", name, now - beats.silent.get(name, now)
        yield from metrics.of_records(list(self.records.values()), self.past)

    def _store_record(self, record: Record) -> Record:
        # A product that is computed again gets a new record at the end of the dictionary.
        outdated = [product for product in self.records if product == record.product] or list(self.records)[: 1 - KEPT]
        for product in outdated:
            self.past.update(metrics.counts(self.records.pop(product)))
            self.jobs = {wave: job for wave, job in self.jobs.items() if job != product}
        self.heartbeats.read()
        self.records[record.product] = record
        record.wait_for(record.submitted, len(self.unwritten.get(record.product, ())))
        return record

    def _name(self, address: str) -> str:
        return self.names.get(address, address.rpartition("//")[2])
