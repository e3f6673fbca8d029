"""Scheduler plugin: turns what happens to products into events, and keeps the record of each product.

It only listens: `distmm.scheduler.plugin` decides what runs where. Dask logs what its handlers raise and goes on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from dask.utils import key_split
from distributed import SchedulerPlugin
from distributed.protocol.pickle import dumps, loads
from distributed.scheduler import Scheduler, TaskState
from tornado.ioloop import PeriodicCallback

from distmm.graph.dask_tasks import PlacedTask, ProductTask, stores
from distmm.planning.plan import Plan
from distmm.scheduler.plugin import PlacementPlugin
from distmm.telemetry import dashboard, metrics, prometheus_targets
from distmm.telemetry.events import (
    JOB_TOPIC,
    Access,
    Again,
    Checked,
    Device,
    Dropped,
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
from distmm.telemetry.faults import tolerated
from distmm.telemetry.record import Figures, Record
from distmm.telemetry.worker import METRIC, WorkerTelemetry
from distmm.worker.gpu import HEALED_TOPIC

__all__ = ["Telemetry"]

logger = logging.getLogger(__name__)

# Products whose records are kept: the page and the report want the last ones after they are done.
KEPT = 8

# Milliseconds between two looks at the workers' heartbeats, which come every half second at most.
SAMPLE_MILLISECONDS = 500

# Seconds for which a finished product is still sampled: heartbeats of 256 workers come every 2.3 s.
LINGER_SECONDS = 10.0

# Letters of an error that are kept: a path and what is wrong with it.
LONGEST_ERROR = 400

# States of a task that is to be done.
TO_DO = ("waiting", "no-worker", "queued", "processing")


class Telemetry(SchedulerPlugin):
    """The records of the last products on one scheduler, the newest last.

    Attributes
    ----------
    records : dict
        By product, or by job.
    """

    name = "distmm-telemetry"
    idempotent = True

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.past: Counter[str] = Counter()  # what the records that are gone had counted (see `metrics`)
        self.names: dict[str, str] = {}  # address -> name of the worker
        self.numbers: dict[str, int] = {}  # name -> number of the worker, which its colour follows
        self.known: Counter[str] = Counter()  # product -> tasks that the scheduler knows
        self.arrays: defaultdict[str, set[str]] = defaultdict(set)  # product -> names of the arrays that it reads
        self.readers: dict[str, str] = {}  # array -> the last product that reads it
        self.jobs: dict[str, str] = {}  # product -> the job that it is a wave of
        self.begun: dict[str, dict[str, Any]] = {}  # job -> what it said when it began
        # Product -> tasks that are still to judge, reduce or write its blocks.
        self.unwritten: defaultdict[str, set[Hashable]] = defaultdict(set)
        self.causes: defaultdict[Hashable, set[str]] = defaultdict(set)  # task that has failed -> products it ended
        self.repeating: set[object] = set()  # keys whose run ended without a result
        self.received: dict[tuple[str, str], int] = {}  # (worker, array) -> bytes at the last heartbeat

    async def start(self, scheduler: Scheduler) -> None:
        """Listen; show the page and the series; have each worker report what only it knows."""
        if scheduler.plugins.setdefault(self.name, self) is not self:
            return  # two clients asked at once
        self.scheduler = scheduler
        for worker in scheduler.workers.values():
            self.add_worker(scheduler, worker.address)
        self._sampling = PeriodicCallback(self._sample, SAMPLE_MILLISECONDS)
        self._sampling.start()
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
        self._sampling.stop()
        metrics.withdraw(self)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Remember the worker's name: its address says nothing to people, and changes when it is restarted."""
        name = str(scheduler.workers[worker].name)
        self.names[worker] = name = name.rpartition("//")[2]
        if name not in self.numbers:
            known = {*self.names.values(), *(lane for record in self.records.values() for lane in record.lanes)}
            for gone in self.numbers.keys() - known:
                del self.numbers[gone]
            self.numbers[name] = min(set(range(len(self.numbers) + 1)) - set(self.numbers.values()))

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """Note the loss in the products that are under way."""
        name = self.names.pop(worker, worker)
        self.received = {key: total for key, total in self.received.items() if key[0] != worker}
        for record in self.active(time.time()):
            if name in record.lanes:
                record.add(WorkerLeft(time.time(), name))

    def transition(self, key: object, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Say what a change of a product task's state means."""
        if self.causes and key in self.causes and finish in (*TO_DO, "forgotten"):
            self._another_try(key, finish)
        if finish == "processing" or (start == "memory" and finish == "released"):
            return  # a result that is let go, a task that is sent to its worker: most transitions
        ts = self.scheduler.tasks.get(key)
        if ts is None:
            return
        if finish == "erred":
            self._fail(ts)
            return
        if not isinstance(ts.run_spec, ProductTask):
            self._follow(ts, finish)
            if finish == "memory":
                self._note_access(ts, **kwargs)
            return
        now, task = time.time(), ts.run_spec
        record = self._wanted(task, now) if start == "released" and finish in TO_DO else None
        record = record or self.records.get(self._key(task))
        if record is None:
            return
        chain, step = _place(record, task)
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
        """Products that a task belongs to: one of their own, or one of Dask's that writes their blocks."""
        if isinstance(ts.run_spec, PlacedTask):
            return {self._key(ts.run_spec)}
        if stores(ts.key):
            return {self._key(of.run_spec) for of in ts.dependencies if isinstance(of.run_spec, ProductTask)}
        return set()

    def _follow(self, ts: TaskState, finish: str) -> None:
        """Count the tasks that are still to judge, reduce or write the blocks of a product."""
        for product in self._products(ts):
            if finish in TO_DO:  # before the first step, which opens the record
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
        """Note who read a block of A or B, or judged and wrote a block of C, and when."""
        products = self._products(ts)
        writes = bool(products)
        if not writes and isinstance(ts.key, tuple) and ts.key[0] in self.readers:
            products = {self.readers[ts.key[0]]}
        for product in products:
            if record := self.records.get(product):
                for entry in startstops or ():
                    if entry["action"] == "compute":
                        record.add(Access(self._name(worker), writes, entry["start"], entry["stop"]))

    def _fail(self, ts: TaskState) -> None:
        """Tell the products that end with a task why: their own steps, and what loads, judges and writes their blocks.

        All tasks that need the result of one that has failed fail with it.
        """
        now, task, cause = time.time(), ts.run_spec, ts.exception_blame or ts
        if isinstance(task, ProductTask):
            self._wanted(task, now)  # a graph that needs what has failed before never begins
        else:
            self._follow(ts, "erred")
        for product in self._products(ts) & self.records.keys():
            record = self.records[product]
            if cause.key not in record.failures:
                record.add(Failed(now, cause.key, _described(record, cause), _error(cause)))
                if len(record.failures) == 1:  # a lost mount fails every load
                    logger.error("product %s has failed: %s", record.title, record.failures[cause.key])
                self.causes[cause.key].add(product)

    def _another_try(self, key: Hashable, finish: str) -> None:
        """Note that a task which had failed is to run again; one that is forgotten will not."""
        for product in self.causes.pop(key):
            if finish != "forgotten" and product in self.records:
                self.records[product].add(Retried(time.time(), key))

    def _wanted(self, task: ProductTask, now: float) -> Record | None:
        """Note that a step is to be done; open the record of its product with the first one."""
        product = self._key(task)
        record = self.records.get(product)
        if record is None or (not self.known[product] and (record.made or record.over)):
            if task.plan is None:  # a graph that the client has expanded: its tasks know no plan
                return None
            record = self._open(self._new(product, task.plan, now))
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
        return record

    def _key(self, task: PlacedTask) -> str:
        """Name of the record that a task belongs to."""
        return self.jobs.get(task.placement.product, task.placement.product)

    def _new(self, product: str, plan: Plan, now: float) -> Record:
        begun = self.begun.pop(product, None)
        if begun is None:
            return Record(product, plan, now, numbers=self.numbers)
        columns = len(plan.blocking.n)
        kept = [i * columns + j for i, j in begun["kept"]]
        record = Record(product, plan, now, begun["path"], kept, self.numbers)
        if note := begun.get("note"):
            record.add(Noted(now, note))
        return record

    def _owner(self, task: ProductTask) -> str:
        """Name of the worker that is to run a task."""
        placing = self.scheduler.plugins.get(PlacementPlugin.name)
        ranks = placing.ranks if placing else ()
        return self._name(ranks[task.placement.rank % len(ranks)]) if ranks else ""

    def log_event(self, topic: str, msg: Any) -> None:
        """Take what a job says of itself (`distmm.telemetry.events.JOB_TOPIC`), and a worker of a GPU that was full."""
        if topic == HEALED_TOPIC:
            self._note_healed(msg["task"], msg["worker"], msg["what"])  # Dask has added the worker's address
        if topic != JOB_TOPIC:
            return
        match msg:
            case {"event": "begin", "job": job}:
                self.begun[job] = msg
                self.past["distmm_resumes"] += bool(msg["kept"])
            case {"event": "wave", "job": job, "product": product}:
                self.jobs[product] = job
            case {"event": "failed", "job": job, "error": error}:
                record = self.records.get(job)
                if record is None:  # before its first wave
                    self.past["distmm_failures"] += 1
                elif not record.failures:
                    record.add(Failed(time.time(), job, "job", error))
                    logger.error("job %s has failed: %s", record.title, error)
            case {"event": "certified" | "certificate-failure" as event, "job": job, "blocks": blocks}:
                if record := self.records.get(job):
                    for i, j in blocks:
                        record.add(Checked(time.time(), record.chain((), i, j), event == "certified"))
                elif event == "certificate-failure":  # a block on disk, found before the job goes on
                    self.past["distmm_certificate_failures"] += len(blocks)

    def _note_healed(self, task: Hashable, address: str, what: str) -> None:
        """Note that a GPU's memory was full, and a task had to be tried again; of loads it is not known for whom."""
        ts = self.scheduler.tasks.get(task)
        for product in self._products(ts) & self.records.keys() if ts is not None else ():
            text = f"the GPU's memory was full on worker {self._name(address)}: {what} was made at another try, alone"
            self.records[product].add(Noted(time.time(), text))

    def take(self, address: str, heartbeat: dict[str, Any]) -> None:
        """Take what a worker says of itself into the records of the products under way.

        It says how many bytes of each array it has received since it started. What is new goes to the newest product
        under way that uses the array.
        """
        ws, now = self.scheduler.workers.get(address), time.time()
        if ws is None or not heartbeat:
            return
        received: Counter[str] = Counter()
        active = list(self.active(now))
        for array, total in heartbeat["received"].items():
            before = self.received.get((address, array), 0)
            self.received[address, array] = total
            user = next((r.product for r in reversed(active) if array in self.arrays[r.product]), "")
            received[user] += total - before if total >= before else total
        device = Device(*heartbeat["device"]) if heartbeat["device"] else None
        name, process = self._name(address), ws.metrics.get("memory", 0)
        for record in active:
            if name in record.lanes or received[record.product]:
                blocks = max(0, ws.nbytes - record.before.get(name, 0))
                record.add(Sample(now, name, blocks, process, received[record.product], device))
        for array, start, stop in heartbeat.get("transfers", ()):
            for record in active:
                if array in self.arrays[record.product] and start >= record.submitted:
                    record.add(Transfer(name, start, stop))

    def figures(self, product: str) -> Figures | None:
        """How far a product is; None for one that is not known."""
        record = self.records.get(product)
        return record.figures(time.time()) if record else None

    def readings(self) -> Iterator[metrics.Reading]:
        """Return what Prometheus is told."""
        return metrics.of_records(list(self.records.values()), self.past)

    def active(self, now: float) -> Iterator[Record]:
        """Products that are not done, or that have just been: the last heartbeats are still to come."""
        for record in self.records.values():
            if not record.over or now - (record.stopped or record.submitted) < LINGER_SECONDS:
                yield record

    def _sample(self) -> None:
        for ws in list(self.scheduler.workers.values()):
            self.take(ws.address, ws.metrics.get(METRIC, {}))
        heard = Heard({self._name(ws.address): ws.last_seen for ws in self.scheduler.workers.values()})
        for record in self.active(time.time()):
            record.add(heard)

    def _open(self, record: Record) -> Record:
        # What is there already, resident operands included, is not part of what the plan counts.
        record.before = {self._name(ws.address): ws.nbytes for ws in self.scheduler.workers.values()}
        # A product that comes again under its old name starts a new record, at the end.
        outdated = [product for product in self.records if product == record.product] or list(self.records)[: 1 - KEPT]
        for product in outdated:
            self.past.update(metrics.counts(self.records.pop(product)))
            self.arrays.pop(product)
            self.known.pop(product, None)
            self.jobs = {wave: job for wave, job in self.jobs.items() if job != product}
            self.readers = {array: reader for array, reader in self.readers.items() if reader != product}
        self.records[record.product] = record
        record.add(Unwritten(record.submitted, len(self.unwritten.get(record.product, ()))))
        return record

    def _name(self, address: str) -> str:
        return self.names.get(address, address.rpartition("//")[2])


def _place(record: Record, task: ProductTask) -> tuple[int, int]:
    """Chain and step of a task."""
    where = task.placement
    return record.chain(where.batch, where.i, where.j), where.step


def _described(record: Record, cause: TaskState) -> str:
    """Name what has failed, as in ``C[0, 3], step 2`` or ``distmm-load[1, 0]``."""
    if isinstance(cause.run_spec, ProductTask):
        chain, step = _place(record, cause.run_spec)
        return f"{record.block(chain)}, step {step}"
    index = list(cause.key[1:]) if isinstance(cause.key, tuple) else ""
    return f"{key_split(cause.key)}{index}"


def _error(cause: TaskState) -> str:
    """Say why a task failed, in one line. Dask keeps no text of what failed on the scheduler, such as lost workers."""
    text = cause.exception_text
    if not text and isinstance(cause.exception, bytes):
        error = loads(cause.exception)
        text = f"{type(error).__name__}: {error}"
    return (text or "error").partition("\n")[0][:LONGEST_ERROR]
