"""A preload that has each worker of a pod answer on a port of its own, of those that the pod has declared.

Dask gives one ``--dashboard-address`` to all workers of a host: the first takes that port, and the others take any.
Prometheus and a network policy need to know them all beforehand.
"""

from __future__ import annotations

import logging

import dask
from distributed import Worker

__all__ = ["CONFIGURED", "dask_setup"]

logger = logging.getLogger(__name__)

# Dask's configuration, as "8788-8795"; manifests give it as an environment variable.
CONFIGURED = "distmm.worker-ports"


async def dask_setup(worker: Worker) -> None:
    """Listen on the first free port as well, and have the scheduler know that one. Dask calls this at the start."""
    first, last = map(int, dask.config.get(CONFIGURED).split("-"))
    for port in range(first, last + 1):
        try:
            worker.http_server.listen(port)
        except OSError:
            continue  # of another worker
        worker.http_server.port = port
        return
    logger.warning("no port from %d to %d is free: nobody outside reads the figures of %s", first, last, worker.name)
