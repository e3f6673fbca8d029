"""What the scheduler's plugin raises ends a product with its reason, and the next one is computed."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Scheduler

import distmm
from distmm.scheduler.lookahead import Window
from distmm.scheduler.plugin import PlacementPlugin
from tests.until import until

FAULTS = {
    "update_graph": (PlacementPlugin, "_to_do"),
    "opening": (Window, "opened"),
    "transition": (Window, "finish"),
}


def product(client: Client, value: int) -> np.ndarray:
    """Of matrices that no other product has, for Dask remembers failed tasks."""
    a = da.full((40, 40), value, chunks=10)
    return client.compute(distmm.matmul(a, a, client=client)).result(timeout=120)


def left(dask_scheduler: Scheduler) -> dict[str, int]:
    """Products that the plugin knows."""
    return dict(dask_scheduler.plugins[PlacementPlugin.name].total)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_plugin_ends_the_product_with_its_reason(
    client: Client, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError(fault)

    with monkeypatch.context() as patch:
        patch.setattr(*FAULTS[fault], broken)  # the scheduler runs in this process
        with pytest.raises(RuntimeError, match=rf"plugin of the scheduler failed \(ZeroDivisionError: {fault}\)"):
            product(client, len(fault))
    np.testing.assert_array_equal(product(client, -len(fault)), np.full((40, 40), 40 * len(fault) ** 2))
    until(lambda: not client.run_on_scheduler(left))
