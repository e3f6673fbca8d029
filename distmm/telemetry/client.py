"""The client's side of telemetry: start it, ask how far a product is, fetch all that is known of it."""

from __future__ import annotations

from distributed import Client, Scheduler

from distmm.all_workers import everywhere
from distmm.telemetry import worker
from distmm.telemetry.record import Figures, Record
from distmm.telemetry.scheduler import Telemetry

__all__ = ["bytes_moved", "figures", "install", "read"]


def install(client: Client) -> None:
    """Start telemetry on a cluster; nothing happens where it is there already."""
    client.register_plugin(Telemetry())


def bytes_moved(client: Client) -> int:
    """Bytes of blocks that workers have received from one another since `install`, which the first call does."""
    install(client)
    return sum(everywhere(client, worker.received_bytes).values())


def figures(client: Client, product: str) -> Figures | None:
    """How far a product is; None for one that the scheduler does not know.

    Parameters
    ----------
    client : distributed.Client
    product : str
        Name of C as a Dask array, or of a job.
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
