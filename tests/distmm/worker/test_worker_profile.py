"""Where distmm is installed, a worker's profiler starts no garbage collection: on Python 3.11 that can deadlock it."""

from __future__ import annotations

import gc
import sys

import pytest
from distributed import Client, Worker

from distmm.clusters import view


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="allocations start no collection from Python 3.12 on")
def test_the_profiler_collects_no_garbage(client: Client) -> None:
    def profiled(dask_worker: Worker) -> tuple[list[bool], bool]:
        seen: list[bool] = []
        dask_worker.trigger_profile = lambda: seen.append(gc.isenabled())
        try:
            dask_worker.periodic_callbacks["profile"].callback()
        finally:
            del dask_worker.trigger_profile
        return seen, gc.isenabled()

    view.ask(client)
    assert set(map(str, client.run(profiled).values())) == {"([False], True)"}
    assert client.submit(sum, range(10), pure=False).result() == 45
