"""The address of the page ``/distmm`` for a browser on the client's machine."""

from __future__ import annotations

import ipaddress
import socket

from distributed import Client, Scheduler

from distmm.telemetry import client as telemetry
from distmm.telemetry import dashboard_server
from distmm.telemetry.faults import tolerated

PAGE = "/distmm"


def page_address(client: Client) -> str | None:
    """Return the address at which a browser on this machine opens the page ``/distmm`` of a cluster.

    This starts the cluster's telemetry, so the page exists before the first product.

    Parameters
    ----------
    client : distributed.Client

    Returns
    -------
    str or None
        The address. If the dashboard listens on the localhost of another machine, the text includes the ``ssh -L``
        command to run first. None for a scheduler without the page.
    """
    telemetry.install(client)
    with tolerated("the dashboard's address"):
        at: tuple[str, str, int] | None = client.run_on_scheduler(_at)
        if at is None:
            return None
        (host, listens, port), link = at, client.dashboard_link
        elsewhere = host != socket.gethostname() and ipaddress.ip_address(listens).is_loopback
        if elsewhere and "//localhost:" not in link:  # Dask's default link has the other machine's name
            return f"http://localhost:{port}{PAGE} after ssh -N -L {port}:127.0.0.1:{port} {host}"
        return str(link).removesuffix("/status") + PAGE
    return None


def _at(dask_scheduler: Scheduler) -> tuple[str, str, int] | None:
    """Return host, listening address and port of the web server; None without the page. Runs on the scheduler."""
    if not dashboard_server.has_page(dask_scheduler, PAGE):
        return None
    server = dask_scheduler.http_server
    return socket.gethostname(), server.address, server.port
