"""The client's side of telemetry: start it, read the progress of a product, fetch its record, find its page.

The first product on a cluster starts telemetry. If telemetry does not start or fails later, products run without it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time

import dask
from distributed import Client, Scheduler

from distmm.graph.consumers import product_of
from distmm.telemetry import dashboard_server, worker
from distmm.telemetry.activity import Activity
from distmm.telemetry.faults import tolerated
from distmm.telemetry.figures import Figures
from distmm.telemetry.record import Record
from distmm.telemetry.scheduler import Telemetry


def install(client: Client) -> None:
    """Start telemetry on a cluster, unless it runs there already. A failure is logged and not raised."""
    with tolerated("telemetry"):
        client.register_plugin(Telemetry())


def arrived(client: Client) -> bool:
    """Whether the scheduler knows all tasks whose results this client waits for."""
    keys = [key for key, state in list(client.futures.items()) if state.status == "pending"]

    def ask(dask_scheduler: Scheduler) -> bool:
        return all(key in dask_scheduler.tasks for key in keys)

    return not keys or bool(client.run_on_scheduler(ask))


def figures(client: Client, product: str) -> Figures | None:
    """Return the progress of a product.

    Parameters
    ----------
    client : distributed.Client
    product : str
        Name of C as a Dask array, or of a job.

    Returns
    -------
    Figures or None
        None if the scheduler does not know the product, or runs without telemetry.
    """
    return client.run_on_scheduler(figures_on, product=product)


def figures_on(dask_scheduler: Scheduler, product: str) -> Figures | None:
    """Return the progress of a product, as `figures` does. Runs on the scheduler."""
    with tolerated("the progress of products"):
        record = _record_on(dask_scheduler, product)
        return None if record is None else record.figures(time.time())
    return None


def _record_on(dask_scheduler: Scheduler, product: str) -> Record | None:
    """Return the record of a product; None without one, or without telemetry. Runs on the scheduler."""
    telemetry = dask_scheduler.plugins.get(Telemetry.name)
    return telemetry and telemetry.records.get(product_of(product))


def read(client: Client, product: str) -> Record | None:
    """Return the record of a product with the latest figures of all workers.

    Parameters
    ----------
    client : distributed.Client
    product : str
        Name of C as a Dask array, or of a job.

    Returns
    -------
    Record or None
        None if the scheduler does not know the product, or runs without telemetry.
    """
    statements = client.run(worker.statement, on_error="ignore")

    def ask(dask_scheduler: Scheduler) -> Record | None:
        record = _record_on(dask_scheduler, product)
        if record is not None:
            telemetry = dask_scheduler.plugins[Telemetry.name]
            for address, said in statements.items():
                telemetry.heartbeats.take(address, said)
            record.transfers = [
                Activity(telemetry.names[address], "receive", start, stop)
                for address, said in statements.items()
                if address in telemetry.names
                for array, start, stop in said.get("transfers", ())
                if array in record.arrays | record.resident and start >= record.submitted
            ]
        return record

    return client.run_on_scheduler(ask)


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
        The address. In a Slurm job, and if the dashboard listens on the localhost of another machine, the text includes
        the ``ssh -L`` command to run first. It does not if Dask's configuration has the link of a proxy, such as
        JupyterHub's. None for a scheduler without the page.
    """
    install(client)
    with tolerated("the dashboard's address"):
        at: tuple[str, str, int] | None = client.run_on_scheduler(_page_at)
        if at is None:
            return None
        (host, listens, port), link = at, client.dashboard_link
        tunnel, proxy = "//localhost:" in link, "//{host}:{port}" not in dask.config.get("distributed.dashboard.link")
        if "SLURM_JOB_ID" in os.environ and (tunnel or not proxy):  # this output is read on another machine
            login = os.environ.get("SLURM_SUBMIT_HOST", "")
            jump = f"-J {login} " if login and login != host else ""
            return f"http://localhost:8787{PAGE} after ssh -N -L 8787:127.0.0.1:{port} {jump}{host}"
        elsewhere = host != socket.gethostname() and ipaddress.ip_address(listens).is_loopback
        if elsewhere and not (tunnel or proxy):  # Dask's default link has the other machine's name
            return f"http://localhost:{port}{PAGE} after ssh -N -L {port}:127.0.0.1:{port} {host}"
        return str(link).removesuffix("/status") + PAGE
    return None


def _page_at(dask_scheduler: Scheduler) -> tuple[str, str, int] | None:
    """Return host, listening address and port of the web server; None without the page. Runs on the scheduler."""
    if not dashboard_server.has_page(dask_scheduler, PAGE):
        return None
    server = dask_scheduler.http_server
    return socket.gethostname(), server.address, server.port
