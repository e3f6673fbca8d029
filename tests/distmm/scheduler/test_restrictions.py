"""The user's `workers=`, `resources=` and annotations are obeyed, or a product is refused alone and by name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, Worker

import distmm
from distmm.all_workers import workers_of
from distmm.scheduler.plugin import PlacementPlugin
from tests.distmm.scheduler.streamed import left
from tests.until import until

STEPS = r"distmm-(matmul|step|sum)-"


def operands(seed: int) -> tuple[da.Array, da.Array, np.ndarray]:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-9, 10, (60, 50)).astype("f4"), rng.integers(-9, 10, (50, 70)).astype("f4")
    return da.from_array(a, chunks=20), da.from_array(b, chunks=20), a @ b


def product(client: Client, seed: int) -> tuple[da.Array, np.ndarray]:
    a, b, expected = operands(seed)
    return distmm.matmul(a, b, client=client, blocks=(20, 20, 20)), expected


def ran(client: Client) -> set[str]:
    """Workers that have run product tasks, since the last call."""

    def steps(dask_worker: Worker) -> bool:
        log = [entry for entry in dask_worker.state.log if entry[1:3] == ("executing", "memory")]
        found = any(re.match(STEPS, str(key[0])) for key, *_ in log)
        dask_worker.state.log.clear()
        return found

    return {address for address, found in client.run(steps).items() if found}


@pytest.fixture
def workers(client: Client) -> list[str]:
    ran(client)
    return sorted(workers_of(client))


async def offer(amount: int, dask_worker: Worker) -> None:
    await dask_worker.set_resources(TESTED=amount)


@pytest.fixture
def owners(client: Client, workers: list[str]) -> Iterator[list[str]]:
    """Two workers that have a resource."""
    client.run(offer, 1, workers=workers[1:3])
    yield workers[1:3]
    client.run(offer, 0, workers=workers[1:3])


def test_persist_on_some_workers_uses_these_alone(client: Client, workers: list[str]) -> None:
    C, expected = product(client, 1)
    kept = client.persist(C, workers=workers[1:3])
    np.testing.assert_array_equal(client.compute(kept).result(timeout=60), expected)
    assert ran(client) == set(workers[1:3])


@pytest.mark.parametrize("loose", [False, True])
def test_a_preferred_worker_that_is_there_is_used(client: Client, workers: list[str], loose: bool) -> None:
    C, expected = product(client, 2 + loose)
    kept = client.persist(C, workers=workers[3], allow_other_workers=loose)
    np.testing.assert_array_equal(client.compute(kept).result(timeout=60), expected)
    assert ran(client) == {workers[3]}


@pytest.mark.parametrize("how", ["persist", "annotated", "filled"])
def test_resources_are_obeyed(client: Client, owners: list[str], how: str) -> None:
    if how == "persist":
        C, expected = product(client, 4)
        result = client.persist(C, resources={"TESTED": 1})
    else:
        with dask.annotate(resources={"TESTED": 1}):  # Dask's own optimisation of arrays drops it
            C, expected = product(client, 5 if how == "filled" else 6)
        result = C.persist(scheduler=client) if how == "annotated" else C
    with client.as_current():
        np.testing.assert_array_equal(result.compute(), expected)
    assert ran(client) == set(owners)


def test_an_annotated_operand_is_loaded_where_its_annotation_says(client: Client, workers: list[str]) -> None:
    a, b, expected = operands(7)
    with dask.config.set({"optimization.fuse.active": False}):  # which keeps Dask's annotations
        with dask.annotate(workers=[workers[2]]):
            a = a.map_blocks(lambda block: block + 1, name="annotated")
        C = client.persist(distmm.matmul(a, b, client=client, blocks=(20, 20, 20)), optimize_graph=False)
    np.testing.assert_array_equal(client.compute(C).result(timeout=60), expected + b.sum(axis=0).compute())
    loaded = client.run(
        lambda dask_worker: [e for e in dask_worker.state.log if "annotated" in str(e[0]) and "executing" in e]
    )
    assert {address for address, entries in loaded.items() if entries} == {workers[2]}


@pytest.mark.parametrize(
    "how", [{"resources": {"NOBODY_HAS": 1}}, {"workers": "tcp://127.0.0.1:1"}, {"resources": {"TESTED": 2}}], ids=str
)
def test_what_no_worker_satisfies_is_refused_by_name_and_other_products_go_on(
    client: Client, owners: list[str], how: dict
) -> None:
    before = client.run_on_scheduler(left)  # of calls that failed in other tests, whose errors are garbage
    other, expected = product(client, 8)
    C, _ = product(client, sum(map(ord, str(how))))  # Dask remembers failed tasks
    under_way = client.compute(other)
    with pytest.raises(distmm.InputError, match=next(iter(how)) + "=.*none of the 4 workers"):
        client.compute(C, **how).result(timeout=60)
    np.testing.assert_array_equal(under_way.result(timeout=60), expected)
    del under_way
    until(lambda: client.run_on_scheduler(left) <= before)


@pytest.mark.parametrize("how", [{"resources": {"NOBODY_HAS": 1}}, {"workers": "tcp://127.0.0.1:1"}], ids=str)
def test_operands_of_a_refused_product_can_be_read_by_another_one(client: Client, how: dict) -> None:
    a, b, expected = operands(sum(map(ord, str(how))) + 1)
    a = a + 1  # two tasks a block
    refused = client.compute(distmm.matmul(a, b, client=client), **how)
    assert isinstance(refused.exception(timeout=60), distmm.InputError)
    C = distmm.gemm(2, a, b, client=client, blocks=(20, 20, 20))  # while a future keeps the failed tasks
    np.testing.assert_array_equal(client.compute(C).result(timeout=60), 2 * (expected + b.sum(axis=0).compute()))


def test_a_product_refused_for_its_annotation_runs_without_it_while_a_future_keeps_the_failed_tasks(
    client: Client,
) -> None:
    with dask.annotate(resources={"NOBODY_HAS": 1}):
        refused = client.compute(product(client, 9)[0])
    assert isinstance(refused.exception(timeout=60), distmm.InputError)
    C, expected = product(client, 9)
    np.testing.assert_array_equal(client.compute(C).result(timeout=60), expected)


def test_a_product_that_does_not_fit_on_the_workers_left_is_refused(client: Client, workers: list[str]) -> None:
    memory = min(info["memory_limit"] for info in client.scheduler_info()["workers"].values())
    n = int((memory / 4 / 2.2) ** 0.5) // 4 * 4  # float32: C takes 0.45 of the memory of each worker
    big = da.ones((2 * n, 64), chunks=(n // 2, 64), dtype="f4")
    C = distmm.matmul(big, big.T, client=client)
    with pytest.raises(distmm.DoesNotFitError, match="on each of 1 workers"):
        client.compute(C.sum(), workers=workers[:1]).result(timeout=60)


def test_a_fault_in_one_graph_ends_its_product_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    good, expected = product(client, 10)
    bad, _ = product(client, 11)
    arrive = PlacementPlugin._arrive

    def broken(self: PlacementPlugin, wanted: set[object]) -> None:
        if any(bad.name in str(key) for key in wanted):
            raise KeyError("GPU")
        arrive(self, wanted)

    monkeypatch.setattr(PlacementPlugin, "_arrive", broken)  # the scheduler runs in this process
    first = client.persist(good)
    with pytest.raises(RuntimeError, match="KeyError: 'GPU'"):
        client.compute(client.persist(bad)).result(timeout=60)
    np.testing.assert_array_equal(client.compute(first).result(timeout=60), expected)
