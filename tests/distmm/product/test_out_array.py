"""Products into arrays that are there."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client, Scheduler, futures_of

import distmm
from distmm.errors import InputError
from distmm.graph.product_graph import ProductLayer
from distmm.transfer import lending, process_memory
from tests.until import until


def operands(m: int = 500, k: int = 300, n: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m)
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


@pytest.mark.parametrize("order", ["C", "F"])
def test_workers_write_into_a_numpy_array(client: Client, order: Any) -> None:
    a, b = operands()
    out = np.full((500, 400), np.nan, order=order)
    assert distmm.matmul(a, b, out=out, client=client, blocks=(128, 100, 150)) is out
    np.testing.assert_allclose(out, a @ b)


def test_a_view_with_gaps_is_filled_too(client: Client) -> None:
    a, b = operands()
    whole = np.zeros((500, 800))
    distmm.gemm(2, a, b, 3, np.ones((500, 400)), out=whole[:, ::2], client=client)
    np.testing.assert_allclose(whole[:, ::2], 2 * (a @ b) + 3)
    assert not whole[:, 1::2].any()


def test_blocks_come_to_the_client_where_workers_do_not_reach_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "allow", lambda: False)
    monkeypatch.delitem(lending._tried, client, raising=False)
    a, b = operands()
    out = np.zeros((500, 400))
    distmm.matmul(a, b, out=out, client=client, blocks=(128, 100, 150))
    np.testing.assert_allclose(out, a @ b)


def test_without_a_cluster_this_process_writes() -> None:
    a, b = operands(30, 20, 10)
    out = np.zeros((30, 10))
    distmm.matmul(a, b, out=out)
    np.testing.assert_allclose(out, a @ b)
    vector = np.zeros(30)
    distmm.matmul(a, b[:, 0], out=vector)
    np.testing.assert_allclose(vector, a @ b[:, 0])


def test_workers_write_into_a_zarr_array(client: Client, tmp_path: Path) -> None:
    a, b = operands()
    out = zarr.create_array(tmp_path / "c.zarr", shape=(500, 400), chunks=(128, 150), dtype="f8")
    distmm.matmul(a, b, out=out, client=client, blocks=(128, 100, 150))
    np.testing.assert_allclose(out[:], a @ b)


def test_an_out_that_cannot_take_the_product_is_refused_before_work() -> None:
    a, b = operands(30, 20, 20)
    read_only = np.zeros((30, 20))
    read_only.flags.writeable = False
    for out, reason in (
        (np.zeros((20, 30)), "give an out of that shape and type"),
        *((np.zeros((30, 20), to), "give an out of that shape and type") for to in ("i4", "O", "U40", "V8")),
        (read_only, "read-only"),
        (np.ma.array(np.zeros((30, 20)), mask=True, hard_mask=True), "soften_mask"),
        ([1, 2], "list without"),
        (a[:, ::-1], "shares memory with A"),
    ):
        with pytest.raises(InputError, match=reason):
            distmm.matmul(a, b, out=out)


# A Dask array as out


@pytest.fixture(name="D")
def uneven() -> da.Array:
    return da.zeros((30, 20), chunks=((8, 22), (10, 10)), dtype="f4")


def test_a_dask_array_becomes_the_lazy_product(D: da.Array) -> None:
    def never(block: np.ndarray) -> np.ndarray:
        raise AssertionError("computed")

    with dask.config.set(scheduler="synchronous"):
        before = D + 1
        a, b = operands(30, 40, 20)
        lazy = da.from_array(a, chunks=16).map_blocks(never, meta=np.empty((0, 0)))
        assert distmm.matmul(lazy, b, out=D) is D
        assert distmm.matmul(a, b, out=D) is D
        assert (D.shape, D.dtype, D.chunks) == ((30, 20), np.dtype("f4"), ((8, 22), (10, 10)))
        np.testing.assert_allclose(D.compute(), a @ b, rtol=1e-4, atol=1e-5)
        assert D[9:, 3].compute().dtype == np.float32
        np.testing.assert_array_equal(before.compute(), np.ones((30, 20)))  # made of what D was


def test_a_dask_array_may_be_an_operand_of_what_it_becomes() -> None:
    a, c = operands(20, 20, 20)
    D = da.from_array(c, chunks=7)
    with dask.config.set(scheduler="synchronous"):
        distmm.gemm(2, a, D, 3, D, out=D)
        np.testing.assert_allclose(D.compute(), 2 * a @ c + 3 * c)
        distmm.gram(D, out=D, trans=True)
        assert D.chunks == ((7, 7, 6), (7, 7, 6))
        np.testing.assert_allclose(D.compute(), (2 * a @ c + 3 * c).T @ (2 * a @ c + 3 * c), rtol=1e-10)


@pytest.mark.parametrize("lazy", ["", "A", "B"])
def test_its_chunks_are_the_blocks_where_the_operands_leave_them_free(lazy: str) -> None:
    a, b = operands(30, 40, 20)
    D = da.zeros((30, 20), chunks=((7, 8, 15), (12, 8)))
    A = da.from_array(a, chunks=((7, 8, 15), 16)) if lazy == "A" else a
    B = da.from_array(b, chunks=(16, (12, 8))) if lazy == "B" else b
    plan = distmm.plan(A, B, out=D)
    assert (plan.blocking.m, plan.blocking.n) == D.chunks
    assert plan.result == "workers"
    distmm.matmul(A, B, out=D)
    (made,) = (layer for name, layer in D.dask.layers.items() if name.startswith("distmm-matmul"))
    assert D.name in D.dask.layers
    assert made is D.dask.layers[D.name]  # not cut anew
    np.testing.assert_allclose(D.compute(scheduler="synchronous"), a @ b)


def test_a_product_that_is_cut_otherwise_is_cut_anew_into_its_chunks(D: da.Array) -> None:
    a, b = operands(30, 40, 20)
    distmm.matmul(da.from_array(a, chunks=16), da.from_array(b, chunks=(16, 5)), out=D)
    assert D.chunks == ((8, 22), (10, 10))
    np.testing.assert_allclose(D.compute(scheduler="synchronous"), a @ b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("edge", [8, 24])
def test_small_chunks_of_operands_are_united_for_a_dask_array_of_any_chunks(edge: int) -> None:
    a = np.random.default_rng(0).integers(-9, 9, (96, 96)).astype("f8")
    A, out = da.from_array(a, chunks=8), da.zeros((96, 96), chunks=edge)
    distmm.matmul(A, A, out=out)
    assert set(itertools.chain(*out.chunks)) == {edge}
    (products,) = (layer for layer in out.dask.layers.values() if isinstance(layer, ProductLayer))
    assert len(products) < 100
    np.testing.assert_array_equal(out.compute(), a @ a)


def test_vectors_and_batches_fill_dask_arrays_of_their_shape() -> None:
    rng = np.random.default_rng(2)
    for sa, sb in (((20, 9), (9,)), ((9,), (9, 20)), ((9,), (9,)), ((3, 4, 9), (9, 5))):
        a, b = rng.random(sa), rng.random(sb)
        D = da.zeros((a @ b).shape, chunks=3)
        chunks = D.chunks
        distmm.matmul(a, b, out=D)
        assert D.chunks == chunks
        np.testing.assert_allclose(D.compute(scheduler="synchronous"), a @ b)


def test_bools_become_numbers_as_in_numpy() -> None:
    a = np.ones((4, 5), bool)
    D = da.zeros((4, 4), chunks=2, dtype="i8")
    distmm.matmul(a, a.T, out=D)
    np.testing.assert_array_equal(D.compute(scheduler="synchronous"), np.ones((4, 4), "i8"))


def test_what_was_on_the_cluster_is_freed(client: Client) -> None:
    a, b = operands(60, 40, 50)
    D = client.persist(da.zeros((60, 50), chunks=20) + 1)
    client.gather(futures_of(D))
    old = D.name
    assert distmm.matmul(a, b, out=D, client=client) is D
    assert D.name != old
    np.testing.assert_allclose(client.compute(D, sync=True), a @ b)

    def left(dask_scheduler: Scheduler) -> int:
        return sum(isinstance(key, tuple) and key[0] == old for key in dask_scheduler.tasks)

    until(lambda: client.run_on_scheduler(left) == 0)


def test_a_dask_array_that_cannot_become_the_product_is_refused_and_left_as_it_is() -> None:
    a, b = operands(30, 20, 20)
    unknown = da.zeros(30, chunks=10)
    masked = da.zeros((30, 20), chunks=10).map_blocks(np.ma.masked_array, meta=np.ma.masked_array(np.empty((0, 0))))
    for out, reason in (
        (da.zeros((20, 30), chunks=10), r"out is \(20, 30\) float64, the product \(30, 20\) float64"),
        (da.zeros((30, 20), chunks=10, dtype="i4"), "int32, the product"),
        (unknown[unknown == 0], "give an out of that shape and type"),
        (masked, "out has blocks of type MaskedArray"),
    ):
        name = out.name
        with pytest.raises(InputError, match=reason):
            distmm.matmul(a, b, out=out)
        assert out.name == name
