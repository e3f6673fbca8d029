from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise

import cloudpickle
import dask
import dask.array as da
import numpy as np
import pytest

from distmm import gemm, matmul, plan
from distmm.graph.dask_tasks import ProductTask
from distmm.graph.product_graph import ProductLayer
from distmm.planning.blocks import Blocking, even_edges
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.worker.tasks.epilogue import Epilogue


def products(collection: da.Array) -> list[ProductTask]:
    return [task for task in collection.__dask_graph__().values() if isinstance(task, ProductTask)]


@pytest.fixture
def c() -> da.Array:
    a = da.ones((64, 96), chunks=16)
    return matmul(a, da.ones((96, 48), chunks=16), blocks=(16, 16, 16))


def test_one_chain_a_block_of_c_one_task_a_step(c: da.Array) -> None:
    tasks = products(c)
    assert len(tasks) == 4 * 3 * 6
    for task in tasks:
        where = task.placement
        previous = [key for key in task.dependencies if str(key[0]).startswith("distmm-step")]
        assert len(previous) == (where.step > 0)
        if previous:
            assert previous[0][1:] == (where.i, where.j, where.step - 1)


@pytest.mark.parametrize(
    "use", [lambda c: c, lambda c: c + 1, lambda c: c.sum(), lambda c: c[:20, :20], lambda c: c.T.rechunk(64)]
)
def test_products_keep_their_class_and_placement_through_optimisation(c: da.Array, use: object) -> None:
    used = use(c)
    (optimized,) = dask.optimize(used)
    before = {task.key: task.placement for task in products(c)}
    after = {task.key: task.placement for task in products(optimized)}
    assert after
    assert after.items() <= before.items()


def test_a_block_that_is_its_own_partner_is_not_fused_away() -> None:
    x = da.ones((8, 8), chunks=8)
    (optimized,) = dask.optimize(matmul(x, x))
    assert len(products(optimized)) == 1
    np.testing.assert_array_equal(optimized.compute(scheduler="synchronous"), np.full((8, 8), 8.0))


def test_tasks_pickle_with_their_placement(c: da.Array) -> None:
    task = products(c)[0]
    copy = pickle.loads(pickle.dumps(task))
    assert isinstance(copy, ProductTask)
    assert copy.placement == task.placement
    assert list(copy.operands()) == list(task.operands())


def test_a_large_product_travels_as_a_few_kilobytes() -> None:
    a = da.zeros((400_000, 400_000), chunks=8192, dtype="f2")
    edges = even_edges(400_000, 8192)
    problem = Problem(400_000, 400_000, 400_000, np.dtype("f2"))
    spec = ClusterSpec(workers=64, memory=120 * 10**9, device="cuda", rate=5e13, link=2e10)
    plan = make_plan(problem, spec, blocking=Blocking(edges, edges, edges))
    c = matmul(a, a, plan=plan)
    layer = c.dask.layers[c.name]
    assert len(layer) > 10_000
    assert len(cloudpickle.dumps(c.dask)) < 8000
    assert not layer.is_materialized()


def test_a_layer_that_was_sent_makes_the_same_tasks(c: da.Array) -> None:
    layer = c.dask.layers[c.name]
    copy = pickle.loads(pickle.dumps(layer))
    assert len(layer) == len(copy) == len(dict(copy))
    assert {key: task.placement for key, task in copy.items()} == {key: layer[key].placement for key in layer}
    assert copy.get_output_keys() == set(da.core.flatten(c.__dask_keys__()))
    assert copy.get_output_keys() <= copy.keys()


def test_short_tasks_take_several_panels_in_order() -> None:
    a = da.ones((32, 512), chunks=(32, 8))
    tasks = products(matmul(a, da.ones((512, 32), chunks=(8, 32))))
    assert len(tasks) < 64
    taken = [
        key[-1] for task in sorted(tasks, key=lambda t: t.placement.step) for key in task.operands() if key[0] == a.name
    ]
    assert taken == list(range(64))


@pytest.mark.usefixtures("blocks_are_chunks")
def test_batches_share_the_blocks_of_a_broadcast_operand() -> None:
    b = da.ones((8, 8), chunks=4)
    a = da.ones((3, 8, 8), chunks=(1, 4, 4))
    keys = {key for task in products(matmul(a, b)) for key in task.operands()}
    assert {key for key in keys if key[0] == b.name} == {(b.name, p, j) for p in range(2) for j in range(2)}


@pytest.mark.usefixtures("blocks_are_chunks")
def test_beta_adds_the_users_c_at_the_last_step_only() -> None:
    a, c = da.ones((16, 32), chunks=8), da.ones((16, 16), chunks=8)
    for task in products(gemm(1, a, a, 1, c, transb=True)):
        reads_c = any(key[0] == c.name for key in task.dependencies)
        assert reads_c == str(task.key[0]).startswith("distmm-matmul")


def waved(parts: tuple[int, int, int]) -> Plan:
    a, b = da.ones((3, 64, 32), chunks=(1, 8, 8)), da.ones((32, 48), chunks=8)
    made = plan(a, b, blocks=(8, 8, 8))
    return replace(made, schedule=replace(made.schedule, wave_cuts=parts))


@pytest.mark.parametrize("parts", [(1, 1, 1), (1, 2, 1), (2, 3, 2), (3, 100, 100)])
def test_the_waves_of_a_plan_make_every_task_once(parts: tuple[int, int, int]) -> None:
    cut = waved(parts)
    what = (
        "distmm-matmul-x",
        cut,
        ("a", "b", None),
        Epilogue(np.dtype("f8"), "numpy"),
    )
    whole, waves = ProductLayer(*what), [ProductLayer(*what, wave) for wave in cut.waves]
    assert len(waves) > (parts != (1, 1, 1))
    assert sum(map(len, waves)) == len(whole) == cut.schedule.tasks
    assert {key: task.placement for wave in waves for key, task in wave.items()} == {
        key: task.placement for key, task in whole.items()
    }
    assert set().union(*(wave.get_output_keys() for wave in waves)) == whole.get_output_keys()


def test_earlier_waves_come_first() -> None:
    cut = waved((1, 2, 2))
    what = (
        "distmm-matmul-x",
        cut,
        ("a", "b", None),
        Epilogue(np.dtype("f8"), "numpy"),
    )
    orders = [{task.placement.order for task in ProductLayer(*what, wave).values()} for wave in cut.waves]
    assert sorted(o for wave in orders for o in wave) == list(range(len(cut.waves) * len(cut.blocking.parts()[0])))
    assert all(max(a) < min(b) for a, b in pairwise(orders))


def test_plans_stay_where_the_tasks_are_made(c: da.Array) -> None:
    for task in products(c):
        assert task.plan.blocking.c_blocks == 12
        assert task.substitute({}, key="renamed").plan is task.plan
        assert pickle.loads(pickle.dumps(task)).plan is None
