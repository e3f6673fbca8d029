"""Decisions of the state machine in cases that deserve a name; `test_simulated_schedules.py` draws all others."""

from __future__ import annotations

from dataclasses import replace

from distmm.graph.placement import Placement
from distmm.planning.owners import Grid
from distmm.scheduler.product_state import Limits, OperandBlock, PlannedTask
from distmm.scheduler.products import Decisions, Products

DEPTH = 3


def machine(workers: int) -> Products:
    made = Products()
    for name in range(workers):
        made.ranks.join(f"tcp://{name}", name)
    return made


def chain(name: str, grid: Grid, j: int = 0) -> list[PlannedTask]:
    """One block of C in `DEPTH` steps."""
    rank = grid.owner(0, j)
    places = [
        Placement(name, (), 0, j, step, step, rank, (rank,), (grid.owner(0, step), grid.owner(step, j)))
        for step in range(DEPTH)
    ]
    return [
        PlannedTask((name, 0, j, step), where, not step, (("A", 0, step), ("B", step, j)))
        for step, where in enumerate(places)
    ]


def operands(tasks: list[PlannedTask], reader: str | None) -> dict[tuple[object, ...], OperandBlock]:
    """Blocks that are still to be loaded."""
    return {block: OperandBlock((block,), reader) for task in tasks for block in task.operands}


def decide(products: Products) -> Decisions:
    return products.decide(lambda block: ())


def test_a_load_that_a_cancelled_product_held_starts_for_the_product_that_shares_it() -> None:
    products = machine(1)
    first, second = chain("first", Grid(1, 1)), chain("second", Grid(1, 1))
    limits = {"first": Limits(lookahead=1), "second": Limits(lookahead=1)}
    products.arrived(first, (), operands(first, "first"), (), limits)
    decide(products)
    # The loads are under way, or held for a step of the first product: nobody makes them for the second one.
    products.arrived(second, (), {block: OperandBlock() for task in second for block in task.operands}, (), limits)
    for task in first:
        products.forgotten(task.key, task.where)
    for task in second:
        started = [key for key, _ in decide(products).start]
        assert task.key in started or not task.where.step  # the first step is open from the beginning
        assert (task.operands[0] in started) == (task.where.step > 0)
        products.finished(task.key, task.where)


def test_a_load_that_a_late_step_holds_comes_in_time_for_an_early_task_that_arrives_later() -> None:
    products, (first, _, last) = machine(1), chain("c", Grid(1, 1))
    early = PlannedTask(("c", 0, 1, 0), Placement("c", (), 0, 1, 0, 0, 0, (0,), (0, 0)), True, last.operands)
    limits = {"c": Limits(lookahead=1)}
    products.arrived([first, last], (), operands([first, last], "c"), (), limits)
    assert not set(last.operands) & {key for key, _ in decide(products).start}
    # A client asks for another block of C. The loads are held, so that nobody has to make them for this task.
    products.arrived([early], (), {block: OperandBlock() for block in early.operands}, (), limits)
    assert {*early.operands, early.key} <= {key for key, _ in decide(products).start}


def test_two_products_do_not_wait_for_each_others_late_steps() -> None:
    products, X, Y = machine(1), ("X", 0, 0), ("Y", 0, 0)
    limits = {name: Limits(lookahead=1) for name in ("one", "two")}
    for name, block in (("one", X), ("two", Y)):
        first, _, last = chain(name, Grid(1, 1))
        tasks = [first, last._replace(operands=(block,), where=replace(last.where, homes=(0,)))]
        products.arrived(tasks, (), operands(tasks, name), (), limits)
    decide(products)
    # Clients ask for another block of each. Its first task reads what the other product's late step loads.
    for name, block in (("one", Y), ("two", X)):
        task = PlannedTask((name, 0, 1, 0), Placement(name, (), 0, 1, 0, 0, 0, (0,), (0,)), True, (block,))
        products.arrived([task], (), {block: OperandBlock()}, (), limits)
    assert {X, Y} <= {key for key, _ in decide(products).start}


def test_replicas_are_asked_for_in_the_order_of_the_steps_that_read_them() -> None:
    products, tasks = machine(2), [task for j in (1, 3) for task in chain("c", Grid(1, 2), j)]  # both on rank 1
    held = {block: OperandBlock((), "c", (0,)) for task in tasks for block in task.operands}
    products.arrived(tasks, (), held, (), {"c": Limits(lookahead=DEPTH)})
    copied = products.decide(lambda block: {0}).copy
    of_step = [[(block, 1) for j in (1, 3) for block in (("A", 0, step), ("B", step, j))] for step in range(DEPTH)]
    assert copied == [replica for step in of_step for replica in dict.fromkeys(step)]


def test_a_worker_that_joins_changes_no_home_and_no_placement_of_a_product() -> None:
    def ranks(joins: bool) -> list[tuple[object, int]]:
        products, tasks = machine(2), chain("c", Grid(1, 3), 2)  # planned for three workers, and there are two
        limits, found = {"c": Limits(lookahead=1)}, []
        products.arrived(tasks, (), operands(tasks, "c"), (), limits)
        for task in tasks:
            found += decide(products).start
            if joins:
                products.ranks.join(f"tcp://more-{task.key}", "more")
            products.finished(task.key, task.where)
        return found

    calm = ranks(joins=False)
    assert len(calm) == 3 * DEPTH
    assert ranks(joins=True) == calm


def test_a_replacement_inherits_the_rank_and_what_was_placed_there() -> None:
    products, tasks = machine(2), chain("c", Grid(1, 2), 1)
    products.arrived(tasks, (), operands(tasks, "c"), (), {"c": Limits(lookahead=1)})
    before = [rank for key, rank in decide(products).start if key == tasks[0].key]
    products.ranks.leave("tcp://1")
    assert products.ranks.join("tcp://again", 1) == "tcp://1"
    products.finished(tasks[0].key, tasks[0].where)
    after = [rank for key, rank in decide(products).start if key == tasks[1].key]
    assert before == after == [1]
    assert products.ranks.addresses[1] == "tcp://again"


def test_events_of_products_that_are_not_known_change_nothing() -> None:
    products, (task, *_) = machine(1), chain("c", Grid(1, 1))
    for event in (products.finished, products.given_up, products.released, products.forgotten):
        event(task.key, task.where)
    assert not products.undecided


def test_a_worker_that_joins_takes_a_share_of_the_chains_from_their_next_held_step_on() -> None:
    products = machine(1)
    tasks = [task for j in range(4) for task in chain("c", Grid(1, 1), j)]
    products.arrived(tasks, (), operands(tasks, "c"), (), {"c": Limits(lookahead=1)})
    assert {rank for _, rank in decide(products).start} == {0}
    products.ranks.join("tcp://late", "late")
    products.share(1)
    wanted, ranks = set(), {}
    for step in range(DEPTH):
        for task in (task for task in tasks if task.where.step == step):
            products.finished(task.key, task.where)
        decided = products.decide(lambda block: {0})
        ranks |= dict(decided.start)
        wanted |= {block for block, rank in decided.copy if rank == 1}
    late = {task.where.j for task in tasks if ranks.get(task.key) == 1}
    assert late == {task.where.j for task in tasks if task.where.step and ranks[task.key] == 1}
    assert len(late) == 2
    assert wanted == {block for task in tasks if task.where.step and task.where.j in late for block in task.operands}
    assert not products.replicas.uses


def wave(name: str, number: int) -> list[PlannedTask]:
    """A wave of a run: a product of its own, with the orders after those of the waves before it."""

    def placed(task: PlannedTask) -> PlannedTask:
        where = replace(task.where, order=number * DEPTH + task.where.order, run="run")
        own = tuple((f"{of} of {name}", *index) for of, *index in task.operands)
        return task._replace(where=where, operands=own)

    return [placed(task) for task in chain(name, Grid(1, 1))]


def test_a_wave_opens_its_first_steps_in_the_last_steps_of_the_wave_before_it() -> None:
    products = machine(1)
    first, second, again = wave("first", 0), wave("second", 1), wave("again", 0)
    for tasks in (first, second):
        name = tasks[0].where.product
        products.arrived(tasks, (), operands(tasks, name), (), {name: Limits(lookahead=2)})
    started = [{key for key, _ in decide(products).start}]
    # A block of the first wave that is computed again waits for no wave, and no wave waits for it.
    products.arrived(again, (), operands(again, "again"), (), {"again": Limits(lookahead=2)})
    started.append({key for key, _ in decide(products).start})
    for task in first:
        products.finished(task.key, task.where)
        started.append({key for key, _ in decide(products).start})
    expected = [first[:2], again[:2], first[2:], second[:1], second[1:2]]
    assert [{key for key in found if len(key) == 4} for found in started] == [{t.key for t in one} for one in expected]
    assert all(set(one.operands) <= found for one, found in zip(second[:2], started[3:], strict=True))
