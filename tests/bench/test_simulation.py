"""The simulation on few GPUs; `tests/bench/simulation.py` makes the table of tests/bench/README.md."""

from __future__ import annotations

from typing import Any

import pytest
from dask._task_spec import Task

from tests.bench import simulation
from tests.bench.simulation import Machine
from tests.tables import later


@pytest.mark.parametrize(("gpus", "size"), later([(4, 131072), (16, 200_000)]))
def test_the_planners_own_plans_keep_gpus_busy_move_the_bound_and_hold_what_they_say(gpus: int, size: int) -> None:
    virtual = Machine()
    plan = simulation.planned(size, gpus, "float32", virtual)
    result = simulation.simulate(plan, virtual)
    assert result.ideal / result.seconds > 0.9
    assert result.fetched == plan.bytes_moved == plan.cost.bytes_bound
    assert plan.peak.worker / 1.25 <= result.peak <= plan.peak.worker
    assert result.seconds <= 1.1 * plan.cost.seconds


def test_a_large_product_has_few_tasks_and_starts_at_once() -> None:
    virtual = Machine(rate=6e14)  # float16 on an H200
    plan = simulation.planned(400_000, 64, "float16", virtual)
    plan.validate()
    graph = simulation.product(plan)
    tasks = [task for layer in graph.dask.layers.values() for task in layer.values() if isinstance(task, Task)]
    assert len(tasks) <= 50 * 64


def test_loads_that_may_begin_do_before_products_of_open_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = Machine()
    plan = simulation.planned(131072, 4, "float32", virtual)
    asked: dict[str, list[tuple[bool, int, tuple[int, ...]]]] = {}
    receive = simulation.MeasuredWorker.receive

    def noted(self: simulation.MeasuredWorker, message: dict[str, Any]) -> None:
        if message["op"] == "compute-task":
            name, row, column, *step = message["key"]
            product = name.startswith(("distmm-step", "distmm-matmul"))
            panel = column if name == self.cluster.a else row
            number = (step or [len(plan.blocking.parts()[0]) - 1])[0] if product else panel // plan.blocking.panels
            asked.setdefault(self.address, []).append((product, number, message["priority"]))
        receive(self, message)

    monkeypatch.setattr(simulation.MeasuredWorker, "receive", noted)
    simulation.simulate(plan, virtual)
    assert len(asked) == 4
    for tasks in asked.values():
        loads = [(step, priority) for product, step, priority in tasks if not product]
        products = [(step, priority) for product, step, priority in tasks if product]
        assert [step for step, _ in loads] == sorted(step for step, _ in loads)  # Dask would begin with the last one
        for step, priority in loads:
            assert all(priority < later for at, later in products if at > step - plan.lookahead)
