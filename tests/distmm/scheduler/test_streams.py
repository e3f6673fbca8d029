"""Lazy products whose C does not fit: Dask tasks read blocks of C, which leave then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client

import distmm
from distmm import DoesNotFitError
from distmm.clusters import view
from distmm.planning.plan import Plan
from distmm.transfer import lending
from tests.distmm.scheduler import lockstep
from tests.distmm.scheduler.streamed import BLOCK, EDGE, TEXT, M, N, enough, left, operands
from tests.tables import later
from tests.until import until

Use = Callable[[da.Array], Any]


@pytest.fixture(autouse=True)
def current(client: Client) -> Iterator[None]:
    with client.as_current():
        yield


USES: dict[str, Use] = {
    "sum": lambda C: C.sum(),
    "max of rows": lambda C: C.max(axis=1),
    "topk of rows": lambda C: da.topk(C, 3, axis=1),
    "argtopk of columns": lambda C: da.argtopk(C, 1, axis=0),
    "argmin": lambda C: C.argmin(axis=1),
    "map_blocks": lambda C: C.map_blocks(lambda block: block.sum(keepdims=True), chunks=(1, 1)),
    "histogram": lambda C: da.histogram(C, bins=5, range=(-500, 500))[0],
    "two uses of one C": lambda C: C.max(axis=0) - C.sum(axis=1),
    "a vector": lambda C: C @ np.ones(N),
    "a part of it": lambda C: C[: 3 * EDGE, EDGE:].sum(axis=0),
}


@pytest.mark.parametrize("name", later(USES))
def test_what_reads_blocks_of_c_is_computed_though_c_does_not_fit(
    client: Client, memory: Callable[[int], None], name: str
) -> None:
    a, b = operands()
    memory(enough())
    view.ask(client)
    before = client.run_on_scheduler(left)  # of calls that failed in other tests, whose errors are garbage
    C = distmm.matmul(a, b, plan=TEXT)
    expected = USES[name](da.from_array(a @ b, chunks=(EDGE, EDGE)))
    np.testing.assert_array_equal(USES[name](C).compute(), expected.compute(scheduler="sync"))
    until(lambda: client.run_on_scheduler(left) <= before)


@pytest.mark.minutes
def test_a_streamed_c_is_stored_by_dask(client: Client, memory: Callable[[int], None], tmp_path: Path) -> None:
    a, b = operands()
    memory(enough())
    stored = zarr.create_array(tmp_path / "C.zarr", shape=(M, N), chunks=(EDGE, EDGE), dtype="f8")
    da.store(distmm.matmul(a, b, plan=TEXT), stored, lock=False)
    np.testing.assert_array_equal(stored[:], a @ b)
    da.to_zarr(distmm.matmul(a, b, plan=TEXT), str(tmp_path / "D.zarr"))
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "D.zarr")[:], a @ b)


@pytest.mark.minutes
def test_a_symmetric_c_is_streamed_with_its_mirror_images(client: Client, memory: Callable[[int], None]) -> None:
    a, _ = operands()
    memory(replace(distmm.plan(a, plan=TEXT), streamed=True, operands=("kept", "kept")).peak.worker)
    C = distmm.gram(a, plan=TEXT)
    nearest = da.argtopk(C, 2, axis=1)
    np.testing.assert_array_equal(C.sum(axis=0).compute(), (a @ a.T).sum(axis=0))
    assert nearest.compute().shape == (M, 2)


KEPT: dict[str, Use] = {
    "persist": lambda C: C.persist().compute(),
    "compute by Dask": lambda C: C.compute(optimize_graph=False),
    "persist with another use": lambda C: dask.compute(dask.persist(C, C.sum())),
}


@pytest.mark.parametrize("name", later(KEPT))
def test_a_c_that_is_kept_is_refused_with_the_figure(client: Client, memory: Callable[[int], None], name: str) -> None:
    a, b = operands()
    memory(enough())
    C = distmm.matmul(a, b, plan=TEXT)
    with pytest.raises(DoesNotFitError, match=r"needs .*, with 16 blocks of C in memory at a time, .* block by block"):
        KEPT[name](C)
    if name == "compute by Dask":  # nothing stands in the way of other uses
        np.testing.assert_array_equal(C.sum().compute(), (a @ b).sum())


@pytest.mark.parametrize("reach", later([True, False]))
def test_a_c_that_does_not_fit_is_computed_into_the_memory_of_this_process(
    client: Client, memory: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, reach: bool
) -> None:
    a, b = operands()
    monkeypatch.setattr(lending, "SMALLEST", 0)
    monkeypatch.setattr(lending, "_within_reach", lambda client: reach)
    memory(enough())
    C = distmm.matmul(a, b, plan=TEXT)
    np.testing.assert_array_equal(C.compute(), a @ b)


def test_a_task_that_reads_blocks_of_several_waves_gets_slots_if_they_fit(
    client: Client, memory: Callable[[int], None]
) -> None:
    a, b = operands()
    tight = enough()
    memory(tight)
    C = distmm.matmul(a, b, plan=TEXT)
    with pytest.raises(DoesNotFitError, match="with 16 blocks of C"):  # all of it
        (C * C.sum()).sum().compute()

    def first_and_last_row(C: da.Array) -> da.Array:
        return (C.blocks[0] * C.blocks[-1]).sum(axis=1)

    with pytest.raises(DoesNotFitError, match="with 4 blocks of C"):
        first_and_last_row(distmm.matmul(a, b, plan=TEXT)).compute()
    memory(tight + 2 * BLOCK)
    product = a @ b
    expected = (product[:EDGE] * product[-EDGE:]).sum(axis=1)
    np.testing.assert_array_equal(first_and_last_row(distmm.matmul(a, b, plan=TEXT)).compute(), expected)


@pytest.mark.minutes
def test_another_product_that_reads_a_streamed_c_is_refused_unless_c_fits(
    client: Client, memory: Callable[[int], None]
) -> None:
    a, b = operands()
    memory(tight := enough())
    text = f"g2x2x1 b{EDGE}x{EDGE}x{EDGE} p1 w1 l1"
    with pytest.raises(DoesNotFitError, match="with 16 blocks of C"):
        distmm.matmul(distmm.matmul(a, b, plan=TEXT), np.ones((N, 4)), plan=text).compute()
    memory(tight + 14 * BLOCK)
    C = distmm.matmul(a, b, plan=TEXT)
    np.testing.assert_array_equal(distmm.matmul(C, np.ones((N, 4)), plan=text).compute(), (a @ b) @ np.ones((N, 4)))


def test_what_can_never_run_is_refused_at_the_call(client: Client, memory: Callable[[int], None]) -> None:
    a, b = operands()
    memory(3 * BLOCK)
    with pytest.raises(DoesNotFitError, match="short by"):
        distmm.matmul(a, b, plan=None, blocks=(EDGE, EDGE, EDGE))


def test_a_plan_says_what_c_would_need_to_stay(client: Client, memory: Callable[[int], None]) -> None:
    a, b = operands()
    memory(enough())
    plan = distmm.plan(a, b, plan=TEXT)
    assert plan.streamed
    assert not plan.shortfall
    assert dict(plan.rows())["C"] == "does not fit: at most 2 blocks a worker, which leave when they have been read"
    with pytest.raises(DoesNotFitError, match="with 16 blocks of C in memory at a time"):
        plan.validate()
    memory(10**9)
    whole = distmm.plan(a, b, plan=TEXT)
    assert not whole.streamed
    whole.validate()


def in_file(a: np.ndarray, path: Path) -> np.ndarray:
    np.save(path, a)
    mapped = np.load(path, mmap_mode="r")
    assert isinstance(mapped, np.memmap)
    return mapped


@pytest.mark.minutes
@pytest.mark.parametrize("files", [False, True])
def test_no_worker_holds_more_than_the_plan_says_though_nothing_is_read(
    client: Client, memory: Callable[[int], None], tmp_path: Path, files: bool
) -> None:
    edge = 640  # products that outlast the scheduler, as the planner makes them
    a, b = np.ones((4 * edge, 2 * edge)), np.ones((2 * edge, 8 * edge))
    if files:
        a, b = in_file(a, tmp_path / "A.npy"), in_file(b, tmp_path / "B.npy")
    text = f"g2x2x1 b{edge}x{edge}x{edge} p1 w1x2 l1"
    view.ask(client)
    memory(distmm.plan(a, b, plan=text).peak.worker - 1)
    p = distmm.plan(a, b, plan=text)
    assert (p.streamed, p.peak.output_slots, p.operands[0]) == (True, 5, "loaded" if files else "kept")
    C = distmm.matmul(a, b, plan=text)
    shelf = lockstep.Shelf(C.shape, C.dtype)
    stored = da.store(C, shelf, lock=False, compute=False)
    with lockstep.gate(client):
        peak = lockstep.largest_held(client, client.compute(stored), edge * edge * 8)
    # Of what is kept for the next wave, that one frees the first blocks before it makes its last ones.
    assert p.peak.worker / (1.25 if files else 1.4) <= peak <= p.peak.worker


@pytest.mark.minutes
def test_files_that_do_not_fit_either_are_read_again_for_each_wave(
    client: Client, memory: Callable[[int], None], tmp_path: Path
) -> None:
    a, b = operands(k=4 * EDGE)
    stored = [zarr.create_array(tmp_path / name, data=x, chunks=(EDGE, EDGE)) for name, x in {"A": a, "B": b}.items()]
    in_files: Plan = replace(distmm.plan(*stored, plan=TEXT), streamed=True)
    assert in_files.peak.worker <= enough(k=4 * EDGE) - a.nbytes // 4
    memory(in_files.peak.worker)
    view.ask(client)
    before = client.run_on_scheduler(left)
    C = distmm.matmul(*stored, plan=TEXT)
    np.testing.assert_array_equal(da.topk(C, 3, axis=1).compute(), np.sort(a @ b, axis=1)[:, :-4:-1])
    np.testing.assert_array_equal(
        C[EDGE : 3 * EDGE, :EDGE].sum(axis=0).compute(), (a @ b)[EDGE : 3 * EDGE, :EDGE].sum(axis=0)
    )
    until(lambda: client.run_on_scheduler(left) <= before)
