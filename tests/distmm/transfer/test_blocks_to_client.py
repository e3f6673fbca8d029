"""The client reads results in the memory of the workers of its own machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from distributed import Client, LocalCluster

import distmm
from distmm.all_workers import everywhere
from distmm.clusters import cluster as cluster_calls
from distmm.transfer import blocks_to_client, client_array, process_memory
from tests import forked

pytestmark = pytest.mark.skipif(not process_memory.allow(), reason="this system shares no memory of processes")


@pytest.fixture(scope="module")
def near() -> Iterator[Client]:
    """A client as those of `clusters.local`."""
    with (
        forked.workers(),
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit="1GiB", dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False, direct_to_workers=True) as client,
    ):
        cluster_calls.install(client)
        blocks_to_client.offer(client)
        yield client


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that this process has read from others, read by read."""
    found: list[int] = []
    read = process_memory.read

    def counted(pid: int, theirs: process_memory.Rows, ours: int) -> None:
        found.append(len(theirs[0]) * theirs[1])
        read(pid, theirs, ours)

    monkeypatch.setattr(process_memory, "read", counted)
    return found


def made(shape: tuple[int, ...], dtype: Any, order: Any = "C") -> np.ndarray:
    return np.asarray(np.arange(np.prod(shape)).reshape(shape) % 251, dtype, order=order)


SIDE = 1024  # of matrices of a megabyte and more


@pytest.mark.parametrize(
    ("shape", "dtype", "order"),
    [
        ((SIDE, SIDE), "f4", "C"),
        ((SIDE, SIDE), "c16", "F"),
        ((SIDE, 2 * SIDE), ml_dtypes.bfloat16, "C"),
        ((SIDE * SIDE,), "i8", "C"),
        ((4, SIDE, SIDE), "f2", "C"),
    ],
)
def test_large_arrays_are_read_where_they_are(
    near: Client, bytes_read: list[int], shape: tuple[int, ...], dtype: Any, order: Any
) -> None:
    expected = made(shape, dtype, order)
    got = near.submit(made, shape, dtype, order, pure=False).result()
    assert (got.dtype, got.shape, got.flags.writeable) == (expected.dtype, shape, True)
    np.testing.assert_array_equal(got, expected)
    assert expected.nbytes in bytes_read


@pytest.mark.parametrize(
    "make",
    [
        lambda: made((8, 8), "f8"),
        lambda: made((SIDE, SIDE), "f8")[::2, ::2],
        lambda: made((4, SIDE, SIDE), "f4", "F"),
        lambda: made((SIDE, SIDE), ">f8"),
        lambda: "x",
    ],
)
def test_other_results_come_as_dask_sends_them(near: Client, bytes_read: list[int], make: Any) -> None:
    assert np.array_equal(near.submit(make, pure=False).result(), make())
    assert not bytes_read


def test_products_come_this_way(near: Client, bytes_read: list[int]) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-9, 9, (2, 600, 600)).astype("f8")
    with near.as_current():
        np.testing.assert_array_equal(distmm.matmul(a, b, blocks=(200, 300, 200)).compute(), a @ b)
    assert max(bytes_read) == a.nbytes


def test_where_a_read_fails_the_result_comes_through_the_scheduler(
    near: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise OSError("out of reach")

    monkeypatch.setattr(process_memory, "read", fails)
    got = near.submit(made, (SIDE, SIDE), "f4", pure=False).result()
    np.testing.assert_array_equal(got, made((SIDE, SIDE), "f4"))


def test_addresses_are_not_sent_through_the_scheduler(near: Client, bytes_read: list[int]) -> None:
    """It would answer the worker at once, which may then free the array before the client has read it."""
    future = near.submit(made, (SIDE, SIDE), "f4", pure=False)
    np.testing.assert_array_equal(near.gather(future, direct=False), made((SIDE, SIDE), "f4"))
    assert not bytes_read


def test_a_worker_whose_memory_was_not_tried_sends_no_addresses(
    near: Client, bytes_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere(near, blocks_to_client._set_offering, False)
    try:
        monkeypatch.setattr(process_memory, "can_read", lambda *place: False)
        blocks_to_client.offer(near)
        got = near.submit(made, (SIDE, SIDE), "f4", pure=False).result()
        np.testing.assert_array_equal(got, made((SIDE, SIDE), "f4"))
        assert not bytes_read
    finally:
        everywhere(near, blocks_to_client._set_offering, True)


def test_errors_of_tasks_and_arrays_to_workers_come_as_before(near: Client) -> None:
    with pytest.raises(ZeroDivisionError):
        near.submit(lambda: 1 // 0, pure=False).result()
    large = made((SIDE, SIDE), "i8")
    assert large.nbytes >= client_array.SMALLEST
    (sent,) = near.scatter([large], direct=True)
    assert near.submit(np.sum, sent).result() == large.sum()
