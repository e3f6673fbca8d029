"""Measurement of the rate at which GPUs copy blocks from the memory of their hosts, all of them at the same time.

Without it, plans assume PCIe 5 for each GPU (`distmm.clusters.cluster.LOADS`). Many hosts have an older PCIe, or GPUs
that share a switch.
"""

from __future__ import annotations

from distributed import Client

from distmm.all_workers import everywhere
from distmm.clusters.measured import measured_once
from distmm.clusters.view import hosts_of
from distmm.worker.tasks import copy_rate

__all__ = ["load_rate"]

# Seconds after which a measurement fails, because a worker does not answer. One copies for 0.15 s; the first use of its
# GPU may take seconds.
PATIENCE_SECONDS = 20.0


def load_rate(client: Client) -> float | None:
    """Return the rate of the slowest GPU while all GPUs of the cluster copy from pinned memory.

    Parameters
    ----------
    client : distributed.Client
        Client of a cluster of GPU workers.

    Returns
    -------
    float or None
        Bytes/s, measured once for each set of workers. None after a failed measurement.
    """
    workers = frozenset(hosts_of(client))

    def slowest() -> float:
        rates: dict[str, float] = everywhere(client, copy_rate, seconds=PATIENCE_SECONDS)
        return min(rates.values())

    return measured_once(client, "the rate of copies from host memory to GPUs", workers, slowest)
