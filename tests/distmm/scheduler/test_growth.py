"""What the scheduler does grows with a job's size, and not with its square: counted in calls, never timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import distmm
from distmm.graph import product_graph
from distmm.graph.placement import Placement
from distmm.job.wave_graph import Names, WriteLayer
from distmm.planning.plan import Plan
from distmm.scheduler.lookahead import Lookahead
from distmm.scheduler.product_state import Limits, OperandBlock, PlannedTask
from distmm.scheduler.products import Products
from distmm.telemetry.heartbeats import Heartbeats
from distmm.telemetry.record import Record
from distmm.worker.tasks.epilogue import Epilogue

PANELS, TIMES, MOST = 100, 4, 5.0  # a linear function makes 4 times the calls, a quadratic one 16 times


def calls(function: Callable[[], object]) -> int:
    """Count the lines of Python, and the calls of C functions, that a function takes."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def plan(panels: int, columns: int = 2) -> Plan:
    a, b = np.broadcast_to(np.float32(1), (2, panels)), np.broadcast_to(np.float32(1), (panels, columns))
    return distmm.plan(a, b, blocks=(1, 1, 1))


def writing(size: Plan) -> Callable[[], object]:
    blocks = tuple((i, j) for _, i, j in size.blocking.c_indices())
    contents = SimpleNamespace(reduction=None)
    judge = SimpleNamespace(plan=size, tolerance=None, orders={"A": None, "B": None}, seed=1, contents=contents)
    writer: Any = SimpleNamespace(judge=judge)

    def make() -> None:
        list(WriteLayer("w", Names("a", "b", "c", None), writer, size.blocking.whole, blocks)._tasks())

    return make


def chains(size: Plan) -> Callable[[], object]:
    epilogue = Epilogue(np.dtype("f4"), "numpy")
    return lambda: list(product_graph.ProductLayer("c-1", size, ("a", "b", None), epilogue)._tasks())


def steps(size: int) -> Callable[[], object]:
    def run() -> None:
        lookahead = Lookahead(2)
        for order in range(size):
            lookahead.add(order, ("c", order))
        for order in range(size):
            lookahead.open()
            lookahead.finish(order, ("c", order))

    return run


def product(size: int) -> Callable[[], object]:
    """A chain of so many steps on the state machine, from its arrival until it is forgotten."""

    def run() -> None:
        products = Products()
        products.ranks.join("w", "w")
        where = [Placement("c", (), 0, 0, step, step, owners=(0,), homes=(0, 0), run="c") for step in range(size)]
        tasks = [PlannedTask(("s", n), at, not n, (("a", 0, n), ("b", n, 0))) for n, at in enumerate(where)]
        operands = {block: OperandBlock((block,), "c") for task in tasks for block in task.operands}
        products.arrived(tasks, (), operands, (), {"c": Limits()})
        for task in tasks:
            products.decide(lambda key: ())
            products.finished(task.key, task.where)
        for task in tasks:
            products.forgotten(task.key, task.where)
        products.decide(lambda key: ())
        assert not products.products

    return run


def products(count: int) -> Callable[[], object]:
    """So many products that read one operand, whose loads the first one holds, until all are forgotten."""

    def run() -> None:
        machine = Products()
        machine.ranks.join("w", "w")
        arrived = []
        for number in range(count):
            name = f"c{number}"
            where = [Placement(name, (), 0, 0, step, step, owners=(0,), homes=(0, 0), run=name) for step in range(4)]
            tasks = [PlannedTask((name, n), at, not n, (("a", 0, n), (name, n, 0))) for n, at in enumerate(where)]
            operands = {block: OperandBlock((block,), name) for task in tasks for block in task.operands}
            if number:
                operands |= {("a", 0, n): OperandBlock() for n in range(4)}
            machine.arrived(tasks, (), operands, (), {name: Limits(lookahead=1)})
            machine.decide(lambda key: ())
            arrived.append(tasks)
        for task in (task for tasks in arrived[::-1] for task in tasks):
            machine.forgotten(task.key, task.where)
        machine.decide(lambda key: ())
        assert not [*machine.products, *machine.loads, *machine.load_readers]

    return run


CASES: dict[str, Callable[[int], Callable[[], object]]] = {
    "writing tasks of many panels": lambda n: writing(plan(n)),
    "writing tasks of many columns": lambda n: writing(plan(1, n)),
    "product tasks": lambda n: chains(plan(n)),
    "lookahead": steps,
    "a product": product,
    "products that share an operand": products,
}


@pytest.mark.parametrize("case", CASES)
def test_work_grows_with_the_number_of_tasks_alone(case: str) -> None:
    small, large = (calls(CASES[case](size)) for size in (PANELS, TIMES * PANELS))
    assert large < MOST * small


def heartbeat_of(received: dict[str, int]) -> dict[str, Any]:
    load = (0.0, 0.0, 1)
    return {"received": received, "receiving": 0.0, "held": {}, "device": None, "load": load, "host": "h"}


def cluster(workers: int) -> Any:
    heartbeat = heartbeat_of({"a": 5})
    metrics = {"memory": 1, "distmm": heartbeat}
    found = {
        name: SimpleNamespace(address=name, nbytes=7, last_seen=1.0, metrics=metrics)
        for name in map(str, range(workers))
    }
    return SimpleNamespace(workers=found)


def read(heartbeats: Heartbeats, times: Iterable[int] = (0,)) -> int:
    return calls(lambda: [heartbeats._sample() for _ in times])


def test_heartbeats_cost_an_idle_scheduler_nothing_and_each_is_read_once() -> None:
    records = {"c": Record("c", plan(PANELS), 0.0)}
    scheduler = cluster(100)
    records["c"].arrays.add("a")
    heartbeats = Heartbeats(scheduler, records, str)
    for worker in scheduler.workers:
        records["c"].lane(worker)
    first, again = read(heartbeats), read(heartbeats)
    assert again < first / 4
    assert [lane.blocks.count for lane in records["c"].lanes.values()] == [1] * 100
    assert sum(lane.received for lane in records["c"].lanes.values()) == 500
    records["c"].ended = "cancelled"
    assert read(heartbeats) < 100


def test_a_scheduler_remembers_the_bytes_of_the_arrays_in_the_last_heartbeat_alone() -> None:
    scheduler, record = cluster(1), Record("c", plan(PANELS), 0.0)
    record.arrays.add("a9")
    heartbeats = Heartbeats(scheduler, {"c": record}, str)
    for number in range(10):
        heartbeats.take("0", heartbeat_of({f"a{number}": 5}))
    assert heartbeats.received == {"0": ({"a9": 5}, 0.0)}
    heartbeats.take("0", heartbeat_of({"a9": 3}))  # older than what a worker stated meanwhile
    heartbeats.take("0", heartbeat_of({"a9": 6}))
    assert record.lanes["0"].received == 6
