"""Where a person opens the page of a cluster's products."""

from __future__ import annotations

import ipaddress
import socket

from distributed import Client, Scheduler

from distmm.telemetry import client as telemetry
from distmm.telemetry import dashboard_server
from distmm.telemetry.faults import tolerated

__all__ = ["page_address"]

PAGE = "/distmm"


def page_address(client: Client) -> str | None:
    """Say where the page ``/distmm`` of a cluster opens on this machine.

    It starts the cluster's telemetry, so that the page is there before the first product.

    Parameters
    ----------
    client : distributed.Client

    Returns
    -------
    str or None
        Its address, with the ``ssh -L`` that it needs where the dashboard listens on the localhost of another machine;
        None for a scheduler without pages.
    """
    telemetry.install(client)
    with tolerated("the dashboard's address"):
        at: tuple[str, str, int] | None = client.run_on_scheduler(_at)
        if at is None:
            return None
        (host, listens, port), link = at, client.dashboard_link
        elsewhere = host != socket.gethostname() and ipaddress.ip_address(listens).is_loopback
        if elsewhere and "//localhost:" not in link:  # Dask's own link has the other machine's name, unless it was set
            return f"http://localhost:{port}{PAGE} after ssh -N -L {port}:127.0.0.1:{port} {host}"
        return str(link).removesuffix("/status") + PAGE
    return None


def _at(dask_scheduler: Scheduler) -> tuple[str, str, int] | None:
    """Return the scheduler's host and where its pages listen; None without pages. Runs on the scheduler."""
    if not dashboard_server.has_page(dask_scheduler, PAGE):
        return None
    server = dask_scheduler.http_server
    return socket.gethostname(), server.address, server.port
