"""Results of GPU workers of this host come to the client by tickets (`distmm.transfer.tickets`).

Dask's client gets a result through the scheduler: the result is copied from the GPU to the host, sent over two
connections, and copied to the client's GPU, at 0.6 GB/s (an H200, TCP). While `distmm.accelerate` is on, the client
asks the workers of its own host itself, and copies large CuPy arrays from GPU to GPU. A worker that reads the client's
memory runs on its host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distmm.worker.dask_internals import call_every_second, gather_from

if TYPE_CHECKING:
    from distributed import Client

    from distmm.transfer import ClientArray

logger = logging.getLogger(__name__)

_on = False


def by_tickets(on: bool) -> None:
    """Let all clients get results by tickets, or as Dask does."""
    global _on
    _on = on


def take_tickets(client: Client, near: Callable[[str], bool]) -> None:
    """Let a client get results itself from the workers with a `near` address, while `by_tickets` is on."""
    from distmm.transfer import gpu_allocations, serialization, tickets  # late: only a cluster needs them
    from distmm.worker.neighbours import CLIENT

    refused: set[str] = set()

    def failed(addresses: list[str]) -> None:
        refused.update(addresses)
        logger.warning(
            "results of %s come by the scheduler from now on, which is slower: this process could not fetch one from "
            "there itself. Reasons may be a worker that has ended, MIG, GPUs without peer access, another user, or a "
            "container with an IPC namespace of its own",
            ", ".join(addresses),
        )

    serialization.register()
    tickets.take(_received)
    gather_from(client, lambda: _on, lambda address: near(address) and address not in refused, CLIENT, failed)
    call_every_second(client, gpu_allocations.drop_idle)


def _received(named: Sequence[ClientArray]) -> list[Any]:
    """Return copies of the arrays that tickets of one process name.

    Raises
    ------
    EOFError
        If one is not copied, for whatever reason. Dask then closes the connection, and they come by the scheduler.
    """
    from distmm.worker.neighbours import received

    try:
        return received(named)
    except Exception as error:
        logger.warning("a result of process %d was not copied from GPU to GPU: %s", named[0].pid, error)
        raise EOFError(f"no array came from process {named[0].pid}: {error}") from error
