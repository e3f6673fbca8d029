"""Thousands of small products through the state machine, in random orders of events, and without Dask.

`Model` checks after every event that no more than the lookahead's steps are open, that no rank holds more blocks of C
than it has slots, that every task starts at its owner, and that replicas are dropped after their last planned use. The
tests here check how products end: all wanted blocks are made, and nothing of them is left.

`DISTMM_SCHEDULES=7200` plays 7200 seeds of each kind, 100 000 schedules together; `DISTMM_SCHEDULES=17:18` the 17th.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from distmm.graph.placement import Key, Placement
from distmm.planning.grid import Grid
from distmm.scheduler.product_state import Limits
from tests.distmm.scheduler.simulated import Model, Task


@dataclass
class Product:
    """A product to come: its graphs in the order of waves, each with the keys that a client wants of it."""

    name: str
    graphs: list[tuple[list[Task], list[Key]]]


def product(
    name: str, rng: random.Random, workers: int, operands: dict[Key, Task], lookahead: int, letters: str = "AB"
) -> Product:
    """Draw a product: kept, written wave by wave under one name, or as a job, whose waves are products of their own."""
    rows, columns, depth = (rng.randint(1, 3) for _ in range(3))
    grid = rng.choice(Grid.all_of(workers))
    kind = rng.choice(["kept", "written", "job"])
    written = kind != "kept"
    cuts = [range(rows)] if not written or rows == 1 else [range(rows // 2), range(rows // 2, rows)]
    chains = [Counter(grid.owner(i, j) for i in wave for j in range(columns)) for wave in cuts]
    slots = max(max(counted.values()) for counted in chains) + rng.randint(0, 1) if written else None
    limits = Limits(lookahead, slots, rng.choice([0, lookahead]))
    run, graphs = name, []
    for number, wave in enumerate(cuts):
        tasks, wanted = [], []
        name = f"{run}-wave{number}" if kind == "job" else run
        for i in wave:
            for j in range(columns):
                last: Task | None = None
                for p in range(depth):
                    blocks = [operand(operands, (letters[0], i, p), rng), operand(operands, (letters[1], p, j), rng)]
                    key = (name, i, j) if p == depth - 1 else (f"step-{name}", i, j, p)
                    where = Placement(name, grid, (), i, j, p, number * depth + p, run=run)
                    last = Task(key, [*blocks, *([last] if last else [])], where, True, limits)
                    tasks += [*(made for block in blocks for made in (*block.needs, block)), last]
                assert last is not None
                if written:
                    write = Task((f"write-{name}", i, j), [last], Placement(name, grid, (), i, j, 0, number * depth))
                    tasks.append(write)
                wanted.append(tasks[-1].key)
        graphs.append((list(dict.fromkeys(tasks)), wanted))
    return Product(run, graphs)


def operand(operands: dict[Key, Task], key: Key, rng: random.Random) -> Task:
    """Return the task that makes a block, sometimes from another one that is read first."""
    if key not in operands:
        name, *index = key
        raw = [Task((f"raw-{name}", *index))] if rng.random() < 0.2 else []
        operands[key] = Task(key, raw)
    return operands[key]


@dataclass
class Chances:
    """How often what goes wrong, of all moves."""

    kill: float = 0.0
    join: float = 0.0
    fail: float = 0.0
    cancel: float = 0.0


def play(model: Model, products: list[Product], chances: Chances) -> Iterator[None]:
    """Make random moves until nothing is left to do; yield after each."""
    rng, undone = model.random, [list(one.graphs) for one in products]
    cancelled: set[str] = set()
    while True:
        moves = [*model.runnable()] if model.alive else []
        running = [task for task in model.tasks.values() if task.state == "running"]
        arriving = [graphs for graphs in undone if graphs]
        dead = len(model.machine.ranks) - len(model.alive)
        if not model.alive or (dead and rng.random() < 0.1):
            model.join(rng.choice([-1, *range(len(model.machine.ranks))]))
        elif rng.random() < chances.kill:
            model.kill(rng.choice(sorted(model.alive)))
        elif rng.random() < chances.join:
            model.join(100 + rng.randrange(5))
        elif running and rng.random() < chances.fail:
            model.fail(rng.choice(running))
        elif rng.random() < chances.cancel and len(cancelled) < len(products) - 1:
            name = rng.choice(products).name
            cancelled.add(name)
            for graphs, one in zip(undone, products, strict=True):
                if one.name == name:
                    graphs.clear()
            model.unwant([key for key in model.wanted if name in key[0]])
        elif model.machine.undecided and rng.random() < 0.5:
            model.decide()
        elif arriving and (rng.random() < 0.1 or not (moves or running)):
            model.submit(*rng.choice(arriving).pop(0))
        elif running and (rng.random() < 0.5 or not moves):
            model.finish(rng.choice(running))
        elif moves:
            model.start(rng.choice(moves))
        elif model.machine.undecided:
            model.decide()
        elif waiting := [task for task in model.tasks.values() if task.state == "waiting"]:
            raise AssertionError(f"nothing can go on, and {len(waiting)} tasks wait, {waiting[0].key} among them")
        else:
            return
        for task in [task for task in model.tasks.values() if task.key[0].startswith("write")]:
            if task.state == "memory" and rng.random() < 0.3:
                model.unwant([task.key])  # the client has taken the answer
        yield


def finish(model: Model, products: list[Product], chances: Chances) -> None:
    """Play to the end; check that every wanted block is made, and that nothing is left once nobody wants them."""
    for _ in play(model, products, chances):
        model.check_slots()
    if not chances.fail:
        assert all(model.tasks[key].state == "memory" for key in model.wanted)
    model.unwant(list(model.wanted))
    while model.machine.undecided:
        model.decide()
    assert not model.tasks
    left = {**vars(model.machine), **vars(model.machine.replicas)}
    assert not [name for name, table in left.items() if name not in ("ranks", "replicas") and list(table)]


FIRST, SEEDS = [0, *map(int, os.environ.get("DISTMM_SCHEDULES", "250").split(":"))][-2:]


@contextmanager
def named(seed: int) -> Iterator[None]:
    """Say with an error how to see it again."""
    try:
        yield
    except Exception as error:
        error.add_note(f"again, with the name of this test: PYTHONHASHSEED=0 DISTMM_SCHEDULES={seed}:{seed + 1} pytest")
        raise


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_each_block_travels_once_to_each_reader_and_its_replica_is_dropped_after_the_last_use(lookahead: int) -> None:
    dropped = 0
    for seed in range(FIRST, SEEDS):
        rng = random.Random(seed)
        workers = rng.randint(1, 4)
        model = Model(workers, seed)
        one = product("one", rng, workers, operands := {}, lookahead)
        persisted = [task for task in operands.values() if rng.random() < 0.5]
        model.submit([made for task in persisted for made in (*task.needs, task)], [task.key for task in persisted])
        for task in model.tasks.values():  # the user's own task: anywhere
            task.rank = rng.randrange(workers)
        for _ in play(model, [], Chances()):
            pass
        first = {task.key: set(task.copies) for task in persisted}
        model.fetched.clear()
        for _ in play(model, [one], Chances()):
            model.check_slots()
        if len(one.graphs) == 1:  # later waves load blocks again
            assert all(number == 1 for number in model.fetched.values())
        while model.machine.undecided:
            model.decide()
        assert {task.key: task.copies for task in persisted} == first
        dropped += model.dropped.total()
        finish(model, [], Chances())
    assert dropped > SEEDS // 2 or FIRST


@pytest.mark.parametrize(
    "chances",
    [
        Chances(),
        Chances(kill=0.02),
        Chances(join=0.05),
        Chances(kill=0.05, join=0.05),
        Chances(fail=0.02),
        Chances(cancel=0.05),
        Chances(kill=0.02, join=0.02, fail=0.01, cancel=0.01),
    ],
    ids=["calm", "kills", "joins", "kills and joins", "failures", "cancelled", "everything"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["A shared", "A and B shared"])
def test_two_products_end_whatever_happens_and_in_whatever_order(chances: Chances, shared: bool) -> None:
    losses = 0
    for seed in range(FIRST, SEEDS):
        rng = random.Random(seed)
        workers = rng.randint(1, 4)
        model = Model(workers, seed)
        lookahead, operands = rng.randint(1, 3), {}
        products = []
        for name, letters in ("one", "AB"), ("two", "AB" if shared else "AD"):
            products.append(product(name, rng, workers + rng.randint(0, 1), operands, lookahead, letters))
        with named(seed):
            finish(model, products, chances)
        losses += model.losses
    assert losses > (SEEDS - FIRST) // 4 or not chances.kill or FIRST
