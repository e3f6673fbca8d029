"""The graph of a product of this process's arrays is made when something reads it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.graph_manipulation import clone
from dask.highlevelgraph import HighLevelGraph
from distributed import Client

import distmm
from distmm.graph import product_graph
from distmm.graph.later_graph import LaterGraph, with_graph
from distmm.product import one_task
from tests.distmm.product.small_products import PRODUCTS, A, B


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the products whose graphs have been made."""
    names: list[str] = []
    build = product_graph.build

    def noted(name: str, *how: Any, **more: Any) -> HighLevelGraph:
        names.append(name)
        return build(name, *how, **more)

    monkeypatch.setattr(product_graph, "build", noted)
    return names


@pytest.mark.parametrize("with_client", [False, True])
def test_a_short_product_that_is_computed_here_makes_none(
    client: Client, made: list[str], monkeypatch: pytest.MonkeyPatch, with_client: bool
) -> None:
    monkeypatch.setattr(one_task, "SHORT_SECONDS", 0.01)
    with client.as_current() if with_client else dask.config.set(scheduler="threads"):
        C = distmm.matmul(A, B)
        np.testing.assert_array_equal(C.compute(), A @ B)
        assert (C.shape, C.dtype, C.numblocks) == ((48, 48), np.dtype("f8"), (1, 1))
    assert not made


READERS: dict[str, Callable[[da.Array], Any]] = {
    "persist": lambda C: C.persist().compute(),
    "an expression": lambda C: (C + 0).compute(),
    "a sum over rows": lambda C: np.broadcast_to(C.sum(axis=0).compute(), C.shape),
    "pickle": lambda C: pickle.loads(pickle.dumps(C)).compute(scheduler="synchronous"),
    "clone": lambda C: clone(C).compute(),
    "dask.compute": lambda C: dask.compute(C)[0],
    "optimize": lambda C: dask.optimize(C)[0].compute(),
    "copy": lambda C: C.copy().compute(),
    "delayed": lambda C: np.block([[part.compute() for part in row] for row in C.to_delayed().tolist()]),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_reads_it_makes_it_once(made: list[str], reader: str) -> None:
    C = distmm.matmul(A, B)
    expected = A @ B
    np.testing.assert_array_equal(READERS[reader](C), expected if "sum" not in reader else expected.sum(axis=0) + 0 * A)
    assert made == [C.name]
    assert len(C.dask.layers) > 0
    assert len(made) == 1


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_a_cluster_are_right_in_expressions(client: Client, name: str) -> None:
    multiply, expected = PRODUCTS[name]
    with client.as_current():
        np.testing.assert_array_equal((multiply() + 0).compute(), expected)


def test_annotations_are_those_of_the_call() -> None:
    with dask.annotate(priority=7):
        C = distmm.matmul(A, B)
    with dask.annotate(priority=1, retries=3):
        layers = C.dask.layers
    assert layers[C.name].annotations == {"priority": 7}


def test_a_client_that_is_closed_by_then_is_not_asked(client: Client) -> None:
    a = np.ones((700, 700))  # lent to workers, if there is a client
    with Client(client.scheduler.address, set_as_default=False) as other:
        C = distmm.matmul(a, a, client=other)
    np.testing.assert_array_equal((C + 0).compute(scheduler="threads"), a @ a)


def test_threads_that_read_it_at_once_find_one_graph() -> None:
    graphs = [HighLevelGraph({f"x-{n}": {(f"x-{n}", 0): n}}, {f"x-{n}": set()}) for n in range(8)]
    coming = iter(graphs)
    graph = LaterGraph(lambda: next(coming))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda at: dict(graph.layers) if at % 2 else dict(graph.dependencies), range(64)))
    assert {name for each in found for name in each} == {"x-0"}
    assert next(coming) is graphs[1]


def test_it_is_tried_again_after_an_error() -> None:
    tries = iter([ValueError("not yet"), None])

    def make() -> HighLevelGraph:
        if (error := next(tries)) is not None:
            raise error
        return HighLevelGraph({"x": {("x", 0): np.ones(3)}}, {"x": set()})

    array = with_graph(LaterGraph(make), da.Array, "x", ((3,),), meta=np.empty(0))
    with pytest.raises(ValueError, match="not yet"):
        array.compute()
    np.testing.assert_array_equal(array.compute(), np.ones(3))
