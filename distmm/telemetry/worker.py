"""Worker plugin: adds the worker's own figures to its heartbeats, and serves them on its ``/metrics``.

It counts the bytes of blocks that arrive by the product that reads them first here. So the bytes of one product are
exact, and can be compared with the plan's bound, whatever else the cluster does.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from distributed import Worker, WorkerPlugin
from distributed.diagnostics import nvml

from distmm.all_workers import owns_gpu
from distmm.graph.dask_tasks import PlacedTask
from distmm.telemetry import metrics
from distmm.telemetry.activity import Device

# Key of distmm's entry in the metrics of a heartbeat.
METRIC = "distmm"

# A heartbeat has the bytes received of the last so many products, and of arrays that no product has read.
KEPT = 16

# Most transfers of one worker in a report, the last ones.
MOST_TRANSFERS = 10_000


def own_gpu(worker: Worker) -> Device | None:
    """Return NVML's figures of the GPU that dask-cuda gave this worker; None on CPU workers.

    A worker that dask-cuda did not start may see GPUs too, but all such workers see the same one. So they report none.
    """
    if not owns_gpu(worker) or not nvml.device_get_count():
        return None
    now, fixed = nvml.real_time(), nvml.one_time()
    if now["memory-used"] is None or fixed["memory-total"] is None:
        return None  # NVML has no figures, for instance of a MIG slice without permission
    return Device(now["memory-used"], fixed["memory-total"], (now["utilization"] or 0) / 100)


class WorkerTelemetry(WorkerPlugin):
    """Counts bytes received and held, and reads the worker's GPU.

    Parameters
    ----------
    gpu : callable, optional
        Returns the figures of the worker's GPU, or None for a worker without one.
    """

    name = "distmm-telemetry"

    def __init__(self, gpu: Callable[[Worker], Device | None] = own_gpu) -> None:
        self.gpu = gpu
        self.arrived: dict[Any, int] = {}  # block that no task has read yet -> bytes
        self.received: dict[str, int] = {}  # product, or array that others read -> bytes
        self.received_total = 0  # Dask's log of transfers keeps only the last 1000
        self.receiving = self.received_until = 0.0

    def setup(self, worker: Worker) -> None:
        """Add the figures to every heartbeat and to ``/metrics``."""
        self.worker = worker
        worker.metrics = {**worker.metrics, METRIC: heartbeat}  # a heartbeat may go through the old one
        metrics.SOURCES.add(self)

    def teardown(self, worker: Worker) -> None:
        """Remove the figures from heartbeats and ``/metrics``."""
        worker.metrics = {name: metric for name, metric in worker.metrics.items() if name != METRIC}
        metrics.SOURCES.discard(self)

    def transition(self, key: object, start: str, finish: str, **kwargs: Any) -> None:
        """Count blocks that arrive, by their reader."""
        if start == "memory" and key in self.arrived:  # nobody has read it here
            self._receive(_array(key), self.arrived.pop(key))
        if finish != "memory":
            return
        ts = self.worker.state.tasks[key]
        if start == "flight":
            self.arrived[key] = ts.nbytes or 0
            self.received_total += self.arrived[key]
            return
        task = ts.run_spec
        for block in ts.dependencies:
            if block.key in self.arrived:
                reader = task.placement.product if isinstance(task, PlacedTask) else _array(block.key)
                self._receive(reader, self.arrived.pop(block.key))

    def readings(self) -> Iterator[metrics.Reading]:
        """Return the worker's Prometheus series."""
        name = str(self.worker.name).rpartition("//")[2]
        yield "distmm_received_bytes", name, self.received_total
        yield "distmm_block_bytes", name, self.worker.state.nbytes
        device = self.gpu(self.worker)
        if device is not None:
            yield "distmm_gpu_memory_used_bytes", name, device.used
            yield "distmm_gpu_memory_bytes", name, device.total
            yield "distmm_gpu_utilization_ratio", name, device.utilization

    def figures(self) -> dict[str, Any]:
        """Return the figures of a heartbeat, as plain numbers."""
        for entry in self.worker.transfer_incoming_log:
            if entry["stop"] > self.received_until:
                self.receiving += entry["stop"] - max(entry["start"], self.received_until)
                self.received_until = entry["stop"]
        held: Counter[str] = Counter()  # array -> bytes in memory
        for key, ts in self.worker.state.tasks.items():
            if ts.state == "memory":
                held[_array(key)] += ts.nbytes or 0
        return {
            "received": dict(self.received),
            "receiving": self.receiving,
            "held": dict(held),
            "device": self.gpu(self.worker),
            "host": socket.gethostname(),
        }

    def _receive(self, reader: str, nbytes: int) -> None:
        self.received[reader] = self.received.pop(reader, 0) + nbytes  # the last one is that of the last read
        if len(self.received) > KEPT:
            del self.received[next(iter(self.received))]


def _array(key: Any) -> str:
    """Return the name of the array that a key belongs to."""
    return str(key[0] if isinstance(key, tuple) else key)


def heartbeat(worker: Worker) -> dict[str, Any]:
    """Return the figures of the worker's plugin; nothing without it."""
    plugin = worker.plugins.get(WorkerTelemetry.name)
    return {} if plugin is None else plugin.figures()


def statement(dask_worker: Worker) -> dict[str, Any]:
    """Return the figures of the next heartbeat, and the last transfers. Runs on workers."""
    log = list(dask_worker.transfer_incoming_log)[-MOST_TRANSFERS:]
    transfers = [(_array(key), entry["start"], entry["stop"]) for entry in log for key in list(entry["keys"])[:1]]
    return heartbeat(dask_worker) | {"transfers": transfers}
