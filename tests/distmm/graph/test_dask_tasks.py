"""The parts of ``dask._task_spec`` that distmm builds on: these tests fail first when Dask changes them."""

from __future__ import annotations

import re
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from dask.core import flatten

import distmm
from distmm.graph.block_arrays import one_per_block, reshaped
from distmm.graph.dask_tasks import List, PlacedTask, ProductTask, TaskRef
from distmm.graph.placement import Placement
from distmm.worker.tasks import products

WHERE = Placement("c", (), 1, 2, 0, 0, 5)
BLOCKS = List(TaskRef(("a", 1, 0)), TaskRef(("a", 1, 1))), List(TaskRef(("b", 0, 2)), TaskRef(("b", 1, 2)))


def step(previous: TaskRef | None = None) -> ProductTask:
    return ProductTask(("c", 1, 2), products.multiply, WHERE, None, previous, *BLOCKS, None, None)


def test_a_task_depends_on_the_keys_in_its_lists() -> None:
    blocks = {("a", 1, 0), ("a", 1, 1), ("b", 0, 2), ("b", 1, 2)}
    assert step().dependencies == blocks
    assert set(step().operands()) == blocks
    assert step(TaskRef(("step", 0))).dependencies == blocks | {("step", 0)}


def test_a_task_keeps_its_class_and_placement_under_another_name_and_is_fused_with_none() -> None:
    task = step().substitute({("a", 1, 0): ("other", 1, 0)})
    assert isinstance(task, ProductTask)
    assert task.placement is WHERE
    assert ("other", 1, 0) in task.dependencies
    assert task.block_fusion
    assert WHERE.rank == 5


def test_the_first_step_of_a_chain_adds_to_nothing() -> None:
    assert step().is_first
    assert not step(TaskRef(("step", 0))).is_first
    assert step(TaskRef(("step", 0))).operands() == step().operands()


def test_a_sum_of_partial_blocks_reads_no_operands() -> None:
    total = ProductTask(
        ("c", 1, 2), products.combine, WHERE, None, TaskRef(("step", 0)), TaskRef(("step", 1)), None, None
    )
    assert total.operands() == ()
    assert not total.is_first


def test_an_array_of_calls_has_one_task_for_each_block() -> None:
    graph = one_per_block("double", lambda x: 2 * x, {(0, 0): 1, (0, 1): 2})
    assert dask.get(graph.to_dict(), list(flatten([("double", 0, 0), ("double", 0, 1)]))) == (2, 4)


def test_blocks_are_reshaped_where_they_are_and_back() -> None:
    x = np.arange(3 * 4 * 5).reshape(3, 4, 5)
    array = da.from_array(x, chunks=((2, 1), (1, 3), (5,)))
    flat = reshaped(array, ((2, 1), (5, 15)))
    assert flat.shape == (3, 20)
    np.testing.assert_array_equal(flat.compute(), x.reshape(3, 20))  # only the first merged dimension is cut
    boxes = reshaped(array, ((10, 30, 5, 15),))
    np.testing.assert_array_equal(boxes.compute()[10:40], x[:2, 1:].ravel())
    assert all(len(task.dependencies) == 1 for task in boxes.dask.layers[boxes.name].mapping.values())
    np.testing.assert_array_equal(reshaped(boxes, array.chunks).compute(), x)


@pytest.mark.parametrize("private", [r"dask\._task_spec", r"worker_restrictions|request_\w+_replicas|\.transitions\("])
def test_each_private_part_of_dask_is_touched_in_one_module(private: str) -> None:
    folder = Path(distmm.__file__).parent
    code = {path: re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL) for path in folder.rglob("*.py")}
    touching = [path.name for path, text in code.items() if re.search(private, text)]
    assert touching == ["dask_tasks.py" if "spec" in private else "dask_internals.py"]


def test_a_placed_task_runs_as_any_other_where_nobody_places_it() -> None:
    task = PlacedTask(("double", 0), lambda where, block: 2 * block, WHERE, TaskRef(("a", 0)))
    np.testing.assert_equal(dask.get({("a", 0): 21, ("double", 0): task}, ("double", 0)), 42)
