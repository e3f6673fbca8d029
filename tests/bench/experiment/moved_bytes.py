"""Bytes of blocks that the workers of a cluster have received from one another, as telemetry has counted them."""

from __future__ import annotations

from collections.abc import Callable

import dask.array as da
import numpy as np
from distributed import Client, Worker, wait

from distmm.telemetry.worker import WorkerTelemetry


def moved_bytes(client: Client) -> int:
    """Return the bytes since telemetry began; a cluster without telemetry is an error."""

    def received(dask_worker: Worker) -> int:
        plugin = dask_worker.plugins[WorkerTelemetry.name]
        assert isinstance(plugin, WorkerTelemetry)
        return plugin.received_total

    return sum(client.run(received).values())


def spent(client: Client, make: Callable[[], da.Array]) -> tuple[np.ndarray, int]:
    """Return a result, and the bytes that workers sent one another until it was there."""
    before = moved_bytes(client)
    kept = client.persist(make())
    wait(kept)
    moved = moved_bytes(client) - before
    return np.asarray(kept.compute()), moved
