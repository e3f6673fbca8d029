"""A scheduler that ends as if it were killed, and another one at its address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from distributed import Client, LocalCluster, Scheduler

from distmm.scheduler.plugin import PlacementPlugin
from tests.until import until


@contextmanager
def replaceable() -> Iterator[tuple[Client, Scheduler, Callable[[], Scheduler]]]:
    """Yield a client, its scheduler without workers, and a function that replaces the scheduler."""
    with ExitStack() as opened:

        def started(port: int) -> LocalCluster:
            how = {"processes": False, "protocol": "tcp", "scheduler_port": port, "dashboard_address": ":0"}
            return opened.enter_context(LocalCluster(n_workers=0, **how))

        first = started(0)
        client = opened.enter_context(Client(first.scheduler_address, set_as_default=False, timeout=60))

        def replace() -> Scheduler:
            lost = client.scheduler_comm
            first.scheduler.plugins[PlacementPlugin.name].changes.told["workers"].clear()  # it tells nobody of its end
            first.close()
            second = started(int(first.scheduler_address.rpartition(":")[2]))
            until(lambda: client.status == "running" and client.scheduler_comm is not lost)
            return second.scheduler

        yield client, first.scheduler, replace
