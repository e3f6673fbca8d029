"""Adds the workers' heartbeats to the records of the running products, and finds the workers that send none."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from distributed.scheduler import Scheduler
from tornado.ioloop import PeriodicCallback

from distmm import units
from distmm.telemetry.activity import Device
from distmm.telemetry.figures import silent
from distmm.telemetry.record import Record
from distmm.telemetry.worker import METRIC

logger = logging.getLogger(__name__)

# Milliseconds between two reads of the workers' heartbeats, which come at most every half second.
SAMPLE_MILLISECONDS = 500

# If the scheduler reads no heartbeats for so many seconds, it hung itself: the workers' silence counts from then on.
HUNG_SECONDS = 5.0

# Seconds for which an ended product is still sampled: heartbeats of 256 workers come every 2.3 s.
LINGER_SECONDS = 10.0


class Heartbeats:
    """Reads the heartbeats that have come to one scheduler.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    records : mapping
        Records by name of the product or job, the newest last.
    name_of : callable
        Takes the address of a worker. Returns its name.
    """

    def __init__(self, scheduler: Scheduler, records: Mapping[str, Record], name_of: Callable[[str], str]) -> None:
        self.scheduler, self.records, self.name_of = scheduler, records, name_of
        # Address of each worker -> bytes received by product, and their seconds, in its last heartbeat.
        self.received: dict[str, tuple[dict[str, int], float]] = {}
        self.seen: dict[str, float] = {}  # address of each worker -> time of the last heartbeat that was read
        self.silent: dict[str, float] = {}  # name of each worker that is silent -> time of its last heartbeat
        self.silences: Counter[str] = Counter()  # name of each worker -> how often it has fallen silent
        self.sampled = self.awake = time.time()
        self.sampling = PeriodicCallback(self._sample, SAMPLE_MILLISECONDS)

    def forget(self, address: str) -> None:
        """Forget a worker that has left."""
        self.received.pop(address, None)
        self.seen.pop(address, None)

    def active(self, now: float) -> list[Record]:
        """Return the records of running products, and of just ended ones, whose last heartbeats are still to come."""
        return [each for each in self.records.values() if not each.over or now - each.advanced < LINGER_SECONDS]

    def take(self, address: str, heartbeat: dict[str, Any]) -> None:
        """Add a worker's heartbeat to the records of the running products.

        The heartbeat has the bytes that the worker received since it started, by the product that read them. Bytes that
        no product has read count by their array, for the newest product that has it.

        Parameters
        ----------
        address : str
            Of the worker.
        heartbeat : dict
            Result of `distmm.telemetry.worker.heartbeat` or `distmm.telemetry.worker.statement`.
        """
        ws, now = self.scheduler.workers.get(address), time.time()
        if ws is None or not heartbeat:
            return
        last, before = self.received.get(address, ({}, 0.0))
        # A heartbeat may come after a statement that is newer: totals of a process never fall.
        totals = {of: max(total, last.get(of, 0)) for of, total in heartbeat["received"].items()}
        seconds, active = max(heartbeat["receiving"], before), self.active(now)
        received: Counter[str] = Counter()
        for of, total in totals.items():
            user = next(
                (r.product for r in reversed(list(self.records.values())) if of in r.arrays or of in r.resident), ""
            )
            received[user] += total - last.get(of, 0)
        # Bytes count when a task reads their block. The time of a transfer that has ended before is kept until then.
        self.received[address] = totals, seconds if received.total() or not active else before
        receiving = (seconds - before) / max(1, received.total())
        device = Device(*heartbeat["device"]) if heartbeat["device"] else None
        name = self.name_of(address)
        for record in active:
            mine = received[record.product]
            if name in record.lanes or mine:
                held = heartbeat["held"]
                blocks = sum(nbytes for array, nbytes in held.items() if array in record.arrays)
                record.lane(name).sample(
                    now, blocks, ws.metrics.get("memory", 0), mine, device, sum(held.values()) - blocks,
                    receiving * mine, heartbeat["host"],
                )  # fmt: skip

    def read(self) -> None:
        """Read the heartbeats that have come since the last call. One call before a product starts is its zero."""
        for ws in list(self.scheduler.workers.values()):
            if self.seen.get(ws.address) != ws.last_seen:
                self.seen[ws.address] = ws.last_seen
                self.take(ws.address, ws.metrics.get(METRIC, {}))

    def _sample(self) -> None:
        now = time.time()
        if now - self.sampled > HUNG_SECONDS:
            self.awake = now
        self.sampled = now
        active = self.active(now)
        if not active and not self.silent:
            return
        self.read()
        seen = {self.name_of(ws.address): max(ws.last_seen, self.awake) for ws in self.scheduler.workers.values()}
        self._find_silent(seen, now, active)
        for record in active:
            record.seen = seen

    def _find_silent(self, seen: Mapping[str, float], now: float, active: list[Record]) -> None:
        """Tell log and records which workers have fallen silent, and which are heard of again."""
        quiet = silent(seen, now)
        for name in self.silent.keys() - quiet:
            since, until = self.silent.pop(name), seen.get(name, now)
            logger.warning("worker %s was silent %s", name, units.span(since, until))
            for record in self.records.values():
                if name in record.lanes:
                    record.wake(name, until)
        for name in quiet:
            if name not in self.silent:
                self.silent[name] = seen[name]
                self.silences[name] += 1
                logger.warning("worker %s has sent no heartbeat since %s", name, units.clock(seen[name]))
            for record in active:
                if name in record.lanes and not record.over:
                    record.fall_silent(name, self.silent[name])
