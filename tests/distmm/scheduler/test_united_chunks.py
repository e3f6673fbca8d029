"""Products whose blocks are unions of the user's chunks, on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator

import dask.array as da
import numpy as np
import pytest
from distributed import Client, wait

import distmm
from distmm.clusters import view
from distmm.errors import InputError
from tests.bench.experiment.moved_bytes import moved_bytes, spent


@pytest.fixture(autouse=True)
def current(client: Client) -> Iterator[None]:
    view.ask(client)
    with client.as_current():
        yield


def placed(client: Client, persisted: bool, *arrays: da.Array) -> list[da.Array]:
    """Return the arrays, in the workers' memory if they are `persisted`."""
    if not persisted:
        return [*arrays]
    kept = client.persist(arrays)
    wait(kept)
    return [*kept]


@pytest.mark.minutes
@pytest.mark.parametrize("persisted", [True, False])
def test_many_small_chunks_are_multiplied_as_few_blocks_and_c_has_their_chunks(client: Client, persisted: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 10, (120, 90)).astype("f4"), rng.integers(-9, 10, (90, 100)).astype("f4")
    A, B = da.from_array(a, chunks=(12, (10, 20, 15, 25, 20))), da.from_array(b, chunks=((10, 20, 15, 25, 20), 10))
    A, B = placed(client, persisted, A, B)
    plan = distmm.plan(A, B)
    assert plan.schedule.chunks is not None
    assert plan.schedule.tasks < 50
    C = distmm.matmul(A, B)
    assert C.chunks == ((12,) * 10, (10,) * 10)
    before = moved_bytes(client)
    kept = client.persist(C)
    wait(kept)
    if persisted:  # views are taken where their blocks are
        assert moved_bytes(client) - before == plan.bytes_moved
    np.testing.assert_array_equal(kept[5:77, 3:].compute(), (a @ b)[5:77, 3:])
    np.testing.assert_array_equal(C.compute(), a @ b)
    np.testing.assert_array_equal(distmm.gemm(2, A, B, -1, a @ b), a @ b)
    np.testing.assert_array_equal(distmm.gram(A, trans=True).compute(), a.T @ a)
    np.testing.assert_array_equal(distmm.matmul(A, B).max(axis=1).compute(), (a @ b).max(axis=1))
    np.testing.assert_array_equal(distmm.matmul(distmm.matmul(A, B), b.T).compute(), a @ b @ b.T)
    masked = da.ma.masked_equal(A, 3)
    with pytest.raises(InputError, match="masked"):
        distmm.matmul(masked.map_blocks(lambda x: x, meta=np.empty((0, 0), "f4")), B).compute()


@pytest.mark.minutes
@pytest.mark.parametrize("persisted", [True, False])
def test_batched_products_of_small_chunks_have_few_blocks_and_the_users_chunks(client: Client, persisted: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 10, (3, 1, 60, 70)).astype("f4"), rng.integers(-9, 10, (4, 70, 50)).astype("f4")
    A, B = da.from_array(a, chunks=(2, 1, 10, (10, 25, 35))), da.from_array(b, chunks=(3, (10, 25, 35), 10))
    A, B = placed(client, persisted, A, B)
    plan = distmm.plan(A, B)
    assert plan.schedule.chunks is not None
    assert plan.schedule.tasks < 50
    C = distmm.matmul(A, B)
    assert C.chunks == ((2, 1), (3, 1), (10,) * 6, (10,) * 5)
    c, moved = spent(client, lambda: distmm.matmul(A, B))
    np.testing.assert_array_equal(c, a @ b)
    if persisted:  # chunks are read where they are, and not where the plan begins
        assert moved <= plan.bytes_moved + a.nbytes + b.nbytes
    for index in np.s_[0, 1, :5], np.s_[2:, ..., 7], np.s_[1, 1:, 20:30, 10:20]:
        np.testing.assert_array_equal(C[index].compute(), (a @ b)[index])
    np.testing.assert_array_equal(C.sum(axis=(0, 2)).compute(), (a @ b).sum(axis=(0, 2)))
    np.testing.assert_array_equal(distmm.gemm(2, A, B, -1, a @ b).compute(), a @ b)
    np.testing.assert_array_equal(distmm.einsum("...ij,...jk->...ki", A, B).compute(), (a @ b).swapaxes(-1, -2))
    np.testing.assert_array_equal(distmm.matmul(A, B[0, :, 0]).compute(), a @ b[0, :, 0])
    kept = client.persist(C)
    np.testing.assert_array_equal(kept[1, :, 3:].compute(), (a @ b)[1, :, 3:])


@pytest.mark.minutes
@pytest.mark.parametrize("persisted", [True, False])
def test_many_matrices_of_one_chunk_are_multiplied_in_few_stacks(client: Client, persisted: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 10, (8, 9, 20, 30)).astype("f8"), rng.integers(-9, 10, (9, 30, 10)).astype("f8")
    A, B = da.from_array(a, chunks=(1, 2, 20, 30)), da.from_array(b, chunks=(2, 30, 10))
    A, B = placed(client, persisted, A, B)
    plan = distmm.plan(A, B)
    assert plan.schedule.tasks < 20
    assert distmm.plan(A, B, plan=str(plan)).schedule == plan.schedule
    C = distmm.matmul(A, B)
    assert C.chunks == ((1,) * 8, (2, 2, 2, 2, 1), (20,), (10,))
    np.testing.assert_array_equal(C[3, 4:, 7].compute(), (a @ b)[3, 4:, 7])
    np.testing.assert_array_equal(C.mean(axis=(0, 3)).compute(), (a @ b).mean(axis=(0, 3)))
    np.testing.assert_array_equal(C.compute(), a @ b)
    np.testing.assert_array_equal(distmm.einsum("xyij,yjk->yxki", A, B).compute(), np.einsum("xyij,yjk->yxki", a, b))
    np.testing.assert_array_equal(client.persist(C)[2:4].compute(), (a @ b)[2:4])


@pytest.mark.minutes
def test_chunks_of_c_are_taken_from_its_blocks_where_these_are(client: Client) -> None:
    a = np.random.default_rng(0).integers(-9, 10, (480, 480)).astype("f8")
    A, B = placed(client, True, da.from_array(a, chunks=30), da.from_array(a + 1, chunks=30))
    plan = distmm.plan(A, B)
    assert plan.schedule.chunks is not None
    c, moved = spent(client, lambda: distmm.matmul(A, B))
    np.testing.assert_array_equal(c, a @ (a + 1))
    assert moved == plan.bytes_moved


@pytest.mark.minutes
@pytest.mark.parametrize("how", ["persisted", "lazy", "made from persisted ones"])
def test_many_small_chunks_of_a_block_come_in_one_array_of_each_worker(client: Client, how: str) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 10, (200, 160)).astype("f4"), rng.integers(-9, 10, (200, 120)).astype("f4")
    A, B = placed(client, how != "lazy", da.from_array(a.T, chunks=4), da.from_array(b, chunks=4))
    A, B = (A * 1, B * 1) if how == "made from persisted ones" else (A, B)
    plan = distmm.plan(A, B)
    assert plan.schedule.gathers(plan.problem, "cpu")
    kept = client.persist(distmm.matmul(A, B))
    wait(kept)
    np.testing.assert_array_equal(kept.compute(), a.T @ b)
    c, moved = spent(client, lambda: distmm.matmul(A, B).sum(axis=1))
    np.testing.assert_array_equal(c, (a.T @ b).sum(axis=1))
    if how == "persisted":
        assert moved <= plan.bytes_moved + (a.T @ b).nbytes
    np.testing.assert_array_equal(distmm.matmul(A, b[:, 0]).compute(), a.T @ b[:, 0])
    np.testing.assert_array_equal(distmm.gemm(1, A, B, transa=False).compute(), a.T @ b)
    np.testing.assert_array_equal(distmm.gram(B, trans=True).compute(), b.T @ b)
    np.testing.assert_array_equal(distmm.matmul(B.T, A.T).compute(), b.T @ a)
    del kept
