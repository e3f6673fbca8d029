"""Worker plugin: adds the worker's own figures to its heartbeats, and serves them on its ``/metrics``.

It counts the bytes of blocks as they arrive, by the array that they belong to. So the bytes of one product are exact,
and can be compared with the plan's bound, whatever else the cluster does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from distributed import Worker, WorkerPlugin
from distributed.diagnostics import nvml

from distmm.all_workers import owns_gpu
from distmm.graph.dask_tasks import ProductTask
from distmm.telemetry import metrics
from distmm.telemetry.events import Device
from distmm.telemetry.faults import tolerated

__all__ = ["METRIC", "WorkerTelemetry", "heartbeat", "own_gpu", "received_bytes", "statement"]

# Key of distmm's entry in the metrics of a heartbeat.
METRIC = "distmm"

# A heartbeat has the bytes of the last so many arrays that the worker received. A product has four: A, B, C and its
# steps.
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
    """Counts bytes received and kernel seconds of product tasks, and reads the worker's GPU.

    Parameters
    ----------
    gpu : callable, optional
        Returns the figures of the worker's GPU, or None for a worker without one.
    """

    name = "distmm-telemetry"

    def __init__(self, gpu: Callable[[Worker], Device | None] = own_gpu) -> None:
        self.gpu = gpu
        self.received: OrderedDict[str, int] = OrderedDict()  # array -> bytes
        self.received_total = 0
        self.kernel_seconds = 0.0
        self.busy_until = 0.0

    def setup(self, worker: Worker) -> None:
        """Add the figures to every heartbeat and to ``/metrics``."""
        self.worker = worker
        worker.metrics[METRIC] = heartbeat
        with tolerated("/metrics of a worker"):
            metrics.expose(self)

    def teardown(self, worker: Worker) -> None:
        """Remove the figures from heartbeats and ``/metrics``."""
        worker.metrics.pop(METRIC, None)
        metrics.withdraw(self)

    def transition(self, key: object, start: str, finish: str, **kwargs: Any) -> None:
        """Count a block that arrived from another worker, and the time of a product task that finished."""
        if finish != "memory":
            return
        ts = self.worker.state.tasks[key]
        if start == "flight":
            self._receive(_array(key), ts.nbytes or 0)
        elif isinstance(ts.run_spec, ProductTask):
            for entry in ts.startstops:
                if entry["action"] == "compute":  # tasks overlap where products are queued ahead
                    self.kernel_seconds += max(0.0, entry["stop"] - max(entry["start"], self.busy_until))
                    self.busy_until = max(self.busy_until, entry["stop"])

    def readings(self) -> Iterator[metrics.Reading]:
        """Return the worker's Prometheus series."""
        name = str(self.worker.name).rpartition("//")[2]
        yield "distmm_received_bytes", name, self.received_total
        yield "distmm_kernel_seconds", name, self.kernel_seconds
        yield "distmm_block_bytes", name, self.worker.state.nbytes
        device = self.gpu(self.worker)
        if device is not None:
            yield "distmm_gpu_memory_used_bytes", name, device.used
            yield "distmm_gpu_memory_bytes", name, device.total
            yield "distmm_gpu_utilization_ratio", name, device.utilization

    def _receive(self, array: str, nbytes: int) -> None:
        self.received_total += nbytes
        self.received[array] = self.received.get(array, 0) + nbytes
        self.received.move_to_end(array)
        while len(self.received) > KEPT:
            self.received.popitem(last=False)


def _array(key: Any) -> str:
    """Return the name of the array that a key belongs to."""
    return str(key[0] if isinstance(key, tuple) else key)


def heartbeat(worker: Worker) -> dict[str, Any]:
    """Return the figures of the worker's plugin, as plain numbers."""
    plugin = worker.plugins.get(WorkerTelemetry.name)
    if plugin is None:
        return {}
    device = plugin.gpu(worker)
    return {
        "received": dict(plugin.received),
        "kernel_seconds": plugin.kernel_seconds,
        "device": (device.used, device.total, device.utilization) if device else None,
    }


def received_bytes(dask_worker: Worker) -> int:
    """Return the bytes of blocks that this worker received from others; 0 without the plugin. Runs on workers.

    The plugin counts them because Dask's log of transfers keeps only the last 1000.
    """
    plugin = dask_worker.plugins.get(WorkerTelemetry.name)
    return 0 if plugin is None else int(plugin.received_total)


def statement(dask_worker: Worker) -> dict[str, Any]:
    """Return the figures of the next heartbeat, and the last transfers. Runs on workers."""
    log = list(dask_worker.transfer_incoming_log)[-MOST_TRANSFERS:]
    transfers = [(_array(key), entry["start"], entry["stop"]) for entry in log for key in list(entry["keys"])[:1]]
    return heartbeat(dask_worker) | {"transfers": transfers}
