"""`dask.graph_manipulation` copies products as it copies Dask's own, and copies are placed like other products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.graph_manipulation import bind, clone
from distributed import Client, Scheduler, wait

import distmm
from distmm.graph.product_graph import ProductLayer
from distmm.scheduler import dask_internals
from tests.tables import later

X = np.random.default_rng(1).integers(-9, 10, (60, 50)).astype("f4")
Y = np.random.default_rng(2).integers(-9, 10, (50, 70)).astype("f4")


def blocks(array: np.ndarray) -> da.Array:
    return da.from_array(array, chunks=20, name=False)


MADE: dict[str, Callable[[Client, da.Array], tuple[Any, np.ndarray]]] = {
    "matmul": lambda client, A: (distmm.matmul(A, blocks(Y), client=client), X @ Y),
    "of cut blocks": lambda client, A: (distmm.matmul(A, Y, client=client, blocks=(30, 25, 35)), X @ Y),
    "of a slice": lambda client, A: (distmm.matmul(A[7:], blocks(Y), client=client), X[7:] @ Y),
    "gram": lambda client, A: (distmm.gram(A, client=client), X @ X.T),
    "times a vector": lambda client, A: (distmm.matmul(A, Y[:, 0], client=client), X @ Y[:, 0]),
    "reduced": lambda client, A: (distmm.reduce(A, blocks(Y), "max", client=client), (X @ Y).max(axis=1)),
    "of a product": lambda client, A: (
        distmm.matmul(distmm.matmul(A, blocks(Y), client=client), Y.T, client=client), X @ Y @ Y.T,
    ),
}  # fmt: skip


@pytest.mark.parametrize("made", later(MADE))
def test_clone_and_bind_compute_what_the_product_is(client: Client, made: str) -> None:
    A = blocks(X)
    C, expected = MADE[made](client, A)
    parent = da.ones(4, chunks=2)
    copies = [clone(C), clone(C, omit=A), bind(C, parent), bind(C, parent, omit=A), clone(clone(C))]
    assert len({C.name, *(each.name for each in copies)}) == 1 + len(copies)
    for result in client.gather(client.compute([*copies, C])):
        np.testing.assert_array_equal(result, expected)


def test_a_copied_product_shares_only_what_is_omitted() -> None:
    A = blocks(X)
    C = distmm.matmul(A, A.T, blocks=(20, 20, 20))
    all_keys = set(C.dask.to_dict())
    assert not all_keys & set(clone(C).dask.to_dict())
    assert all_keys & set(clone(C, omit=A).dask.to_dict()) == set(A.dask.to_dict())


def test_a_bound_product_of_omitted_operands_waits_for_its_parent() -> None:
    A, B = blocks(X), blocks(Y)
    C = distmm.matmul(A, B, blocks=(20, 20, 20))
    done = []
    parent = dask.delayed(lambda: done.append("parent"))()
    with dask.config.set(scheduler="sync"):
        bound = bind(C, parent, omit=[A, B])
        layer = bound.dask.layers[bound.name]
        firsts = [task for task in layer.values() if task.is_first]
        assert firsts
        assert all(len(task.dependencies) == 1 + 2 for task in firsts)
        np.testing.assert_array_equal(bound.compute(), X @ Y)
    assert done == ["parent"]


def test_the_copy_of_a_product_is_made_on_the_scheduler_and_placed(client: Client) -> None:
    A = blocks(X)
    C = distmm.matmul(A, Y, client=client, blocks=(20, 20, 20))
    copy = clone(C, omit=A)
    assert not any(layer.is_materialized() for layer in copy.dask.layers.values() if isinstance(layer, ProductLayer))
    kept = client.persist(copy)
    with client.as_current():
        wait(kept)

    def owners(dask_scheduler: Scheduler) -> dict[Any, tuple[str, bool]]:
        tasks = [ts for ts in dask_scheduler.tasks.values() if ts.key[0] == name]
        return {ts.key[1:]: (next(iter(ts.who_has)).address, dask_internals.is_placed(ts)) for ts in tasks}

    name = copy.name
    found = client.run_on_scheduler(owners)
    assert len(found) == 12
    assert all(placed for _, placed in found.values())
    assert len({address for address, _ in found.values()}) == 4
