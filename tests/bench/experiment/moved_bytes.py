"""Bytes of blocks that the workers of a cluster have received from one another, as telemetry has counted them."""

from __future__ import annotations

from distributed import Client, Worker

from distmm.telemetry.worker import WorkerTelemetry


def moved_bytes(client: Client) -> int:
    """Return the bytes since telemetry began; a cluster without telemetry is an error."""

    def received(dask_worker: Worker) -> int:
        plugin = dask_worker.plugins[WorkerTelemetry.name]
        assert isinstance(plugin, WorkerTelemetry)
        return plugin.received_total

    return sum(client.run(received).values())
