"""Products of arrays that are in the workers' memory, where somebody else has put them, on a real cluster."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import sleep
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask import delayed
from dask.highlevelgraph import HighLevelGraph
from distributed import Client, Event, LocalCluster, Scheduler, wait

import distmm
from distmm.clusters import view
from distmm.clusters.homes import chunk_homes, homes_of_blocks
from distmm.planning.owners import Owners
from distmm.scheduler import dask_internals
from distmm.scheduler.plugin import PlacementPlugin
from tests import forked
from tests.bench.experiment.moved_bytes import spent
from tests.until import until

ROWS, WIDTH, CHUNKS = 4000, 48, 16
C_BYTES = WIDTH * WIDTH * 8


@pytest.fixture(autouse=True)
def current(client: Client) -> Iterator[None]:
    view.ask(client)
    with client.as_current():
        yield


@pytest.fixture
def no_amm(client: Client) -> Iterator[None]:
    """Dask's active memory manager drops any replica, every 2 s, also the one that a plan has found."""
    client.amm.stop()
    yield
    client.amm.start()


def ranks_of(client: Client) -> list[str]:
    ranks: list[str] = client.run_on_scheduler(
        lambda dask_scheduler: dask_scheduler.plugins[PlacementPlugin.name].ranks
    )
    return ranks


def rows(i: int, seed: int, width: int) -> np.ndarray:
    return np.random.default_rng((seed, i)).integers(-9, 10, (ROWS, width)).astype("f8")


def tall(client: Client, homes: Sequence[int], seed: int = 0, width: int = WIDTH) -> da.Array:
    """Return an array of whole numbers whose chunk i is on the worker of rank ``homes[i]``."""
    ranks, name = ranks_of(client), f"tall-{seed}-{width}-{'-'.join(map(str, homes))}"

    futures = {
        (name, i, 0): client.submit(rows, i, seed, width, key=(name, i, 0), workers=[ranks[home]])
        for i, home in enumerate(homes)
    }
    wait(list(futures.values()))
    graph = HighLevelGraph.from_collections(name, futures)
    return da.Array(graph, name, ((ROWS,) * len(homes), (width,)), "f8")


HOMES = (0, 1, 2, 3, 3, 2, 1, 0, 2, 2, 0, 0, 1, 1, 3, 3)  # as Dask leaves them: in no order


@pytest.mark.minutes
def test_a_tall_array_times_its_transpose_moves_partial_sums_alone(client: Client) -> None:
    products: list[Callable[[da.Array], da.Array]] = [
        lambda X: distmm.matmul(X.T, X), lambda X: distmm.gram(X.T), lambda X: distmm.gram(X, trans=True)
    ]  # fmt: skip
    for seed, make in enumerate(products):
        X = tall(client, HOMES, 30 + seed)
        plan = distmm.plan(X.T, X)
        assert isinstance(plan.grid, Owners)
        assert plan.bytes_moved == plan.cost.bytes_bound == 3 * C_BYTES
        c, moved = spent(client, lambda X=X, make=make: make(X))  # type: ignore[misc]
        assert moved == 3 * C_BYTES
        x = np.vstack([rows(i, 30 + seed, WIDTH) for i in range(CHUNKS)])
        np.testing.assert_array_equal(c, x.T @ x)


def test_a_lazy_array_counts_as_what_it_is_made_from(client: Client) -> None:
    X = tall(client, HOMES, 1)
    Z = X - X.mean(axis=0)
    x = np.vstack([rows(i, 1, WIDTH) for i in range(CHUNKS)])
    z = x - x.mean(axis=0)
    c, moved = spent(client, lambda: distmm.matmul(Z.T, Z))
    np.testing.assert_allclose(c, z.T @ z, rtol=1e-9, atol=1e-6)
    assert moved < 8 * C_BYTES + CHUNKS * 1000  # sums of C, and of the mean
    _, of_cov = spent(client, lambda: distmm.cov(X, rowvar=False))
    assert of_cov < 8 * C_BYTES + CHUNKS * 1000


def test_a_small_right_side_moves_and_the_tall_array_stays(client: Client) -> None:
    X, w = tall(client, HOMES, 2), np.arange(WIDTH * 8).reshape(WIDTH, 8) % 5 - 2.0
    W = client.persist(da.from_array(w, chunks=(WIDTH, 8)))
    wait(W)
    c, moved = spent(client, lambda: distmm.matmul(X, W))
    np.testing.assert_array_equal(c, X.compute() @ w)
    assert moved <= 3 * w.nbytes


def test_a_transpose_that_is_persisted_elsewhere_is_multiplied_where_most_of_both_is(client: Client) -> None:
    X = tall(client, HOMES, 3)
    P = client.persist(X.T)
    wait(P)
    c, moved = spent(client, lambda: distmm.matmul(P, X))
    np.testing.assert_array_equal(c, X.compute().T @ X.compute())
    assert moved <= 3 * C_BYTES


def test_bytes_are_the_plans_for_any_homes(client: Client) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        X = tall(client, rng.integers(0, 4, 6).tolist(), 10 + seed, 64)
        Y = tall(client, rng.integers(0, 4, 6).tolist(), 20 + seed, 64)
        plan = distmm.plan(X.T, Y)
        c, moved = spent(client, lambda X=X, Y=Y: distmm.matmul(X.T, Y))  # type: ignore[misc]
        np.testing.assert_array_equal(c, X.compute().T @ Y.compute())
        assert moved == plan.bytes_moved


@pytest.mark.minutes
@pytest.mark.parametrize(("turned_a", "turned_b"), [(False, False), (False, True), (True, False)])
def test_a_block_that_a_worker_reads_as_a_and_as_b_travels_once(client: Client, turned_a: bool, turned_b: bool) -> None:
    x = np.random.default_rng((turned_a, turned_b)).integers(-9, 10, (480, 480)).astype("f8")
    X = client.persist(da.from_array(x, chunks=30))
    wait(X)
    A, B = (X.T if turned else X for turned in (turned_a, turned_b))
    plan = distmm.plan(A, B)
    c, moved = spent(client, lambda: distmm.matmul(A, B))
    np.testing.assert_array_equal(c, (x.T if turned_a else x) @ (x.T if turned_b else x))
    assert moved == plan.bytes_moved < 2.5 * x.nbytes


def late(block: np.ndarray, block_info: Any = None) -> np.ndarray:
    """Make a chunk of whole numbers in so much time that most chunks are in Dask's queue at first."""
    sleep(0.05)
    return rows(block_info[0]["chunk-location"][0], 7, WIDTH)


def test_an_array_that_is_persisted_and_still_queued_stays_where_it_will_be(client: Client) -> None:
    empty = da.zeros((ROWS * CHUNKS, WIDTH), chunks=(ROWS, WIDTH))
    X = client.persist(empty.map_blocks(late, dtype="f8", name="late-x"))
    Z = X - X.mean(axis=0)
    plans = distmm.plan(X.T, X), distmm.plan(Z.T, Z)
    assert [plan.bytes_moved for plan in plans] == [3 * C_BYTES] * 2
    c, moved = spent(client, lambda: distmm.matmul(X.T, X))
    x = np.vstack([rows(i, 7, WIDTH) for i in range(CHUNKS)])
    np.testing.assert_array_equal(c, x.T @ x)
    assert moved == 3 * C_BYTES
    X = client.persist(empty.map_blocks(late, dtype="f8", name="late-y"))
    W = np.ones((WIDTH, 8))
    c, moved = spent(client, lambda: distmm.matmul(X, da.from_array(W)))
    np.testing.assert_array_equal(c, x @ W)
    assert moved <= 3 * W.nbytes


def test_chunks_that_wait_are_where_what_they_are_made_from_is(client: Client) -> None:
    X = tall(client, HOMES, 8)
    go = Event("go", client=client)
    first = client.submit(waits, "go", pure=False)
    Y = client.persist(X + da.from_delayed(delayed(first), (), dtype="f8"))
    homes = chunk_homes(client, [Y], 4)
    go.set()
    assert homes == [tuple((home,) for home in HOMES)]
    wait(Y)


def test_the_scheduler_looks_at_a_bounded_number_of_tasks(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distmm.clusters.homes.MOST_TASKS", 2 * CHUNKS)  # the scheduler runs in this process
    X = tall(client, HOMES, 10)
    go = Event("go-bounded", client=client)
    first = client.submit(waits, "go-bounded", pure=False)
    far = client.persist(X.map_blocks(np.copy) + da.from_delayed(delayed(first), (), dtype="f8"))
    homes = chunk_homes(client, [far, X], 4)
    go.set()
    assert homes == [((-1,),) * CHUNKS, tuple((home,) for home in HOMES)]
    wait(far)


def waits(name: str) -> float:
    Event(name).wait(60)
    return 1.0


def test_a_persisted_matrix_times_a_vector_moves_the_vector_alone(client: Client) -> None:
    a = np.random.default_rng(1).integers(-9, 10, (960, 960)).astype("f8")
    A, v = client.persist([da.from_array(a, chunks=120), da.from_array(a[0], chunks=120)])
    wait([A, v])
    c, moved = spent(client, lambda: distmm.matmul(A, v))
    np.testing.assert_array_equal(c, a @ a[0])
    assert moved < a.nbytes / 20


def test_a_plan_whose_homes_have_changed_meanwhile_still_gives_c(client: Client) -> None:
    plan = distmm.plan(tall(client, HOMES, 4).T, tall(client, HOMES, 4))
    X = tall(client, [(home + 1) % 4 for home in HOMES], 4)
    c, _ = spent(client, lambda: distmm.matmul(X.T, X, plan=plan))
    np.testing.assert_array_equal(c, X.compute().T @ X.compute())


@pytest.mark.usefixtures("no_amm")
def test_data_that_are_moved_after_planning_are_multiplied_where_the_plan_says(client: Client) -> None:
    X = tall(client, [0] * 8, 9)
    plan = distmm.plan(X.T, X)
    C = distmm.matmul(X.T, X, plan=plan)
    ranks, moving = ranks_of(client), list(X.dask.values())[4:]
    client.replicate(moving, n=2, workers=[ranks[0], ranks[2]])
    gone = [future.key for future in moving]
    client.run_on_scheduler(lambda dask_scheduler: dask_internals.drop_blocks(dask_scheduler, ranks[0], gone))

    def moved_away() -> bool:
        view.forget(client)
        return chunk_homes(client, [X], 4) == [((0,),) * 4 + ((2,),) * 4]

    until(moved_away)
    c, _ = spent(client, lambda: C)
    until(moved_away)
    np.testing.assert_array_equal(c, X.compute().T @ X.compute())
    again, moved = spent(client, lambda: distmm.gram(X.T))
    np.testing.assert_array_equal(again, c)
    assert moved <= 3 * C_BYTES


def test_a_persisted_array_that_came_to_a_task_by_pickle_stays_where_it_is(client: Client) -> None:
    X = tall(client, [0, 1] * (CHUNKS // 2))
    received = pickle.loads(pickle.dumps(X))  # its futures have no client yet
    gram, moved = spent(client, lambda: distmm.matmul(received.T, received))
    x = np.asarray(X)
    np.testing.assert_array_equal(gram, x.T @ x)
    assert moved <= C_BYTES * 1.1


@pytest.mark.minutes
def test_if_half_of_an_array_is_persisted_that_half_stays(client: Client) -> None:
    X = da.concatenate([tall(client, HOMES[:8], 31), tall(client, HOMES, 32).map_blocks(np.copy)[ROWS * 8 :]])
    empty = da.zeros((ROWS * 8, WIDTH), chunks=(ROWS, WIDTH))
    half = da.concatenate([tall(client, HOMES[:8], 33), empty.map_blocks(late, dtype="f8")])
    for Y in (X, half):
        c, moved = spent(client, lambda Y=Y: distmm.matmul(Y.T, Y))  # type: ignore[misc]
        np.testing.assert_array_equal(c, Y.compute().T @ Y.compute())
        assert moved <= 3 * C_BYTES


@pytest.mark.usefixtures("no_amm")
def test_chunks_with_replicas_are_multiplied_where_one_is(client: Client) -> None:
    X = tall(client, [0, 0, 0, 0, 1, 1], 34)
    client.replicate(list(X.dask.values())[:4], n=4)
    c, moved = spent(client, lambda: distmm.matmul(X.T, X))
    np.testing.assert_array_equal(c, X.compute().T @ X.compute())
    assert moved <= 3 * C_BYTES


@pytest.mark.usefixtures("no_amm")
def test_of_several_replicas_one_counts_and_the_scheduler_is_asked_for_persisted_arrays_only(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = tall(client, [0, 0, 0, 0], 5)
    client.replicate(list(X.dask.values()), n=4)
    (homes,) = chunk_homes(client, [X], 4)
    assert homes is not None
    assert sorted(home for (home,) in homes) == [0, 1, 2, 3]
    monkeypatch.setattr(view, "on_scheduler", None)
    assert chunk_homes(client, [da.ones((40, 4), chunks=10), None], 4) == [None, None]


def test_the_home_of_a_block_of_several_chunks_has_most_of_it() -> None:
    homes = ((0,), (1,), (1,), (2,), (-1,), (-1,))
    chunks, cuts = ((10, 10, 10, 10, 10, 10), (4,)), ((25, 17, 18), (4,))
    assert homes_of_blocks(homes, chunks, cuts) == ((1,), (2,), (-1,))
    assert homes_of_blocks(homes, chunks, chunks) is homes
    assert homes_of_blocks(None, chunks, cuts) is None


def test_steps_run_where_the_plan_says(client: Client) -> None:
    X = tall(client, HOMES, 6)
    plan = distmm.plan(X.T, X)

    def ran(dask_scheduler: Scheduler) -> dict[str, int]:
        ranks = dask_scheduler.plugins[PlacementPlugin.name].ranks
        made = {str(key): ts.who_has for key, ts in dask_scheduler.tasks.items() if key[0] == name and ts.who_has}
        return {key: ranks.index(next(iter(workers)).address) for key, workers in made.items()}

    C = distmm.matmul(X.T, X)
    name = C.name
    kept = client.persist(C)
    wait(kept)
    assert list(client.run_on_scheduler(ran).values()) == [plan.schedule.chains((), 0, 0)[0][0]]


def test_operands_that_are_spilled_to_disk_stay_where_they_are(tmp_path: Path) -> None:
    spilling = {"distributed.worker.memory.target": 0.001, "temporary-directory": str(tmp_path)}
    with (
        dask.config.set(spilling),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, memory_limit="2GiB", dashboard_address=":0"
        ) as c2,
        Client(c2) as client,
    ):
        view.ask(client)
        X = tall(client, [0, 1] * 3, 35)
        on_disk = client.run(lambda dask_worker: len(dask_worker.data.disk))
        assert min(on_disk.values()) > 0
        plan = distmm.plan(X.T, X)
        c, moved = spent(client, lambda: distmm.matmul(X.T, X))
        np.testing.assert_array_equal(c, X.compute().T @ X.compute())
        assert moved == plan.bytes_moved == C_BYTES


@pytest.mark.minutes
def test_a_product_whose_worker_has_died_after_planning_is_right() -> None:
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False, "distributed.scheduler.allowed-failures": 100}),
        forked.workers(),
        LocalCluster(n_workers=3, threads_per_worker=1, memory_limit="2GiB", dashboard_address=":0") as three,
        Client(three) as client,
    ):
        view.ask(client)
        X = client.persist(da.random.default_rng(0).integers(-9, 10, (ROWS * 6, WIDTH), chunks=(ROWS, WIDTH)))
        wait(X)
        plan = distmm.plan(X.T, X)
        assert isinstance(plan.grid, Owners)
        expected = X.compute()
        os.kill(client.run(os.getpid).popitem()[1], signal.SIGKILL)
        c = client.compute(distmm.matmul(X.T, X, plan=plan)).result(timeout=120)
        np.testing.assert_array_equal(c, expected.T @ expected)


@pytest.mark.parametrize("grid", ["1x1x1", "1x2x1", "k2", "a1", "r2", "k8"])
def test_a_text_may_name_fewer_workers_than_hold_the_operands(client: Client, grid: str) -> None:
    X, P = tall(client, range(4)), np.vstack([rows(i, 0, WIDTH) for i in range(4)])
    plan = distmm.plan(X.T, X, plan=f"g{grid} b{WIDTH}x{ROWS}x{WIDTH} p1 w1 l2")
    np.testing.assert_array_equal(distmm.matmul(X.T, X, plan=plan).compute(), P.T @ P)
