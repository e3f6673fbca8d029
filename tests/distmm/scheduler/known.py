"""What the scheduler knows, and functions that run where it runs."""

from __future__ import annotations

from collections.abc import Callable

from distributed import Client, Scheduler


def known(client: Client) -> set[object]:
    """Keys of the scheduler's tasks: other tests' are among them where a cluster serves several."""
    return set(client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.tasks)))


def on_scheduler(client: Client, function: Callable[[Scheduler], object]) -> None:
    """Run where the scheduler runs, which is no place for two threads."""
    client.run_on_scheduler(lambda dask_scheduler: function(dask_scheduler))
