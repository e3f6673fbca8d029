"""Adds the workers' heartbeats to the records of the running products."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distributed.scheduler import Scheduler
from tornado.ioloop import PeriodicCallback

from distmm.telemetry.events import Device, Heard, Sample, Transfer
from distmm.telemetry.record import Record
from distmm.telemetry.worker import METRIC

__all__ = ["Heartbeats"]

# Milliseconds between two reads of the workers' heartbeats, which come at most every half second.
SAMPLE_MILLISECONDS = 500

# Seconds for which an ended product is still sampled: heartbeats of 256 workers come every 2.3 s.
LINGER_SECONDS = 10.0


class Heartbeats:
    """Reads the heartbeats that have come to one scheduler.

    Parameters
    ----------
    scheduler : distributed.Scheduler
    records : mapping
        Records by name of the product or job, the newest last.
    arrays : mapping
        The names of the arrays that each product reads or makes.
    name_of : callable
        Takes the address of a worker. Returns its name.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        records: Mapping[str, Record],
        arrays: Mapping[str, set[str]],
        name_of: Callable[[str], str],
    ) -> None:
        self.scheduler, self.records, self.arrays, self.name_of = scheduler, records, arrays, name_of
        self.received: dict[str, dict[str, int]] = {}  # worker -> its bytes by array in its last heartbeat
        self.seen: dict[str, float] = {}  # worker -> time of the last heartbeat that was read
        self._sampling = PeriodicCallback(self._sample, SAMPLE_MILLISECONDS)

    def start(self) -> None:
        """Read the heartbeats from now on."""
        self._sampling.start()

    def stop(self) -> None:
        """Read no more heartbeats."""
        self._sampling.stop()

    def forget(self, address: str) -> None:
        """Forget the bytes that a worker received: it has left."""
        self.received.pop(address, None)
        self.seen.pop(address, None)

    def active(self, now: float) -> Iterator[Record]:
        """Return the records of running products, and of just ended ones, whose last heartbeats are still to come."""
        for record in self.records.values():
            if not record.over or now - (record.stopped or record.submitted) < LINGER_SECONDS:
                yield record

    def take(self, address: str, heartbeat: dict[str, Any]) -> None:
        """Add a worker's heartbeat to the records of the running products.

        The heartbeat has the bytes of each array that the worker received since it started. The bytes since the last
        heartbeat count for the newest running product that uses the array.

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
        received: Counter[str] = Counter()
        active = list(self.active(now))
        last = self.received.get(address, {})
        # A heartbeat may come after a statement that is newer: totals of a process never fall.
        totals = {array: max(total, last.get(array, 0)) for array, total in heartbeat["received"].items()}
        self.received[address] = totals
        for array, total in totals.items():
            user = next((r.product for r in reversed(active) if array in self._arrays(r)), "")
            received[user] += total - last.get(array, 0)
        device = Device(*heartbeat["device"]) if heartbeat["device"] else None
        name, process = self.name_of(address), ws.metrics.get("memory", 0)
        for record in active:
            if name in record.lanes or received[record.product]:
                blocks = max(0, ws.nbytes - record.before.get(name, 0))
                record.add(Sample(now, name, blocks, process, received[record.product], device))
        for array, start, stop in heartbeat.get("transfers", ()):
            for record in active:
                if array in self._arrays(record) and start >= record.submitted:
                    record.add(Transfer(name, start, stop))

    def _arrays(self, record: Record) -> set[str]:
        return self.arrays.get(record.product, set())

    def read(self) -> None:
        """Read the heartbeats that have come since the last call. One call before a product starts is its zero."""
        for ws in list(self.scheduler.workers.values()):
            if self.seen.get(ws.address) != ws.last_seen:
                self.seen[ws.address] = ws.last_seen
                self.take(ws.address, ws.metrics.get(METRIC, {}))

    def _sample(self) -> None:
        active = list(self.active(time.time()))
        if not active:
            return
        self.read()
        heard = Heard({self.name_of(ws.address): ws.last_seen for ws in self.scheduler.workers.values()})
        for record in active:
            record.add(heard)
