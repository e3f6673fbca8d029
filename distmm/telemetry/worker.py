"""Worker plugin: sends what only the worker knows with its heartbeats, and shows it on its ``/metrics``.

It counts bytes as blocks arrive, by the array that they belong to. So the bytes of one product can be compared with the
plan's bound, to the byte, whatever else the cluster does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from distributed import Worker, WorkerPlugin
from distributed.diagnostics import nvml

from distmm.graph.dask_tasks import ProductTask
from distmm.telemetry import metrics
from distmm.telemetry.events import Device
from distmm.telemetry.faults import tolerated

__all__ = ["METRIC", "WorkerTelemetry", "heartbeat", "own_gpu", "received_bytes", "statement"]

# Name of the entry in a heartbeat's metrics.
METRIC = "distmm"

# A heartbeat tells the bytes of this many arrays, those received last. A product has four: A, B, C and its steps.
KEPT = 16

# Transfers of one worker that a report shows.
MOST_TRANSFERS = 10_000


def own_gpu(worker: Worker) -> Device | None:
    """Read the GPU that dask-cuda gave this worker, through NVML; None on CPU workers.

    A worker that dask-cuda did not start may see GPUs too. All such workers see the same one, which belongs to none.
    """
    if not any(type(plugin).__module__.startswith("dask_cuda") for plugin in worker.plugins.values()):
        return None
    if not nvml.device_get_count():
        return None
    now, fixed = nvml.real_time(), nvml.one_time()
    if now["memory-used"] is None or fixed["memory-total"] is None:
        return None  # NVML does not say, for instance of a MIG slice without permission
    return Device(now["memory-used"], fixed["memory-total"], (now["utilization"] or 0) / 100)


class WorkerTelemetry(WorkerPlugin):
    """Bytes received and kernel seconds of product tasks, and the state of the worker's GPU.

    Parameters
    ----------
    gpu : callable, optional
        Reads the worker's GPU; returns None for a worker that has none.
    """

    name = "distmm-telemetry"

    def __init__(self, gpu: Callable[[Worker], Device | None] = own_gpu) -> None:
        self.gpu = gpu
        self.received: OrderedDict[str, int] = OrderedDict()  # array -> bytes
        self.received_total = 0
        self.kernel_seconds = 0.0
        self.busy_until = 0.0

    def setup(self, worker: Worker) -> None:
        """Report with every heartbeat."""
        self.worker = worker
        worker.metrics[METRIC] = heartbeat
        with tolerated("/metrics of a worker"):
            metrics.expose(self)

    def teardown(self, worker: Worker) -> None:
        """Report no more."""
        worker.metrics.pop(METRIC, None)
        metrics.withdraw(self)

    def transition(self, key: object, start: str, finish: str, **kwargs: Any) -> None:
        """Count a block that arrived from a peer, and a product task that is done."""
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
        """Return what Prometheus is told."""
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
    """Name of the array that a key belongs to."""
    return str(key[0] if isinstance(key, tuple) else key)


def heartbeat(worker: Worker) -> dict[str, Any]:
    """Return what the worker's plugin knows, as plain numbers."""
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
    """Return the bytes of blocks that this worker has received from its peers. Runs on workers (``client.run``).

    The plugin counts them, because Dask's log of transfers keeps only the last 1000. Without the plugin they are 0.
    """
    plugin = dask_worker.plugins.get(WorkerTelemetry.name)
    return 0 if plugin is None else int(plugin.received_total)


def statement(dask_worker: Worker) -> dict[str, Any]:
    """Return what the next heartbeat will say, and the last transfers. Runs on workers (``client.run``)."""
    log = list(dask_worker.transfer_incoming_log)[-MOST_TRANSFERS:]
    transfers = [(_array(key), entry["start"], entry["stop"]) for entry in log for key in list(entry["keys"])[:1]]
    return heartbeat(dask_worker) | {"transfers": transfers}
