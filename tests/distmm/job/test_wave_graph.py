"""Which tasks sketch the blocks of A and B."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import distmm
from distmm.job.wave_graph import Names, WriteLayer

PANELS = 4


@pytest.mark.parametrize(
    ("workers", "grid", "rows", "of_a", "of_b"),
    [
        (1, "g1x1x1", 1, PANELS, 0),
        (1, "g1x1x1", 2, 2 * PANELS, PANELS),
        (2, "g1x2x1", 1, PANELS, PANELS),  # of each panel, the blocks of B at the other worker
        (2, "g2x1x1", 1, PANELS, PANELS // 2),
    ],
)
def test_a_task_sketches_the_blocks_of_b_that_it_alone_needs_at_its_home(
    workers: int, grid: str, rows: int, of_a: int, of_b: int
) -> None:
    a, b = np.ones((2, PANELS), "f4"), np.ones((PANELS, 2), "f4")
    plan = distmm.plan(a, b, cluster=distmm.cpus(workers, memory="1GB"), plan=f"{grid} b1x1x1 p1 w1 l2")
    contents = SimpleNamespace(reduction=None)
    judge = SimpleNamespace(plan=plan, tolerance=None, orders={"A": None, "B": None}, seed=1, contents=contents)
    blocks = tuple((i, j) for i in range(rows) for j in range(2))
    writer: Any = SimpleNamespace(judge=judge)
    layer = WriteLayer("write", Names("a", "b", "c", None), writer, plan.blocking.whole, blocks)
    tasks = {task.key: task for task in layer._tasks()}
    count = {what: sum(key[0] == f"sketch-{what}" for key in tasks) for what in "ab"}
    assert count == {"a": of_a, "b": of_b}
    for i in range(rows):
        for p in range(PANELS):
            block_names = {key for key in _read(tasks, ("sketch-a", i, p)) if key[0] in "ab"}
            assert block_names == {("a", i, p), ("b", p, 0), ("b", p, 1)}


def _read(tasks: dict[Any, Any], key: Any) -> set[Any]:
    """Keys that a task of the layer reads, itself or by a sketch of B."""
    own = tasks[key].dependencies
    return set(own).union(*(tasks[each].dependencies for each in own if each[0] == "sketch-b"))
