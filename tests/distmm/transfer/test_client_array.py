"""Arrays in the client's memory, which workers read and write without a copy through the scheduler."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from distributed import Client, LocalCluster, Scheduler, wait

import distmm
from distmm import transfer
from distmm.errors import InputError
from distmm.transfer import ClientArray, lending, process_memory, shared_memory
from tests.distmm.scheduler.known import known
from tests.open_loans import open_loans
from tests.until import until


@pytest.fixture(scope="module")
def other() -> Iterator[Any]:
    """Another process of the same user, which stands for a worker."""
    process_memory.allow()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


def read(array: ClientArray, index: tuple[slice, ...]) -> np.ndarray:
    return array[index]


def write(array: ClientArray, index: tuple[slice, ...], block: np.ndarray) -> None:
    array[index] = block


def numbers(shape: tuple[int, ...], dtype: Any = "f8") -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": lambda a: a,
    "transposed": lambda a: a.swapaxes(-1, -2),
    "rows from the last": lambda a: a[..., ::-1, :],
    "columns of a wider one": lambda a: a[..., 3:11],
    "columns first": lambda a: a.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "one row for all": lambda a: np.broadcast_to(a[..., :1, :], a.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(40, 30), (3, 40, 30), (1, 30), (30, 1)])
@pytest.mark.parametrize("shared", [False, True])
def test_another_process_reads_any_layout(other: Any, layout: str, shape: tuple[int, ...], shared: bool) -> None:
    whole = transfer.empty(shape) if shared else np.empty(shape)
    whole[...] = numbers(shape)
    array = LAYOUTS[layout](whole)
    index = tuple(slice(n // 3, n - n // 4) for n in array.shape)
    np.testing.assert_array_equal(other.apply(read, (ClientArray.of(array), index)), array[index])


@pytest.mark.parametrize(
    ("part", "dimensions"),
    [
        (np.s_[:], 2),
        (np.s_[1:3], 2),
        (np.s_[:, 1:4], 2),
        (np.s_[:, :, 2:5], 2),
        (np.s_[:, :, :, 1:5], 2),
        (np.s_[:, 1:4, :, 1:5], 3),
        (np.s_[:, ::-1], 3),
        (np.s_[2:3, :, :, :1], 2),
    ],
)
def test_boxes_are_copied_in_as_few_pieces_as_their_strides_allow(other: Any, part: Any, dimensions: int) -> None:
    box = numbers((3, 4, 6, 7))[part]
    lent = ClientArray.of(box)
    assert lent.merged().ndim == dimensions
    np.testing.assert_array_equal(other.apply(read, (lent, (slice(None),) * 4)), box)


@pytest.mark.parametrize("layout", ["as it is", "transposed", "rows from the last", "columns of a wider one"])
def test_another_process_writes_a_block_and_nothing_else(other: Any, layout: str) -> None:
    array = LAYOUTS[layout](np.zeros((40, 30)))
    index = (slice(4, 20), slice(2, 7))
    expected = array.copy()
    expected[index] = numbers((16, 5))
    other.apply(write, (ClientArray.of(array), index, numbers((16, 5))))
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("dtype", ["?", "i1", "f2", ml_dtypes.bfloat16, "c16"])
def test_elements_of_any_type_arrive(other: Any, dtype: Any) -> None:
    array = numbers((20, 30), "i1").astype(dtype)
    block = other.apply(read, (ClientArray.of(array), (slice(3, 9), slice(4, 30))))
    assert block.dtype == array.dtype
    np.testing.assert_array_equal(block, array[3:9, 4:])


def test_rows_longer_than_a_piece_are_cut(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "PIECE", 1000)
    array = numbers((7, 900))
    mine = np.zeros((5, 700))
    part = ClientArray.of(array).part((slice(1, 6), slice(100, 800)))
    process_memory.read(os.getpid(), part.rows(), mine.ctypes.data)
    np.testing.assert_array_equal(mine, array[1:6, 100:800])


def test_memory_that_is_gone_is_an_error_and_not_a_result(other: Any) -> None:
    with pytest.raises(OSError, match="out of reach"):
        process_memory.read(2**22 + 1, (np.array([4096]), 8), np.zeros(1).ctypes.data)
    with pytest.raises(OSError, match="out of reach"):
        process_memory.read(os.getpid(), (np.array([4096]), 8), np.zeros(1).ctypes.data)
    assert not other.apply(process_memory.can_read, (os.getpid(), 4096, b"x" * 32))
    pid, address, secret = process_memory.proof()
    assert other.apply(process_memory.can_read, (pid, address, secret))
    assert not other.apply(process_memory.can_read, (pid, address, bytes(32)))


def test_a_process_of_the_same_number_on_another_machine_is_not_read(other: Any) -> None:
    array = ClientArray.of(numbers((20, 30)))
    index = (slice(0, 20), slice(0, 30))
    elsewhere = replace(array, proof=(*array.proof[:2], bytes(32)))  # the bytes at the address differ from the proof
    for access in (partial(other.apply, read, (elsewhere, index)), partial(other.apply, write, (elsewhere, index, 0))):
        with pytest.raises(InputError, match=f"process {os.getpid()} is out of reach of this worker"):
            access()
    np.testing.assert_array_equal(other.apply(read, (array, index)), numbers((20, 30)))


@pytest.fixture
def no_kernel_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if this process uses `process_vm_readv` or `process_vm_writev`, also on itself."""
    monkeypatch.setattr(process_memory, "_copy_pieces", lambda *about: pytest.fail(f"{about[0]} was called"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f8", ml_dtypes.bfloat16])
def test_a_process_copies_its_own_memory_without_process_vm_readv(
    layout: str, dtype: Any, no_kernel_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "PIECE", 100)  # bytes, so that several threads copy
    array = LAYOUTS[layout](numbers((3, 40, 30), "i1").astype(dtype))
    part, swapped = ClientArray.of(array).part((slice(0, 2), slice(3, 20), slice(1, 8))).with_contiguous_rows()
    staged = np.empty(part.shape, dtype)
    part.read_into(staged)
    expected = array[0:2, 3:20, 1:8]
    np.testing.assert_array_equal(staged.swapaxes(-1, -2) if swapped else staged, expected)
    if layout != "one row for all":
        part.write_from(np.zeros(part.shape, dtype))
        assert not array[0:2, 3:20, 1:8].any()
        assert array.any()


def test_a_worker_in_the_clients_process_copies_without_process_vm_readv(no_kernel_copies: None) -> None:
    a, b = np.random.default_rng(6).integers(-9, 9, (2, 400, 400)).astype("f8")
    c = np.empty((400, 400))
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        assert transfer.share(a, client) is not None
        distmm.matmul(a, b, out=c, client=client)
    np.testing.assert_array_equal(c, a @ b)


def test_a_process_of_this_number_on_another_machine_is_not_taken_for_this_one() -> None:
    elsewhere = replace(ClientArray.of(numbers((20, 30))), proof=(os.getpid(), 4096, bytes(32)))
    for access in (partial(read, elsewhere), partial(write, elsewhere, block=0)):
        with pytest.raises(InputError, match=f"process {os.getpid()} is out of reach of this worker"):
            access(index=(slice(0, 20), slice(0, 30)))


def test_shared_memory_is_freed_with_its_last_view() -> None:
    array = transfer.empty((100, 100), "f4")
    view = array[10:20].T
    segment = shared_memory.behind(view)
    assert segment is not None
    assert segment.is_there()
    assert shared_memory.behind(np.zeros(3)) is None
    del array
    assert segment.is_there()
    del view
    gc.collect()
    assert not segment.is_there()


def memory_files() -> int:
    """How many memory files of distmm this process has open. Other threads may open and close other files."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(name.startswith("/memfd:distmm") for name in names)


@pytest.mark.parametrize("shape", [(-1, 4), (2**40, 2**40)])
def test_shared_memory_that_cannot_be_made_leaves_no_open_file(shape: tuple[int, int]) -> None:
    before = memory_files()
    with pytest.raises((ValueError, OverflowError)):
        transfer.empty(shape)
    assert memory_files() <= before


def test_only_blocks_with_step_1_are_read() -> None:
    with pytest.raises(IndexError, match="step 1"):
        ClientArray.of(np.zeros((4, 4)))[::2, :]


def nothing_is_kept() -> bool:
    gc.collect()
    return not open_loans()


def largest(client: Client, others: set[object]) -> int:
    """Bytes of the largest task that the scheduler knows, `others` left out: those belong to other tests."""

    def pickled(dask_scheduler: Scheduler) -> int:
        return max(len(pickle.dumps(ts.run_spec)) for key, ts in dask_scheduler.tasks.items() if key not in others)

    found: int = client.run_on_scheduler(pickled)
    return found


@pytest.mark.parametrize("given", ["NumPy arrays", "Dask arrays of them", "computed from these"])
def test_numpy_operands_do_not_pass_through_the_scheduler(client: Client, given: str) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((600, 400)), rng.standard_normal((500, 400))
    A, B = (a, b) if given == "NumPy arrays" else (da.from_array(x, chunks=(250, 400)) for x in (a, b))
    A = A.rechunk((100, 200)) * 1 if given == "computed from these" else A
    others = known(client)
    with client.as_current():
        C = distmm.gemm(1, A, B, transb=True, client=client, blocks=(200, 100, 250)).persist()
        wait(C)
        assert 0 < largest(client, others) < 10_000
        np.testing.assert_allclose(C.compute(), a @ b.T)
    del C, A, B
    until(nothing_is_kept)


@pytest.mark.minutes
def test_operands_live_as_long_as_a_product_may_read_them(client: Client) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, 400, 400))
    expected = a @ b
    until(nothing_is_kept)
    with client.as_current():
        lazy = distmm.matmul(a + 0, b + 0, client=client)  # nobody else holds the operands
        assert lazy.dask.layers  # they are lent when something reads the graph
        gc.collect()
        assert len(open_loans()) == 2
        C = lazy.persist()
        del lazy
        gc.collect()
        np.testing.assert_allclose(C.compute(), expected)
    del C
    until(nothing_is_kept)


@pytest.mark.minutes
def test_operands_of_every_wave_are_released(client: Client) -> None:
    rng = np.random.default_rng(5)
    a, b, c = *rng.integers(-9, 9, (2, 400, 400)).astype("f8"), np.empty((400, 400))
    until(nothing_is_kept)
    with client.as_current():
        distmm.matmul(a, b, out=c, client=client, plan="g2x2x1 b100x200x100 p1 w2x2 l2")
    np.testing.assert_array_equal(c, a @ b)
    until(nothing_is_kept)


@pytest.mark.minutes
@pytest.mark.parametrize("plan", ["g2x2x1 b100x200x100 p1 w1 l2", "g1x2x2 b200x100x200 p1 w1 l2"])
def test_an_added_c_is_lent_and_given_back(client: Client, plan: str) -> None:
    rng = np.random.default_rng(6)
    a, b, c = rng.integers(-9, 9, (3, 400, 400)).astype("f8")
    expected, others = a @ b - 2 * c, known(client)
    until(nothing_is_kept)
    with client.as_current():
        C = distmm.gemm(1, a, b, -2, c + 0, client=client, plan=plan).persist()  # nobody else holds this C
        wait(C)
        assert 0 < largest(client, others) < 10_000
        assert len(open_loans()) == 3
        np.testing.assert_array_equal(C.compute(), expected)
    del C
    until(nothing_is_kept)


@pytest.mark.minutes
def test_an_added_c_is_there_for_every_wave(client: Client) -> None:
    rng = np.random.default_rng(7)
    a, b, c = rng.integers(-9, 9, (3, 400, 400)).astype("f8")
    out = np.empty((400, 400))
    until(nothing_is_kept)
    distmm.gemm(1, a, b, 3, c, out=out, client=client, plan="g2x2x1 b100x200x100 p1 w2x2 l2")
    np.testing.assert_array_equal(out, a @ b + 3 * c)
    until(nothing_is_kept)


def test_blocks_are_stored_into_an_array_of_the_client(client: Client) -> None:
    rng = np.random.default_rng(3)
    a, b, c = *rng.standard_normal((2, 400, 400)), transfer.empty((400, 400), "f8")
    with client.as_current():
        C = distmm.matmul(a, b, client=client, blocks=(150, 400, 150))
        da.store(C, transfer.share(c, client), lock=False)
    np.testing.assert_allclose(c, a @ b)


@pytest.mark.parametrize(
    "array", [np.zeros((10, 10)), np.zeros((400, 400), ">f8"), np.zeros(200_000)], ids=["small", "swapped", "vector"]
)
def test_small_byte_swapped_and_one_dimensional_arrays_travel_with_the_graph(client: Client, array: np.ndarray) -> None:
    assert transfer.share(array, client, "lent") is None


def test_an_array_out_of_reach_travels_with_the_graph(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "_within_reach", lambda client: False)
    a = np.random.default_rng(4).standard_normal((400, 400))
    assert transfer.share(a, client) is None
    with client.as_current():
        np.testing.assert_allclose(distmm.matmul(a, a, client=client).compute(), a @ a)
