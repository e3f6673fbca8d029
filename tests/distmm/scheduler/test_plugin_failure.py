"""What the scheduler's plugin raises ends a product with its reason, and the next one is computed."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from distributed import Client

import distmm
from distmm.clusters import view
from distmm.scheduler import dask_internals
from distmm.scheduler.lookahead import Lookahead
from distmm.scheduler.products import Products
from distmm.scheduler.replicas import Replicas
from tests.distmm.scheduler.streamed import left
from tests.tables import later
from tests.until import until

FAULTS = {
    "translating a graph": (dask_internals, "to_run"),
    "update_graph": (Products, "arrived"),
    "transition": (Products, "finished"),
    "lookahead": (Lookahead, "finish"),
    "deciding": (Products, "decide"),
    "opening a step": (Lookahead, "open"),
    "copying": (dask_internals, "copy_blocks"),
    "dropping": (Replicas, "drops"),
    "holding": (dask_internals, "park"),
    "starting": (dask_internals, "start"),
}


def product(client: Client, value: int) -> np.ndarray:
    """Of matrices that no other product has, for Dask remembers failed tasks; in steps, so that some tasks are held."""
    a = da.full((40, 40), value, chunks=10)
    c = distmm.matmul(a, a, client=client, plan="g2x2x1 b10x10x10 p1 w1 l2")
    return client.compute(c).result(timeout=120)


@pytest.mark.parametrize("fault", later(FAULTS, first=3))
def test_a_fault_of_the_plugin_ends_the_product_with_its_reason(
    client: Client, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = 2 + list(FAULTS).index(fault)
    view.ask(client)  # installs the plugin, if this is the first test
    before = client.run_on_scheduler(left)  # of calls that failed in other tests, whose errors are garbage

    def broken(*_: object) -> None:
        raise ZeroDivisionError(fault)

    with monkeypatch.context() as patch:
        patch.setattr(*FAULTS[fault], broken)  # the scheduler runs in this process
        with pytest.raises(RuntimeError, match=rf"plugin of the scheduler failed \(ZeroDivisionError: {fault}\)"):
            product(client, value)
    np.testing.assert_array_equal(product(client, -value), np.full((40, 40), 40 * value**2))
    until(lambda: client.run_on_scheduler(left) <= before)
