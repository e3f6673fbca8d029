"""Scheduler plugin: states what happens to products as events, and keeps the record of each.

It only listens. Placement, priority and release are the business of `distmm.runtime.scheduler`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from distributed import SchedulerPlugin
from distributed.protocol.pickle import dumps
from distributed.scheduler import Scheduler
from tornado.ioloop import PeriodicCallback

from distmm.graph import Product
from distmm.runtime.scheduler import PlacementPlugin
from distmm.telemetry import dashboard, metrics
from distmm.telemetry.events import TOPIC, Again, Device, Dropped, Left, Note, Run, Sample, Transfer
from distmm.telemetry.record import Figures, Record
from distmm.telemetry.worker import METRIC, WorkerTelemetry

__all__ = ["Telemetry"]

# Products whose records are kept: the page and the report want the last ones after they are done.
KEPT = 8

# Milliseconds between two looks at the workers' heartbeats, which come every half second at most.
SAMPLE_MILLISECONDS = 500

# Seconds for which a finished product is still sampled: heartbeats of 256 workers come every 2.3 s.
LINGER_SECONDS = 10.0


class Telemetry(SchedulerPlugin):
    """The records of the last products on one scheduler, the newest last."""

    name = "distmm-telemetry"
    idempotent = True

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.past: Counter[str] = Counter()  # what the records that are gone had counted (see `metrics`)
        self.names: dict[str, str] = {}  # address -> name of the worker
        self.repeating: set[object] = set()  # keys whose run ended without a result

    async def start(self, scheduler: Scheduler) -> None:
        """Listen; show the page and the series; have each worker report what only it knows."""
        if scheduler.plugins.setdefault(self.name, self) is not self:
            return  # two clients asked at once
        self.scheduler = scheduler
        for worker in scheduler.workers.values():
            self.add_worker(scheduler, worker.address)
        self._sampling = PeriodicCallback(self._sample, SAMPLE_MILLISECONDS)
        self._sampling.start()
        metrics.expose(self)
        dashboard.install(scheduler)
        reporter = WorkerTelemetry()
        await scheduler.register_worker_plugin(None, dumps(reporter), reporter.name, idempotent=True)

    async def close(self) -> None:
        """Stop listening."""
        self._sampling.stop()
        metrics.withdraw(self)

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Remember the worker's name: its address says nothing to people, and changes when it is restarted."""
        name = str(scheduler.workers[worker].name)
        self.names[worker] = name.rpartition("//")[2]

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        """Note the loss in the products that are under way."""
        name = self.names.pop(worker, worker)
        for record in self.active(time.time()):
            if name in record.lanes:
                record.add(Left(time.time(), name))

    def update_graph(self, scheduler: Scheduler, *, tasks: list[object], **kwargs: Any) -> None:
        """Open the records of new products, and note which steps are wanted."""
        placing = scheduler.plugins.get(PlacementPlugin.name)
        for key in tasks:
            ts = scheduler.tasks[key]
            if not isinstance(ts.run_spec, Product) or ts.state not in ("released", "waiting"):
                continue
            where = ts.run_spec.placement
            record = self.records.get(where.product)
            if record is None or record.complete or record.ended:
                if ts.run_spec.plan is None:  # a graph that the client has expanded: its tasks know no plan
                    continue
                record = self._open(Record(where.product, ts.run_spec.plan, time.time()))
            ranks = placing.ranks if placing else []
            owner = self._name(ranks[where.rank % len(ranks)]) if ranks else ""
            record.want(record.chain(where.batch, where.i, where.j), where.step, owner)

    def transition(self, key: object, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        """Say what a change of a product task's state means."""
        ts = self.scheduler.tasks.get(key)
        if ts is None or not isinstance(ts.run_spec, Product):
            return
        where = ts.run_spec.placement
        record = self.records.get(where.product)
        if record is None:
            return
        chain, step = record.chain(where.batch, where.i, where.j), where.step
        now = time.time()
        if finish == "memory":
            self.repeating.discard(key)
            worker = self._name(kwargs.get("worker", ""))
            for event in _events(chain, step, worker, kwargs.get("startstops") or ()):
                record.add(event)
        elif start == "processing" and finish == "released":
            self.repeating.add(key)
        elif start == "released" and finish != "forgotten":
            finished = bool(record.done[chain, step])
            if finished or key in self.repeating:
                record.add(Again(now, chain, step, finished))
            self.repeating.discard(key)
        elif start == "processing" and finish == "erred":
            record.add(Dropped(now, chain, step, (ts.exception_text or "error").splitlines()[0]))
        elif finish == "forgotten":
            self.repeating.discard(key)
            if not record.done[chain, step] and not record.ended:
                record.add(Dropped(now, chain, step, ""))

    def log_event(self, topic: str, msg: Any) -> None:
        """Take what a job reports (see `distmm.telemetry.client.report`)."""
        if topic == TOPIC and isinstance(msg, dict) and (record := self.records.get(msg.get("product", ""))):
            chains = tuple(record.chain(tuple(batch), i, j) for *batch, i, j in msg["blocks"])
            record.add(Note(time.time(), msg["kind"], chains, msg.get("message", "")))

    def take(self, address: str, heartbeat: dict[str, Any]) -> None:
        """Take what a worker says of itself into the records of the products under way."""
        ws, now = self.scheduler.workers.get(address), time.time()
        if ws is None:
            return
        device = Device(*heartbeat["device"]) if heartbeat.get("device") else None
        received = heartbeat.get("received", {})
        for record in self.active(now):
            if self._name(address) in record.lanes or record.product in received:
                record.add(
                    Sample(
                        now,
                        self._name(address),
                        ws.nbytes,
                        ws.metrics.get("memory", 0),
                        received.get(record.product, 0),
                        device,
                    )
                )

    def figures(self, product: str) -> Figures | None:
        """How far a product is; None for one that is not known."""
        record = self.records.get(product)
        return record.figures(time.time()) if record else None

    def readings(self) -> Iterator[metrics.Reading]:
        """What Prometheus is told."""
        return metrics.of_scheduler(self)

    def active(self, now: float) -> Iterator[Record]:
        """Products that are not done, or that have just been: the last heartbeats are still to come."""
        for record in self.records.values():
            if record.stopped is None or not (record.complete or record.ended) or now - record.stopped < LINGER_SECONDS:
                yield record

    def _sample(self) -> None:
        for ws in self.scheduler.workers.values():
            self.take(ws.address, ws.metrics.get(METRIC, {}))

    def _open(self, record: Record) -> Record:
        # A product that comes again under its old name starts a new record, at the end.
        if record.product in self.records:
            self.past.update(metrics.counts(self.records.pop(record.product)))
        self.records[record.product] = record
        while len(self.records) > KEPT:
            self.past.update(metrics.counts(self.records.pop(next(iter(self.records)))))
        return record

    def _name(self, address: str) -> str:
        return self.names.get(address, address.rpartition("//")[2])


def _events(chain: int, step: int, worker: str, startstops: Iterable[dict[str, Any]]) -> Iterator[Run | Transfer]:
    """What the worker measured of one run of a step: transfers of its inputs first, then the run itself."""
    for entry in startstops:
        if entry["action"] == "transfer":
            yield Transfer(worker, entry["start"], entry["stop"])
        elif entry["action"] == "compute":
            yield Run(chain, step, worker, entry["start"], entry["stop"])
