"""What the scheduler knows."""

from __future__ import annotations

from distributed import Client


def known(client: Client) -> set[object]:
    """Keys of the scheduler's tasks: other tests' are among them where a cluster serves several."""
    return set(client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks)))
