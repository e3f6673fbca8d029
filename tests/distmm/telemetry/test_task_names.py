"""What a task is for, as the scheduler's graph says."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from distmm.graph.dask_tasks import PlacedTask
from distmm.telemetry import task_names


class Dependents(list[Any]):
    """Tasks, and how many of them were looked at."""

    seen = 0

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            self.seen += 1
            yield each


def task(key: str, *dependents: Any, spec: Any = None) -> Any:
    return SimpleNamespace(key=(key, 0), run_spec=spec, dependencies=(), dependents=Dependents(dependents))


@pytest.fixture
def step() -> Any:
    """A step that reads a block."""
    return task("distmm-matmul", spec=PlacedTask.__new__(PlacedTask))


def test_a_task_that_a_step_reads_from_afar_is_of_the_operands(step: Any) -> None:
    assert task_names.served(task("add", task("copy", task("mean", step)))) == ([step.run_spec], "operands")
    assert task_names.served(task("distmm-load", step)) == ([step.run_spec], "load")
    assert task_names.served(task("add", task("store"))) == ([], "other")


def test_few_of_many_dependents_are_looked_at(step: Any) -> None:
    total = task("sum", *(task("divide", step) for _ in range(10_000)))
    assert task_names.served(task("add", total)) == ([step.run_spec], "operands")
    assert total.dependents.seen <= task_names.MOST_DEPENDENTS
