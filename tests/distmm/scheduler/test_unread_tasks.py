"""Dask fuses the tasks of a lazy array in another way for each expression: what none of them reads is forgotten."""

from __future__ import annotations

from collections.abc import Callable

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Event, worker_client

import distmm
from tests.until import until


def wait(block: np.ndarray) -> np.ndarray:
    """Return a block when both graphs have been sent."""
    with worker_client():
        Event("distmm-both").wait()
    return block


@pytest.mark.parametrize("first", ["product", "expression"])
def test_graphs_that_fuse_an_array_differently_leave_nothing_behind(
    cluster: Callable[[int], Client], first: str
) -> None:
    client, x = cluster(1), np.ones((4, 4))
    A = da.from_array(x, chunks=2).map_blocks(wait, dtype="f8", meta=x[:0])
    asked = {"product": distmm.matmul(A, x, client=client), "expression": A - A.mean(axis=0)}
    sent = {name: client.compute(asked[name]) for name in sorted(asked, key=lambda name: name != first)}
    known = client.cluster.scheduler.tasks
    until(lambda: all(future.key in known for future in sent.values()))
    Event("distmm-both", client=client).set()
    np.testing.assert_array_equal(sent["product"].result(), x @ x)
    np.testing.assert_array_equal(sent["expression"].result(), 0 * x)
    sent.clear()
    until(lambda: not known)
