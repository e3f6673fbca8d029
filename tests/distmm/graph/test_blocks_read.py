"""What tasks of a product read: chunks of a block, or one array of each worker that has many of them."""

from __future__ import annotations

from collections import Counter

import dask.array as da
import numpy as np
import pytest

from distmm.graph import product_graph
from distmm.graph.dask_tasks import GatherTask, ProductTask
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.owners import Places
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.schedule import parse
from distmm.worker.tasks.epilogue import Epilogue

EDGES = (8,) * 24
PROBLEM = Problem(192, 192, 192, np.dtype("f4"))


def plan_of(homes: Places, text: str, device: str = "cpu") -> Plan:
    cluster = ClusterSpec(2, 10**11, device, rate=1e10, link=1e9, load=1e9)  # type: ignore[arg-type]
    schedule = parse(text, PROBLEM, homes)
    at = ("resident", "resident")
    return Plan(PROBLEM, schedule, cluster, operands=at)  # type: ignore[arg-type]


def tasks_of(plan: Plan, a: str = "a", b: str = "b") -> list[GatherTask | ProductTask]:
    arrays = (da.zeros((192, 192), chunks=(EDGES, EDGES), name=name, dtype="f4") for name in (a, b))
    graph = product_graph.build("c-token", plan, *arrays, Epilogue(np.dtype("f4"), "numpy"))
    return [task for task in graph.values() if isinstance(task, GatherTask | ProductTask)]


def homes(rank) -> tuple[tuple[int, ...], ...]:  # type: ignore[no-untyped-def]
    return tuple(tuple(rank(i, j) for j in range(24)) for i in range(24))


SCATTERED = Places(homes(lambda i, j: (i + j) % 2), homes(lambda i, j: (i * j) % 2))
ROWS = Places(homes(lambda i, j: i // 12), homes(lambda i, j: i // 12))
PANELS = Places(homes(lambda i, j: j // 12), homes(lambda i, j: i // 12))


def test_each_chunk_is_gathered_once_where_it_is_and_products_read_one_array_of_each_rank() -> None:
    tasks = tasks_of(plan_of(SCATTERED, "g2x1x1 b96x192x96 p1 w1 l2 c8x8x8"))
    gathered = {task.key: task for task in tasks if isinstance(task, GatherTask)}
    read = Counter(key for task in gathered.values() for key in task.dependencies)
    assert set(read.values()) == {1}
    assert len(read) == 2 * 24 * 24
    for of, at in zip("AB", SCATTERED[:2], strict=True):
        for (_, operand, *_, rank), task in gathered.items():
            if operand == of:
                assert {at[i][j] for _, i, j in task.dependencies} == {rank}  # type: ignore[index]
    for task in set(tasks) - set(gathered.values()):
        assert set(task.operands()) <= gathered.keys()
        assert [key[-1] for key in task.operands()] == list(task.placement.homes)
    assert len(gathered) == (2 + 2) * 2


def test_a_block_is_read_as_it_is_where_all_of_its_chunks_are() -> None:
    tasks = tasks_of(plan_of(ROWS, "g2x1x1 b96x192x96 p1 w1 l2 c8x8x8"))
    gathered = [task.key[1:] for task in tasks if isinstance(task, GatherTask)]
    assert sorted(gathered) == [("B", 0, j, rank) for j in range(2) for rank in range(2)]  # A stays


@pytest.mark.parametrize(
    ("plan", "names"),
    [
        (plan_of(SCATTERED, "g2x1x1 b96x192x96 p1 w1 l2 c8x8x8", "cuda"), "ab"),
        (plan_of(SCATTERED, "g2x1x1 b96x192x96 p1 w1 l2 c8x8x8"), "aa"),
        (plan_of(Places(*SCATTERED[:2], "same"), "g2x1x1 b96x192x96 p1 w1 l2 c8x8x8"), "aa"),
        (plan_of(SCATTERED, "g2x1x1 b16x16x16 p1 w1 l2 c8x8x8"), "ab"),
        (plan_of(PANELS, "gk2 b192x96x192 p1 w1 l2 c8x8x8"), "ab"),
    ],
    ids=["GPUs", "one array as A and B", "A @ A", "few chunks", "panels stay"],
)
def test_chunks_are_not_gathered(plan: Plan, names: str) -> None:
    assert not any(isinstance(task, GatherTask) for task in tasks_of(plan, *names))


def test_the_memory_of_gathered_chunks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "g2x1x1 b96x192x96 p1 w1 l2 c8x8x8"
    plan = plan_of(SCATTERED, text)
    at = np.array(SCATTERED[:2])
    here = [8 * 8 * 4 * np.count_nonzero(at == rank) for rank in range(2)]
    np.testing.assert_array_equal(plan.layout.gathered_bytes(plan.blocking.whole), here)
    peak = plan.peak.worker
    monkeypatch.setattr("distmm.planning.schedule.FEWEST_GATHERED", 10**9)
    assert peak - plan_of(SCATTERED, text).peak.worker in here
