"""GPU memory that a process cannot map, for example because UCX keeps a map of earlier memory there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from distributed import Client

from distmm.clusters import view
from distmm.transfer import gpu_allocations

N = 1100  # edge of a block that goes by a ticket
SIZES = 1_000, 30_000, 200_000, 300_000, 700_000, 2_000_000, 3_000_000  # in elements


@pytest.fixture
def gpus(request: pytest.FixtureRequest) -> Iterator[Client]:
    cuda = pytest.importorskip("dask_cuda")
    pytest.importorskip("distributed_ucxx")
    options = {"protocol": "ucx", "rmm_pool_size": "1GB", "dashboard_address": ":0"}
    with cuda.LocalCUDACluster(n_workers=request.param, **options) as cluster, Client(cluster) as client:
        yield client


def ones(elements: int) -> Any:
    import cupy

    return cupy.ones(elements, "f4")


def can_map(allocation: gpu_allocations.Allocation) -> bool:
    with gpu_allocations.mapped(allocation):
        return True


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", [1], indirect=True)
def test_results_leave_no_maps_in_the_way_of_others(gpus: Client) -> None:
    """Neither ours in the way of UCX's, which would end the worker, nor UCX's in the way of ours."""
    view.ask(gpus)
    random, kept = np.random.default_rng(3), []
    for elements in random.choice(SIZES, 60).tolist():  # memory is allocated in turn at many addresses
        block = gpus.submit(ones, elements, pure=False).result(60)
        assert block.sum() == elements
        if random.random() < 0.5:
            kept.append(block)
        if len(kept) > 6:
            kept.pop(random.integers(len(kept)))
        del block
        new = gpu_allocations.plain((elements,), np.dtype("f4"))
        assert all(gpus.run(can_map, gpu_allocations.behind(new)).values())


def refuse() -> None:
    def failing(*about: Any) -> None:
        raise OSError("resource already mapped")

    setattr(gpu_allocations, "_Map", failing)  # noqa: B010  mypy refuses the other way


def on_host(block: Any) -> np.ndarray:
    found: np.ndarray = block.get()
    return found


@pytest.mark.multigpu
@pytest.mark.parametrize("gpus", [2], indirect=True)
def test_a_block_that_a_neighbour_cannot_map_is_sent(gpus: Client) -> None:
    view.ask(gpus)
    giver, taker = gpus.scheduler_info()["workers"]

    def sent() -> np.ndarray:
        block = gpus.submit(ones, N * N, workers=[giver], pure=False)
        found: np.ndarray = gpus.submit(on_host, block, workers=[taker], pure=False).result(60)
        return found

    assert sent().sum() == N * N  # by a ticket
    gpus.run(gpu_allocations.drop_idle, -1.0)
    gpus.run(refuse, workers=[taker])
    for _ in range(2):  # the second time it is known
        assert sent().sum() == N * N
