from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distmm.worker.tasks.probe import probe

probing = sys.modules["distmm.worker.tasks.probe"]  # the package has the function under this name

FREE, HELD = 10**9, 10**8


def told(monkeypatch: pytest.MonkeyPatch, pool: int | None) -> dict[str, Any]:
    """Return what a worker tells that holds blocks, with a GPU of which so many bytes are free, or in RMM's pool."""
    monkeypatch.setattr(probing, "local_gpu", lambda: {"device": "cuda", "threads": 1, "memory": pool or FREE})
    monkeypatch.setattr(probing, "pool_bytes", lambda: pool)
    monkeypatch.setattr(probing, "kernel_facts", lambda choice, reproducible: {})
    state, manager = SimpleNamespace(nthreads=2, nbytes=HELD), SimpleNamespace(memory_limit=None)
    worker: Any = SimpleNamespace(state=state, memory_manager=manager, data={})
    return probe("any", np.dtype("f4"), "highest", None, False, worker)


def test_blocks_that_a_worker_holds_are_taken_from_what_its_pool_has(monkeypatch):
    assert told(monkeypatch, 4 * FREE)["memory"] == 4 * FREE - HELD


def test_blocks_that_a_worker_holds_are_not_counted_twice_where_the_driver_says_what_is_free(monkeypatch):
    assert told(monkeypatch, None)["memory"] == FREE


@pytest.mark.parametrize(("pause", "share"), [(0.5, 0.5), (0.8, 0.8), (0.95, 0.8), (False, 0.8)])
def test_blocks_stay_below_the_memory_at_which_dask_pauses_the_worker(pause: float, share: float) -> None:
    limit = 100 * probing.WORKER_BYTES
    manager = SimpleNamespace(memory_limit=limit, memory_pause_fraction=pause)
    worker: Any = SimpleNamespace(state=SimpleNamespace(nthreads=1), memory_manager=manager)
    memory = probe("none", np.dtype("f4"), "highest", None, False, worker)["memory"]
    assert 0 <= share * limit - probing.WORKER_BYTES - memory < 0.05 * limit  # this process may have more than a worker
