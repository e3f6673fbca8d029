"""Room for the blocks of C, where finished ones leave their workers: bounded, and enough for every wave."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from dask.delayed import Delayed
from distributed import Client, Scheduler, secede
from hypothesis import given
from hypothesis import strategies as st

from distmm import gram, matmul, plan
from distmm.clusters import view
from distmm.graph import product_graph
from distmm.planning.blocks import Wave
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.scheduler.output_slots import OutputSlots
from distmm.scheduler.plugin import PlacementPlugin
from distmm.worker.tasks.epilogue import Epilogue
from tests.distmm.scheduler import lockstep
from tests.until import until

H200 = ClusterSpec(1, 100 * 10**9, "cuda", 2e14, 5e10, load=5e10, threads=3, prepared=1.0)
F4 = np.dtype("f4")

counts = st.integers(1, 5)


@given(counts, counts, st.integers(1, 9), st.integers(1, 9), counts, counts, st.integers(1, 3), st.booleans())
def test_each_worker_has_places_for_every_wave(
    rows: int, columns: int, down: int, across: int, waves: int, wide: int, batch: int, symmetric: bool
) -> None:
    across, wide = (down, waves) if symmetric else (across, wide)
    shape = (batch,) * (batch > 1)
    problem = Problem(10 * down, 20, 10 * across, F4, shape, shape, "symmetric" if symmetric else None)
    edges = "x".join(["1"] * len(shape) + ["10", "10", "10"])
    text = f"g{rows}x{columns}x1 b{edges} p1 w{waves}x{wide} l2"
    p = make_plan(problem, replace(H200, workers=rows * columns), text=text, result="out")
    if len(p.waves) == 1:
        assert p.peak.output_slots is None
        return
    most = max(int(p.layout.chains(wave).max()) for wave in p.waves)
    assert p.peak.output_slots is not None
    assert most < p.peak.output_slots <= 2 * most
    whole = p.layout.chains(p.blocking.whole)
    assert whole.sum() == p.blocking.whole.c_blocks == sum(int(p.layout.chains(wave).sum()) for wave in p.waves)


@pytest.mark.parametrize(("load", "more"), [(5e10, 1), (2.5e10, 2), (1e10, 7), (1e9, 8)])
def test_there_is_room_for_as_many_finished_blocks_as_leave_late(load: float, more: int) -> None:
    text = "g1x1x1 b16384x8192x16384 p1 w1x2 l2"  # a product takes 22 ms; a block 21 ms to leave, at 5e10 bytes/s
    square, resident = Problem(65536, 65536, 65536, F4), ("resident", "resident")
    p = make_plan(square, replace(H200, load=load), text=text, operands=resident, result="out")
    assert p.peak.output_slots == 8 + more
    fewer = replace(p, cluster=replace(p.cluster, load=1e12))
    assert p.peak.worker - fewer.peak.worker == (more - 1) * 16384**2 * 4


@pytest.mark.minutes
def test_no_worker_holds_more_than_the_plan_says_though_nothing_is_written(client: Client) -> None:
    edge = 640
    a, b = np.ones((4 * edge, 2 * edge)), np.ones((2 * edge, 8 * edge))
    view.ask(client)
    p = plan(a, b, out=np.empty((4 * edge, 8 * edge)), client=client, plan=f"g2x2x1 b{edge}x{edge}x{edge} p1 w1x2 l2")
    assert (len(p.waves), p.peak.output_slots) == (2, 5)
    shelf = lockstep.Shelf((4 * edge, 8 * edge), a.dtype)
    with lockstep.gate(client), ThreadPoolExecutor(1) as pool:
        call = pool.submit(matmul, a, b, plan=p, out=shelf, client=client)
        peak = lockstep.largest_held(client, call, edge * edge * 8)
        call.result()
    assert p.peak.worker / 1.25 <= peak <= p.peak.worker


class Late:
    """A file of float32 to which blocks go by threads of their own, some time after they were made."""

    chunks = (1, 1)

    def __init__(self, path: Path, shape: tuple[int, int]) -> None:
        self.path, self.shape, self.dtype, self.ndim = path, shape, F4, 2
        np.memmap(path, F4, "w+", shape=shape)

    def __setitem__(self, index: tuple[slice, ...], block: np.ndarray) -> None:
        secede()
        time.sleep(0.02)
        self.values[index] = block

    @property
    def values(self) -> np.ndarray:
        # Not a .npy file: threads of Python 3.11 that parse headers at the same time disturb each other.
        return np.memmap(self.path, F4, "r+", shape=self.shape)


@pytest.mark.minutes
@pytest.mark.parametrize(
    ("symmetric", "cut"),
    [(False, "p1 w4x4 l4"), (True, "p2 w3x3 l3"), pytest.param(False, "p4 w4x4 l2", marks=pytest.mark.minutes)],
)
def test_products_end_though_they_wait_for_blocks_that_leave_late(
    client: Client, tmp_path: Path, cut: str, symmetric: bool
) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.random((80, 64), dtype="f4"), rng.random((64, 80), dtype="f4")
    out, text = Late(tmp_path / "c", (80, 80)), f"g2x2x1 b8x16x8 {cut}"
    if symmetric:
        gram(a, plan=text, out=out, client=client)
    else:
        matmul(a, b, plan=text, out=out, client=client)
    np.testing.assert_allclose(out.values, a @ (a.T if symmetric else b), rtol=1e-5)
    until(
        lambda: client.run_on_scheduler(nothing_left), "the scheduler's plugin keeps places of a product that is done"
    )


@pytest.mark.minutes
def test_who_keeps_the_same_product_stops_nobody_who_writes_it(client: Client) -> None:
    edge, shape = 16, (64, 96)
    A, B = (da.random.default_rng(seed).random(size, chunks=edge) for seed, size in ((7, (64, 64)), (8, (64, 96))))
    text = f"g2x2x1 b{edge}x{edge}x{edge} p1 w1x3 l2"
    view.ask(client)
    with lockstep.gate(client), ThreadPoolExecutor(1) as pool:
        call = pool.submit(matmul, A, B, plan=text, out=lockstep.Shelf(shape, A.dtype), client=client)
        until(lambda: client.run_on_scheduler(some_taken), "the product that is written does not begin")
        kept = client.persist(matmul(A, B, plan=text, client=client))
        lockstep.largest_held(client, call, 0)
        lockstep.largest_held(client, kept, 0)
        call.result()
    np.testing.assert_allclose(client.compute(kept).result(), A.compute() @ B.compute())


@pytest.mark.minutes
def test_who_writes_the_same_product_again_meanwhile_waits_for_nobody_who_waits_for_him(client: Client) -> None:
    A, B = (da.random.default_rng(seed).random((256, 256), chunks=64) for seed in (9, 10))
    text = "g2x2x1 b64x64x64 p1 w1x2 l2"
    assert plan(A, B, plan=text, client=client, out=np.empty((256, 256))).peak.output_slots == 3  # a wave has two
    view.ask(client)
    with lockstep.gate(client), ThreadPoolExecutor(2) as pool:
        shelves = [lockstep.Shelf((256, 256), A.dtype) for _ in range(2)]
        first = pool.submit(matmul, A, B, plan=text, out=shelves[0], client=client)
        while not client.run_on_scheduler(first_wave_has_left):
            client.run(lockstep.permit_one, "leaving")
            lockstep.step(client)
        second = pool.submit(matmul, A, B, plan=text, out=shelves[1], client=client)
        for call in (first, second):
            lockstep.largest_held(client, call, 0)
            call.result()


def test_waves_that_are_products_of_their_own_share_the_places_of_their_run(client: Client) -> None:
    edge, size, text = 64, 256, "g2x2x1 b64x64x64 p1 w1x2 l2"
    shelf = lockstep.Shelf((size, size), np.dtype("f8"))
    p = plan(np.ones((size, size)), np.ones((size, size)), plan=text, client=client, out=np.empty((size, size)))
    assert (len(p.waves), p.peak.output_slots) == (2, 3)
    view.ask(client)
    epilogue = Epilogue(shelf.dtype, "numpy")

    def stored(wave: Wave) -> Delayed:
        a, b = (da.random.default_rng(seed).random((size, size), chunks=edge) for seed in (wave.index, 5 + wave.index))
        name, region = f"distmm-matmul-places{wave.index}", p.blocking.region(wave)
        layers = product_graph.build(name, p, a, b, epilogue, wave=wave, run="a-run")
        c = da.Array(layers, name, (p.blocking.m, p.blocking.n), dtype=shelf.dtype)
        return da.store(c[region], shelf, regions=region, lock=False, compute=False)

    with lockstep.gate(client), ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.gather, [client.compute(stored(wave)) for wave in p.waves])
        while any(waiting for *_, waiting, _ in lockstep.at_rest(client)):
            lockstep.step(client)
        taken = client.run_on_scheduler(most_taken)  # no product can go on, and nothing has left
        lockstep.largest_held(client, call, 0)
    assert taken == 3
    until(lambda: client.run_on_scheduler(nothing_left), "the scheduler's plugin keeps places of a run that is done")


def slots(dask_scheduler: Scheduler) -> list[OutputSlots]:
    """Slots of every run that the plugin knows."""
    return list(dask_scheduler.plugins[PlacementPlugin.name].products.runs.values())


def most_taken(dask_scheduler: Scheduler) -> int:
    return max(sum(len(run.taken[rank]) for run in slots(dask_scheduler)) for rank in range(4))


def first_wave_has_left(dask_scheduler: Scheduler) -> bool:
    columns = [j for run in slots(dask_scheduler) for taken in run.taken.values() for _, (_, _, j) in taken]
    return bool(columns) and min(columns) > 1


def some_taken(dask_scheduler: Scheduler) -> bool:
    return any(run.taken for run in slots(dask_scheduler))


def nothing_left(dask_scheduler: Scheduler) -> bool:
    return not slots(dask_scheduler)
