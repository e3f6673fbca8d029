"""Preload module that makes each worker of a pod serve HTTP on one of the ports that the pod declares.

Dask gives one ``--dashboard-address`` to all workers of a host: the first worker gets that port, and the others get
random ones. Prometheus and a network policy need to know all ports in advance.
"""

from __future__ import annotations

import logging

import dask
from distributed import Worker

logger = logging.getLogger(__name__)

# Key of Dask's configuration with the range of ports, such as "8788-8795". Manifests set it by an environment variable.
CONFIGURED = "distmm.worker-ports"


async def dask_setup(worker: Worker) -> None:
    """Let a worker also listen on the first free port of the range, and report that port to the scheduler.

    Dask calls this function when the worker starts.
    """
    first, last = map(int, dask.config.get(CONFIGURED).split("-"))
    for port in range(first, last + 1):
        try:
            worker.http_server.listen(port)
        except OSError:
            continue  # another worker has this port
        worker.http_server.port = port
        return
    message = "no port from %d to %d is free, so Prometheus cannot read the metrics of worker %s"
    logger.warning(message, first, last, worker.name)
