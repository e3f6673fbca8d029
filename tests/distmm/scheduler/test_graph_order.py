"""The order of the tasks of a graph whose chunks of C are views of its blocks."""

from __future__ import annotations

import dask
import dask.array as da
import dask.order
import numpy as np
import pytest
from distributed import Client, LocalCluster, futures_of, wait

import distmm
from distmm.graph.dask_tasks import is_chunk_of_c, needs
from distmm.scheduler import dask_extensions

CHUNKS, EDGE = 8, 4


@pytest.fixture(scope="module")
def client():
    """One worker, for which chunks are united."""
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def operands() -> tuple[da.Array, da.Array]:
    """Two matrices of lazy chunks, each a task that reads nothing."""
    ones = np.ones((EDGE, EDGE), "f4")
    rows, columns = (EDGE,) * CHUNKS, (EDGE,) * CHUNKS
    return tuple(
        da.map_blocks(lambda number: number * ones, np.float32(number), chunks=(rows, columns), dtype="f4")
        for number in (2, 3)
    )


def made(array: da.Array) -> dict:
    """The tasks of an array, as the scheduler gets them."""
    return dict(dask.optimize(array)[0].dask)


@pytest.mark.parametrize("of", ["C", "C + 1", "C.prod(axis=1)", "C and C + 1"])
def test_every_task_comes_after_what_it_reads_and_dask_orders_no_chunk_of_c_that_nothing_else_waits_for(
    client: Client, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    C = distmm.matmul(*operands(), client=client)
    asked = {"C": C, "C + 1": C + 1, "C.prod(axis=1)": C.prod(axis=1), "C and C + 1": da.stack([C, C + 1])}[of]
    graph, seen, dasks_order = made(asked), [], dask_extensions._dasks_order
    views = [key for key, task in graph.items() if is_chunk_of_c(task)]
    assert len(views) == CHUNKS**2

    monkeypatch.setattr(dask_extensions, "_dasks_order", lambda dsk: seen.append(dsk) or dasks_order(dsk))
    found = dask_extensions.order(graph)
    assert found.keys() == graph.keys()
    for key in graph:
        assert all(found[each] <= found[key] for each in needs(graph, key))
    left = seen[0].keys() & set(views)
    assert len(left) == (0 if of in ("C", "C + 1") else len(views))


@pytest.mark.parametrize("of", ["C + 1", "C.sum() and C.max()"])  # with and without views
def test_dask_orders_the_tasks_of_a_product_without_the_chunks_in_memory_that_they_read(
    client: Client, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    A, B = client.persist(operands())
    wait([A, B])
    in_memory = {future.key for future in futures_of([A, B])}
    seen, dasks_order = [], dask_extensions._dasks_order
    monkeypatch.setattr(dask_extensions, "_dasks_order", lambda dsk: seen.append(dsk) or dasks_order(dsk))
    C = distmm.matmul(A, B, client=client)
    element, side = 6 * CHUNKS * EDGE, CHUNKS * EDGE
    if of == "C + 1":
        array, expected = C + 1, np.full((side, side), element + 1)
    else:
        array, expected = da.stack([C.sum(), C.max()]), np.array([element * side**2, element])
    np.testing.assert_array_equal(client.compute(array).result(), expected)
    products = [graph for graph in seen if any(str(key).find("distmm-matmul") >= 0 for key in graph)]
    assert products
    for graph in products:
        assert not any(needs(graph, key) & in_memory for key in graph)


def test_graphs_without_products_are_ordered_as_dask_orders_them() -> None:
    A, B = operands()
    for array in (da.matmul(A, B), A.T + B, A.sum()):
        assert dask_extensions.order(made(array)) == dask_extensions._dasks_order(made(array))


def test_the_scheduler_gives_chunks_of_c_the_places_of_their_blocks(client: Client) -> None:
    C = distmm.matmul(*operands(), client=client).persist()
    wait(C)
    places = {
        key: (ts.priority, [each.priority for each in ts.dependencies])
        for key, ts in client.cluster.scheduler.tasks.items()
        if is_chunk_of_c(ts.run_spec)
    }
    assert len(places) == CHUNKS**2
    assert all(own[-1] == block[-1] for own, (block,) in places.values())
    np.testing.assert_array_equal(C.compute(), np.full((CHUNKS * EDGE,) * 2, 6 * CHUNKS * EDGE, "f4"))
