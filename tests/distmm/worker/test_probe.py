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
