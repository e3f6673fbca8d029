"""Product tasks that Dask has fused with the tasks that read their blocks of C."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import dask
import dask.array as da
import numpy as np
import pytest
from dask.core import flatten
from distributed import Client, Event, wait
from distributed.scheduler import Scheduler

import distmm
from distmm import DoesNotFitError
from distmm.clusters import view
from distmm.graph.dask_tasks import ProductTask, Task, unfused
from distmm.planning import plan
from tests.distmm.scheduler.known import known
from tests.distmm.scheduler.streamed import BLOCK, EDGE, TEXT, enough, operands

ROWS, K, COLUMNS = 400, 30, 20
X = np.arange(ROWS * K).reshape(ROWS, K) % 7 - 3.0
W = np.arange(K * COLUMNS).reshape(K, COLUMNS) % 5 - 2.0


@pytest.fixture(autouse=True)
def current(client: Client) -> Iterator[None]:
    with client.as_current():
        yield


@pytest.fixture
def product(client: Client) -> da.Array:
    """A product of persisted rows: one short task for each block."""
    x, w = dask.persist(da.from_array(X, (50, K)), da.from_array(W, (K, COLUMNS)))
    wait((x, w))
    return distmm.matmul(x, w)


def placed(dask_scheduler: Scheduler) -> dict[object, tuple[int, str]]:
    """How many tasks follow in each product task, and its place."""
    plugin = dask_scheduler.plugins["distmm-placement"]
    return {
        key: (len(ts.run_spec.then), plugin.owner(ts.run_spec.placement))
        for key, ts in dask_scheduler.tasks.items()
        if isinstance(ts.run_spec, ProductTask)
    }


def test_a_short_task_goes_on_with_its_block_at_its_place(client: Client, product: da.Array) -> None:
    before = client.run_on_scheduler(placed)
    positive = (da.maximum(product, 0) + 1).persist()
    wait(positive)
    tasks = {key: task for key, task in client.run_on_scheduler(placed).items() if key not in before}
    assert tasks.keys() == set(flatten(positive.__dask_keys__()))  # no further task stands for a fused one
    owners = {key[1:]: (owner,) for key, (then, owner) in tasks.items() if then == 1}
    assert owners == {key[1:]: tuple(at) for key, at in client.who_has(positive).items()}
    assert not {key for key in known(client) if isinstance(key, tuple) and key[0] == product.name}
    np.testing.assert_array_equal(positive.compute(), np.maximum(X @ W, 0) + 1)
    np.testing.assert_array_equal(
        (da.maximum(product, 0) + 1).compute(), positive.compute()
    )  # its tasks are known already


def test_blocks_that_others_read_or_clients_keep_are_made_once(client: Client, product: da.Array) -> None:
    whole, most, least = dask.compute(product, product.max(axis=1), product.min())
    np.testing.assert_array_equal(whole, X @ W)
    np.testing.assert_array_equal(most, (X @ W).max(axis=1))
    assert least == (X @ W).min()


def test_a_product_reads_what_follows_another_product(client: Client, product: da.Array) -> None:
    again = distmm.matmul(da.maximum(product, 0), np.eye(COLUMNS))
    np.testing.assert_array_equal(again.compute(), np.maximum(X @ W, 0))
    total = distmm.gram(da.maximum(product, 0), trans=True)
    np.testing.assert_array_equal(total.compute(), np.maximum(X @ W, 0).T @ np.maximum(X @ W, 0))


def test_an_error_after_the_product_is_the_users_own(client: Client, product: da.Array) -> None:
    def broken(block: np.ndarray) -> np.ndarray:
        if block[0, 0] == (X @ W)[100, 0]:
            raise KeyError("broken block")
        return block

    with pytest.raises(KeyError, match="broken block"):
        product.map_blocks(broken, dtype=product.dtype, meta=np.empty((0, 0))).sum().compute()


def test_long_tasks_are_not_fused(client: Client, product: da.Array, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SHORT_SECONDS", 0.0)
    positive = da.maximum(product, 0).persist()
    wait(positive)
    assert not any(then for then, _ in client.run_on_scheduler(placed).values())


def test_tasks_are_not_fused_if_one_worker_makes_all_blocks(client: Client) -> None:
    x = client.persist(da.from_array(X, (50, K), name=False), workers=[min(client.scheduler_info()["workers"])])
    wait(x)
    before = client.run_on_scheduler(placed)
    positive = da.maximum(distmm.matmul(x, W), 0).persist()
    wait(positive)
    assert not any(then for key, (then, _) in client.run_on_scheduler(placed).items() if key not in before)
    np.testing.assert_array_equal(positive.compute(), np.maximum(X @ W, 0))


@pytest.fixture
def streamed(client: Client, memory: Callable[[int], None]) -> Callable[..., tuple[da.Array, np.ndarray]]:
    """Return a function that makes a product that does not fit, and its elements.

    Its chains have so many steps, and a worker has memory for so many more blocks than it needs.
    """

    def make(steps: int = 1, more: int = 0) -> tuple[da.Array, np.ndarray]:
        a, b = operands(steps * EDGE)
        memory(enough(TEXT, steps * EDGE) + more * BLOCK)
        view.ask(client)
        return distmm.matmul(a, b, plan=TEXT), a @ b

    return make


@pytest.mark.parametrize("steps", [1, 2])
def test_blocks_of_a_streamed_c_are_read_in_the_tasks_that_finish_them(
    client: Client, streamed: Callable[..., tuple[da.Array, np.ndarray]], steps: int
) -> None:
    before = client.run_on_scheduler(placed)
    C, expected = streamed(steps)
    sums = C.map_blocks(lambda block: block.sum(keepdims=True), chunks=(1, 1), dtype="f8", meta=C._meta).persist()
    wait(sums)
    fused = {key for key, (then, _) in client.run_on_scheduler(placed).items() if then and key not in before}
    assert fused == set(flatten(sums.__dask_keys__()))
    assert sums.sum().compute() == expected.sum()


@pytest.mark.parametrize("steps", [1, 2])
def test_two_graphs_that_are_computed_side_by_side_may_read_one_streamed_c(
    client: Client, streamed: Callable[..., tuple[da.Array, np.ndarray]], steps: int
) -> None:
    """Each graph makes all blocks. The second one arrives when tasks of the first one hold slots."""
    C, expected = streamed(steps)

    def most(block: np.ndarray) -> np.ndarray:
        Event("both").wait(60)
        return block.max(keepdims=True)

    like = {"chunks": (1, 1), "dtype": "f8", "meta": C._meta}
    first = client.persist(C.map_blocks(most, **like), priority=100)  # its tasks of all waves come first
    second = C.map_blocks(lambda block: block.min(keepdims=True), **like).persist()
    Event("both").set()
    wait((first, second), timeout=60)
    assert first.max().compute() == expected.max()
    assert second.min().compute() == expected.min()


@pytest.mark.parametrize(("more", "fits"), [(1, False), (2, True)])  # four blocks at a time, for two
def test_blocks_that_wait_for_what_fused_tasks_make_get_slots_if_they_fit(
    streamed: Callable[..., tuple[da.Array, np.ndarray]], more: int, fits: bool
) -> None:
    """A worker keeps three blocks of the first row until the maxima of all blocks are there."""
    C, expected = streamed(more=more)
    lazy = (C.blocks[0, :6] - C.max()).sum()
    if fits:
        assert lazy.compute() == expected[:EDGE, : 6 * EDGE].sum() - 6 * EDGE * EDGE * expected.max()
    else:
        with pytest.raises(DoesNotFitError, match="with 4 blocks of C in memory at a time"):
            lazy.compute()


def test_tasks_of_users_stay_as_they_are() -> None:
    for argument in ({}, {"a": 1}, {("a", 0): Task("a", operator.neg, 1)}, 3):
        task = Task("key", len, argument)
        assert unfused(task) is task
