"""Symmetric products: half of the work, each block read and sent once, and C symmetric to the bit."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client, Scheduler, Worker, WorkerPlugin, futures_of, wait
from hypothesis import given, settings
from hypothesis import strategies as st

import distmm
from distmm.cost import ClusterSpec
from distmm.errors import InputError
from distmm.geometry import Blocking, Grid, Problem, Symmetry, even_edges
from distmm.graph import Placed, Product
from distmm.host import attach, lent
from distmm.layout import Layout
from distmm.plan import make_plan
from distmm.runtime import cluster, serial
from distmm.runtime.scheduler import PlacementPlugin
from distmm.tasks import DIAGONAL_TILE, Epilogue, KernelChoice
from distmm.telemetry import client as telemetry
from distmm.telemetry.scheduler import Telemetry

F4 = np.dtype("f4")
GPUS = ClusterSpec(workers=4, memory=10**11, device="cuda", rate=2e14, link=5e10, host_memory=10**11)


def sample(shape: tuple[int, ...], dtype: str = "f8", seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(shape) * 20
    if np.dtype(dtype).kind == "c":
        return (x + 1j * x[..., ::-1, :]).astype(dtype)
    return x.astype("i8" if np.dtype(dtype).kind in "iub" else "f8").astype(dtype)


def truth(a: np.ndarray, trans: bool = False, hermitian: bool = True) -> np.ndarray:
    turned = np.swapaxes(a.conj() if hermitian else a, -1, -2)
    return turned @ a if trans else a @ turned


def mirrored(c: np.ndarray, hermitian: bool = True) -> np.ndarray:
    turned = np.swapaxes(c, -1, -2)
    return turned.conj() if hermitian and c.dtype.kind == "c" else turned


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from(["f8", "f4", "f2", "i4", "u1", "?", "c8", "c16"]),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_it_is_numpys_product_and_symmetric_to_the_bit(
    batch: list[int],
    shape: tuple[int, int],
    dtype: str,
    chunks: tuple[int, int],
    trans: bool,
    hermitian: bool,
    lazy: bool,
) -> None:
    a = sample((*batch, *shape), dtype)
    edges = chunks[::-1] if trans else chunks
    given = {"A": da.from_array(a, chunks=(*[1] * len(batch), *chunks))} if lazy else {"A": a, "blocks": edges}
    with dask.config.set(scheduler="synchronous"), np.errstate(over="ignore", invalid="ignore"):
        C = distmm.gram(**given, trans=trans, hermitian=hermitian)
        c, expected = C.compute(), truth(a, trans, hermitian)
    assert C.dtype == c.dtype == expected.dtype
    assert C.chunks[-1] == C.chunks[-2] == even_edges(expected.shape[-1], edges[0])
    np.testing.assert_array_equal(c, mirrored(c, hermitian))
    if c.dtype.kind in "iub":
        np.testing.assert_array_equal(c, expected)
    else:
        np.testing.assert_allclose(c, expected, rtol=1e-2 if dtype == "f2" else 1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", ["f4", "c8"])
@pytest.mark.parametrize("chunks", [(700, 300), (301, 128)])
def test_blocks_on_the_diagonal_are_symmetric_whatever_the_kernel_adds_first(
    dtype: str, chunks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from distmm_kernels.gemm.cpu import CpuKernel

    accumulate = CpuKernel._accumulate

    def uneven(self: CpuKernel, a: Any, b: Any, c: Any, d: np.ndarray) -> None:
        accumulate(self, a, b, c, d)
        d *= 1 + 1e-3 * np.random.default_rng(1).random(d.shape, dtype="f4")

    monkeypatch.setattr(CpuKernel, "_accumulate", uneven)
    a = sample((700, 300), dtype)
    assert chunks[0] > DIAGONAL_TILE
    c = distmm.gram(da.from_array(a, chunks=chunks)).compute(scheduler="synchronous")
    np.testing.assert_array_equal(c, mirrored(c))
    np.testing.assert_allclose(c, truth(a), rtol=1e-2, atol=100)


def test_scalars_are_those_of_syrk_and_herk() -> None:
    a, z = sample((20, 30)), sample((20, 30), "c16")
    with dask.config.set(scheduler="synchronous"):
        np.testing.assert_allclose(distmm.gram(a, alpha=-2.5, blocks=(8, 8)).compute(), -2.5 * (a @ a.T))
        half = distmm.gram(np.arange(6).reshape(2, 3), alpha=0.5)
        assert half.dtype == np.float64
        for more in ({"alpha": 2.0, "trans": True}, {"alpha": 2j, "hermitian": False}):
            c = distmm.gram(z, blocks=(8, 8), **more).compute()
            np.testing.assert_allclose(c, more["alpha"] * truth(z, "trans" in more, "hermitian" not in more))
        np.testing.assert_array_equal(np.diag(distmm.gram(z, alpha=1 / 3).compute()).imag, np.zeros(20))
    with pytest.raises(InputError, match=r"alpha is 2j: a Hermitian product has a real one; hermitian=False"):
        distmm.gram(z, alpha=2j)


def test_what_is_no_symmetric_product_is_refused() -> None:
    a = np.ones((6, 4))
    with pytest.raises(InputError, match=r"shape \(4,\): the product with its own transpose is that of a matrix"):
        distmm.gram(a[0])
    with pytest.raises(InputError, match="two positive edges, those of m and k"):
        distmm.gram(a, blocks=(2, 2, 2))
    with pytest.raises(InputError, match="positive"):
        distmm.gram(a, blocks=(0, 2))
    with pytest.raises(InputError, match="cut alike along m and n"):
        distmm.gram(a, plan="g1x1x1 b2x4x3 p1 w1 l2")
    with pytest.raises(InputError, match="as many down as across, not w1x2"):
        distmm.gram(a, plan="g1x1x1 b2x4x2 p1 w1x2 l2")
    with pytest.raises(InputError, match=r"make a new plan with distmm.plan\(A\)"):
        distmm.gram(a, plan=distmm.plan(a, a.T))
    with pytest.raises(InputError, match="square"):
        Problem(3, 4, 5, F4, symmetry="symmetric")


# The plan


@settings(max_examples=6, deadline=None)
@given(
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.sampled_from([1, 2, 3, 8, 60]),
    st.sampled_from(["f2", "f4", "c16"]),
    st.sampled_from([(), (5,), (3, 40)]),
    st.sampled_from(["workers", "host", "out"]),
    st.sampled_from(["symmetric", "hermitian"]),
)
def test_plans_make_every_block_of_one_triangle_and_their_text_gives_them_back(
    m: int, k: int, workers: int, dtype: str, batch: tuple[int, ...], result: Any, symmetry: Symmetry
) -> None:
    problem = Problem(m, k, m, np.dtype(dtype), batch, batch, symmetry)
    spec = replace(GPUS, workers=workers)
    plan = make_plan(problem, spec, result=result)
    blocking = plan.blocking
    made = [index for wave in plan.waves for index in blocking.c_indices(wave)]
    assert len(made) == len(set(made)) == sum(wave.c_blocks for wave in plan.waves)
    assert set(made) == set(blocking.c_indices())
    images = {(b, j, i) for b, i, j in made}
    assert len(set(made) | images) == blocking.c_blocks
    assert sum(map(blocking.mirrored, plan.waves)) == blocking.c_blocks - len(made)
    elements = sum(blocking.m[i] * blocking.n[j] for _, i, j in made if not batch)
    assert batch or elements == blocking.c_elements
    assert plan.cost.tasks == len(made) * blocking.chain_tasks(plan.grid.layers)
    assert make_plan(problem, spec, text=str(plan), result=result) == plan


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 6),
    st.sampled_from([(), (3,), (2, 1)]),
    st.sampled_from(["symmetric", "hermitian"]),
)
def test_bytes_are_those_of_the_blocks_that_leave_home(
    shape: tuple[int, int, int], cuts: int, rows: int, panels: int, batch: tuple[int, ...], symmetry: Symmetry
) -> None:
    grid = Grid(*shape)
    problem = Problem(rows * 3 - 1, panels * 2 - 1, rows * 3 - 1, F4, batch, batch, symmetry)
    edges = even_edges(problem.m, 3)
    blocking = Blocking(edges, even_edges(problem.k, 2), edges, tuple((1,) * x for x in batch), triangle=True)
    layout = Layout(problem, blocking, grid)
    layers = len(blocking.parts(grid.layers))
    for wave in blocking.waves((1, cuts, cuts), (grid.rows, grid.columns)):
        needs: set[tuple[Any, ...]] = set()
        homes, owned, images = {}, Counter[int](), Counter[int]()
        for b, i, j in blocking.c_indices(wave):
            size = blocking.m[i] * blocking.m[j] * 4
            images[grid.owner(i, j, b)] += size * (i != j and symmetry == "hermitian")
            for layer, steps in enumerate(blocking.parts(grid.layers)):
                owner = grid.owner(i, j, b, layer)
                owned[owner] += size
                for p in (p for step in steps for p in step):
                    for row, use in ((i, "A"), (j, "B")):
                        needs.add((owner, use, b, row, p))
                        homes[b, row, p] = grid.owner(row, p, b, layer)
        received, sent, at_home, both = (Counter[int]() for _ in range(4))
        for owner, _, _, row, p in needs:
            both[owner] += blocking.m[row] * blocking.k[p] * 4
        for owner, b, row, p in {(owner, b, row, p) for owner, _, b, row, p in needs}:
            size = blocking.m[row] * blocking.k[p] * 4
            both[owner] -= size
            received[owner] += size * (owner != homes[b, row, p])
            sent[homes[b, row, p]] += size * (owner != homes[b, row, p])
        for (_, row, p), home in homes.items():
            at_home[home] += blocking.m[row] * blocking.k[p] * 4
        traffic = layout.operand_bytes(wave)
        for counted, figures in (
            (received, traffic.received),
            (sent, traffic.sent),
            (at_home, sum(traffic.homes)),
            (both, traffic.both),
            (owned, layout.c_bytes(wave, 4, layers)),
            (images, layout.mirror_bytes(wave, 4)),
        ):
            assert [counted[rank] for rank in range(grid.size)] == list(figures)


@pytest.mark.parametrize("workers", [1, 2, 4, 16, 64, 256])
def test_the_planner_cuts_finely_enough_that_no_worker_waits_long(workers: int) -> None:
    m = 65536 * int(workers**0.5)
    problem = Problem(m, m, m, F4, symmetry="symmetric")
    spec = replace(GPUS, workers=workers, memory=10**12)
    plan, whole = make_plan(problem, spec), make_plan(replace(problem, symmetry=None), spec)
    layout = Layout(problem, plan.blocking, plan.grid)
    owned = layout.c_bytes(plan.blocking.whole, 1, 1)
    assert owned.max() <= 1.25 * owned.mean()  # with one block of C a worker it would be twice the mean
    assert plan.cost.seconds < 0.8 * whole.cost.seconds
    assert plan.bytes_moved < whole.bytes_moved or workers == 1
    assert plan.bytes_moved <= plan.cost.bytes_bound


def test_a_plan_says_and_shows_that_one_triangle_is_multiplied() -> None:
    plan = make_plan(Problem(640, 320, 640, F4, symmetry="symmetric"), GPUS, text="g2x2x1 b64x64x64 p1 w1 l2")
    rows = dict(plan.rows())
    assert rows["product"].startswith("640 x 320 times its transpose, float32")
    assert "55 of 100 blocks of C (its lower triangle)" in rows["blocks"]
    html = plan._repr_html_()
    picture = ET.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    titles = {title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")}
    assert {"C[1, 0]: worker 2", "C[0, 1]: C[1, 0] transposed, worker 2"} <= titles


# The graph


def test_one_triangle_has_chains_and_the_other_one_mirrors_them() -> None:
    A = da.ones((64, 96), chunks=16)
    C = distmm.gram(A, plan="g2x2x1 b16x16x16 p2 w1 l2")
    layer = C.dask.layers[C.name]
    tasks = dict(layer)
    products = [task for task in tasks.values() if isinstance(task, Product)]
    images = [task for task in tasks.values() if isinstance(task, Placed) and not isinstance(task, Product)]
    assert (len(products), len(images)) == (10 * 3, 6)
    assert len(layer) == len(tasks) == 36
    assert layer.get_output_keys() == set(da.core.flatten(C.__dask_keys__()))
    for task in images:
        _, j, i = task.key
        assert j < i
        assert task.dependencies == {(C.name, i, j)}
        assert task.placement.rank == Grid(2, 2).owner(i, j)
    assert {key[0] for task in products for key in task.operands()} == {A.name}
    (optimized,) = dask.optimize(C + 1)
    kept = {task.key: task.placement for task in optimized.__dask_graph__().values() if isinstance(task, Placed)}
    assert kept == {key: task.placement for key, task in tasks.items()}


class Reads:
    """An array-like that notes every region that is read."""

    shape, dtype, ndim = (20, 12), np.dtype("f8"), 2

    def __init__(self) -> None:
        self.values, self.regions = sample(self.shape), Counter[Any]()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        self.regions[tuple((s.start, s.stop) for s in index)] += 1
        return self.values[index]


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_each_block_is_read_once(trans: bool, scheduler: str) -> None:
    a = Reads()
    c = distmm.gram(a, trans=trans, blocks=(5, 4)).compute(scheduler=scheduler)
    np.testing.assert_allclose(c, truth(a.values, trans))
    assert set(a.regions.values()) == {1}
    assert len(a.regions) == (20 // 4) * -(-12 // 5) if trans else (20 // 5) * (12 // 4)


# Clusters

BLOCKS, DEPTH, EDGE = 8, 4, 64


def lazy(seed: int = 1, rows: int = BLOCKS, columns: int = DEPTH, edge: int = EDGE, dtype: str = "f4") -> da.Array:
    return da.random.default_rng(seed).random((rows * edge, columns * edge), chunks=edge, dtype=dtype)


class Held(WorkerPlugin):
    """Largest number of bytes of arrays that a worker held at once: memory that several share counts once.

    A result of a chain whose successor is there too is not counted: it is freed by the next message.
    """

    name = "held-bytes"

    def setup(self, worker: Worker) -> None:
        self.worker = worker
        worker.peak_held = 0

    def transition(self, key: object, start: str, finish: str, **kwargs: Any) -> None:
        blocks = {key: block for key, block in self.worker.data.items() if isinstance(block, np.ndarray)}
        last: dict[object, int] = {}
        for name, *at in blocks:
            if str(name).startswith("distmm-step-"):
                last[tuple(at[:-1])] = max(last.get(tuple(at[:-1]), -1), at[-1])
        memory = {}
        for (name, *at), block in blocks.items():
            chain = str(name).startswith("distmm-step-")
            over = chain and (at[-1] < last[tuple(at[:-1])] or any(k[1:] == tuple(at[:-1]) for k in blocks))
            if not over:
                owner = block
                while isinstance(owner.base, np.ndarray):
                    owner = owner.base
                memory[id(owner)] = owner.nbytes
        self.worker.peak_held = max(self.worker.peak_held, sum(memory.values()))


@pytest.fixture
def measured(client: Client) -> Any:
    cluster.install(client)
    telemetry.install(client)
    client.register_plugin(Held())
    with client.as_current():
        yield client
    client.unregister_worker_plugin(Held.name)


def finished(client: Client, name: str) -> tuple[int, int]:
    """Product tasks, and blocks of C, that the scheduler saw finish."""

    def read(dask_scheduler: Scheduler) -> tuple[int, int]:
        token = name.rpartition("-")[2]
        keys = [entry[0] for entry in dask_scheduler.transition_log if entry[2] == "memory"]
        steps = {key for key in keys if isinstance(key, tuple) and key[0] == f"distmm-step-{token}"}
        return len(steps), len({key for key in keys if isinstance(key, tuple) and key[0] == name})

    return client.run_on_scheduler(read)


def test_tasks_and_bytes_are_the_plans_and_less_than_those_of_matmul(measured: Client) -> None:
    moved, tasks, plans = [], [], []
    for plan, product in (
        (distmm.plan(lazy(1)), lambda: distmm.gram(lazy(1), client=measured)),
        (distmm.plan(lazy(2), lazy(2).T), lambda: distmm.matmul(lazy(2), lazy(2).T, client=measured)),
    ):
        assert (plan.grid, plan.blocking.panels) == (Grid(2, 2), 1)
        before = telemetry.bytes_moved(measured)
        C = product()
        kept = measured.persist(C)
        wait(kept)
        moved.append(telemetry.bytes_moved(measured) - before)
        steps, blocks = finished(measured, C.name)
        assert blocks == BLOCKS**2
        images = plan.blocking.c_blocks - plan.blocking.whole.c_blocks
        tasks.append(steps + blocks - images)
        plans.append(plan)
    assert moved[0] == plans[0].bytes_moved < plans[1].bytes_moved <= moved[1]
    assert tasks == [plan.cost.tasks for plan in plans] == [BLOCKS * (BLOCKS + 1) // 2 * DEPTH, BLOCKS**2 * DEPTH]


@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_no_worker_holds_more_than_the_plan_says(measured: Client, dtype: str) -> None:
    edge = 640 if dtype == "f8" else 320
    A = da.random.default_rng(5).random((BLOCKS * edge, DEPTH * edge), chunks=edge)
    A = A if dtype == "f8" else A.map_blocks(lambda x: x + 1j, dtype=dtype)
    plan = distmm.plan(A)
    assert (plan.grid, plan.blocking.panels, plan.lookahead) == (Grid(2, 2), 1, 2)
    measured.run(lambda dask_worker: setattr(dask_worker, "peak_held", 0))
    kept = measured.persist(distmm.gram(A, plan=plan, client=measured))
    wait(kept)
    block = edge * edge * np.dtype(dtype).itemsize
    peak = max(measured.run(lambda dask_worker: dask_worker.peak_held).values()) + block  # the one that is written
    # Conjugates come while the last blocks of A go: their sum, which the plan allows for, is not reached.
    assert plan.cost.peak_bytes / (1.5 if dtype == "f8" else 2) <= peak <= plan.cost.peak_bytes


def test_images_are_views_beside_their_sources(measured: Client) -> None:
    C = measured.persist(distmm.gram(lazy(6), client=measured))
    wait(C)
    name = C.name

    def views(dask_worker: Worker) -> list[bool]:
        blocks = {key[1:]: block for key, block in dask_worker.data.items() if key[0] == name}
        return [np.shares_memory(block, blocks[j, i]) for (i, j), block in blocks.items() if i < j]

    found = [view for views_there in measured.run(views).values() for view in views_there]
    assert found == [True] * (BLOCKS * (BLOCKS - 1) // 2)


@pytest.mark.parametrize(("dtype", "trans"), [("f4", False), ("f2", False), ("c8", True)])
@pytest.mark.parametrize("text", ["g2x2x1 b2x32x32x32 p2 w1 l2", "g1x2x2 b2x64x32x64 p1 w1 l3"])
def test_the_graph_computes_bit_for_bit_what_the_serial_executor_does(
    client: Client, dtype: str, trans: bool, text: str
) -> None:
    a, result = sample((3, 130, 100)).astype(dtype) / np.dtype(dtype).type(10), np.dtype(dtype)
    a = a + 1j * a[:, ::-1] if trans else a
    plan = distmm.plan(a, transa=trans, plan=text)
    epilogue = Epilogue(result, "numpy", 3, conjugate=trans)
    expected = serial.execute(plan, np.swapaxes(a, 1, 2) if trans else a, None, KernelChoice("cpu", result), epilogue)
    np.testing.assert_array_equal(expected, mirrored(expected))
    C = distmm.gram(a, alpha=3, trans=trans, plan=text, client=client)
    for _ in range(2):  # what comes over the network comes with any alignment
        np.testing.assert_array_equal(client.compute(C, sync=True), expected)
    np.testing.assert_array_equal(C.compute(scheduler="threads"), expected)
    np.testing.assert_allclose(expected, 3 * truth(a, trans), rtol=2e-2 if dtype == "f2" else 1e-4, atol=1)


@pytest.mark.parametrize(("waves", "dtype"), [("w1", "f4"), ("w2", "f4"), ("w100", "c8")])
def test_waves_fill_both_triangles(client: Client, waves: str, dtype: str, tmp_path: Any) -> None:
    a = sample((2, 400, 40), dtype)
    text = f"g2x2x1 b2x80x20x80 p1 {waves} l2"
    plan = distmm.plan(a, plan=text, client=client)
    assert len(plan.waves) == {"w1": 1, "w2": 3, "w100": 6}[waves]
    expected = distmm.gram(a, plan=text).compute(scheduler="synchronous")
    np.testing.assert_allclose(expected, truth(a), rtol=1e-3, atol=1e-2)
    array = np.zeros((2, 400, 400), dtype)
    store = zarr.create_array(tmp_path / "c.zarr", shape=array.shape, chunks=(1, 80, 80), dtype=dtype)
    for out in (array, store):
        assert distmm.gram(a, plan=text, out=out, client=client) is out
        np.testing.assert_array_equal(out[:], expected)


def test_waves_come_to_a_client_that_workers_do_not_reach(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "allow", lambda: False)
    monkeypatch.delitem(lent._tried, client, raising=False)
    a, out = sample((500, 200)), np.zeros((500, 500))
    distmm.gram(a, plan="g2x2x1 b128x100x128 p1 w2 l2", out=out, client=client)
    np.testing.assert_allclose(out, truth(a), atol=1e-9)
    monkeypatch.delitem(lent._tried, client)


def test_without_a_cluster_this_process_writes() -> None:
    a, out = sample((30, 20)), np.zeros((20, 20))
    distmm.gram(a, trans=True, out=out, blocks=(8, 8))
    np.testing.assert_allclose(out, truth(a, trans=True))


def test_telemetry_knows_the_blocks_that_are_not_multiplied(client: Client) -> None:
    def newest(dask_scheduler: Scheduler) -> Any:
        telemetry = dask_scheduler.plugins[Telemetry.name]
        return telemetry.figures(list(telemetry.records)[-1])

    plan = distmm.plan(lazy(7), plan="g2x2x1 b64x64x64 p1 w2 l2", client=client)
    client.gather(futures_of(client.persist(distmm.gram(lazy(7), plan=plan, client=client))))
    for _ in range(2):
        figures = client.run_on_scheduler(newest)
        assert (figures.blocks_done, figures.blocks, figures.state) == (BLOCKS**2, BLOCKS**2, "complete")
        assert figures.done == figures.total == plan.cost.tasks
        distmm.gram(lazy(10), plan=plan, client=client, out=np.zeros((BLOCKS * EDGE,) * 2, "f4"))


def test_a_lost_worker_costs_time_and_no_bits(client: Client) -> None:
    A = lazy(8)
    C = distmm.gram(A, client=client)
    expected = client.compute(C, sync=True)
    kept = client.persist(distmm.gram(A, client=client))
    client.gather(client.compute(kept.sum()))
    name = kept.name

    def drop(dask_scheduler: Scheduler) -> int:
        """Let the scheduler believe that rank 2 has lost its blocks of C, as when its process dies."""
        plugin = dask_scheduler.plugins[PlacementPlugin.name]
        worker = dask_scheduler.workers[plugin.ranks[2]]
        lost = [ts.key for ts in list(worker.has_what) if ts.key[0] == name]
        for key in lost:
            dask_scheduler.remove_all_replicas(dask_scheduler.tasks[key])
            dask_scheduler.transitions({key: "released"}, "test")
        return len(lost)

    assert client.run_on_scheduler(drop) > 0
    deadline = time.time() + 30
    while any(future.status != "finished" for future in futures_of(kept)) and time.time() < deadline:
        time.sleep(0.02)
    np.testing.assert_array_equal(client.compute(kept, sync=True), expected)


def test_verify_takes_it_as_it_takes_any_product(client: Client) -> None:
    A = lazy(9)
    with client.as_current():
        C = distmm.gram(A, client=client)
        assert distmm.verify(A, A.T, C).ok
        assert not distmm.verify(A, A.T, C + (da.arange(C.shape[0], chunks=EDGE) == 300)).ok


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i4", "c8"])
@pytest.mark.parametrize("kernel", [None, "tiled"])
def test_gpus_make_symmetric_products(dtype: str, kernel: str | None) -> None:
    import cupy

    a = sample((900, 640), dtype)
    for trans in (False, True):
        chunks = (256, 320)
        A = da.from_array(cupy.asarray(a), chunks=chunks, asarray=False)
        C = distmm.gram(A, trans=trans, kernel=kernel).compute(scheduler="synchronous")
        assert isinstance(C, cupy.ndarray)
        c = C.get()
        np.testing.assert_array_equal(c, mirrored(c))
        np.testing.assert_allclose(c, truth(a, trans), rtol=1e-2 if dtype == "f2" else 1e-3, atol=2)
        host = distmm.gram(a, trans=trans, kernel=kernel, device="gpu", blocks=(300, 160))
        np.testing.assert_array_equal(host.compute(scheduler="synchronous"), c)
