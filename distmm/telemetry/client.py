"""The client's side of telemetry: start it, ask how far a product is, report what only a job knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from distributed import Client, Scheduler

from distmm.telemetry import worker
from distmm.telemetry.events import TOPIC
from distmm.telemetry.record import Figures, Record
from distmm.telemetry.scheduler import Telemetry

__all__ = ["figures", "install", "note", "read"]


def install(client: Client) -> None:
    """Start telemetry on a cluster; nothing happens where it is there already."""
    client.register_plugin(Telemetry())


def figures(client: Client, product: str) -> Figures | None:
    """How far a product is; None for one that the scheduler does not know.

    Parameters
    ----------
    client : distributed.Client
    product : str
        Name of C as a Dask array.
    """

    def ask(dask_scheduler: Scheduler) -> Figures | None:
        telemetry = dask_scheduler.plugins.get(Telemetry.name)
        return telemetry.figures(product) if telemetry else None

    return client.run_on_scheduler(ask)  # type: ignore[no-any-return]


def read(client: Client, product: str) -> Record | None:
    """Everything that is known of a product, with the latest figures of all workers; None for an unknown one."""
    statements = client.run(worker.statement, on_error="ignore")

    def ask(dask_scheduler: Scheduler) -> Record | None:
        telemetry = dask_scheduler.plugins.get(Telemetry.name)
        if telemetry is None:
            return None
        record: Record | None = telemetry.records.get(product)
        if record is not None:
            record.transfers.clear()  # the workers tell of all of them again
            for address, said in statements.items():
                telemetry.take(address, said)
        return record

    return client.run_on_scheduler(ask)  # type: ignore[no-any-return]


def note(
    client: Client,
    product: str,
    kind: Literal["resumed", "certified", "refuted"],
    blocks: Iterable[tuple[int, ...]],
    message: str = "",
) -> None:
    """Report what the scheduler cannot see: blocks that were on disk already, or that passed or failed their check.

    Parameters
    ----------
    client : distributed.Client
    product : str
        Name of C as a Dask array.
    kind : {"resumed", "certified", "refuted"}
    blocks : iterable of (*batch, i, j)
    message : str, optional
    """
    event = {"product": product, "kind": kind, "blocks": [list(map(int, b)) for b in blocks], "message": message}
    client.log_event(TOPIC, event)
