"""The real scheduler in virtual time: seeded schedules full of faults, and faults that they have found, one by one."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distmm.graph.placement import Placement
from distmm.planning.owners import Grid
from distmm.scheduler.output_slots import OutputSlots
from distmm.scheduler.plugin import STRANDED_SECONDS
from distmm.scheduler.replicas import Replicas
from tests.bench.disturbed_schedules import play
from tests.distmm.scheduler.disturbed_cluster import DisturbedCluster
from tests.distmm.scheduler.disturbed_faults import Faults
from tests.distmm.scheduler.drawn_products import Drawn
from tests.programs import run_to_end


@pytest.mark.minutes
def test_products_end_whatever_happens_to_the_cluster() -> None:
    program = Path(__file__).parents[2] / "bench" / "disturbed_schedules.py"
    path = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(program), "--count", "100", "--processes", "1"]
    done = run_to_end(command, {**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr


class Scripted(DisturbedCluster):
    """One product on two workers, some of whose tasks fail, and to which one thing happens."""

    def __init__(self, kind: str, shape: tuple[int, int, int], failing: tuple[Any, ...] = ()) -> None:
        super().__init__(0, lambda _: None, Faults(fail=1.0))
        self.size, self.retries, self.failing = 2, None, failing
        self.asked = [Drawn(0, kind, Grid(2, 1), shape, ("A", "B"), lookahead=1)]
        self.states: dict[Any, str] = {}

    def draw(self) -> None:
        self.later(0.0, partial(self.ask, "first", 0))

    def fails(self, key: Any) -> bool:
        return key in self.failing

    def _check_ended(self) -> None:
        super()._check_ended()
        self.states = {ts.key: ts.state for ts in self.scheduler.tasks.values() if ts.who_wants}


@pytest.mark.parametrize("kind", ["kept", "streamed"])
def test_what_does_not_need_a_block_that_fails_to_load_is_computed(kind: str) -> None:
    # Steps of the chains of row 0 that are given up, but not forgotten, must not keep later steps closed.
    played = play(lambda: Scripted(kind, (2, 6, 3), failing=(("A", 0, 4),)))
    last = {"kept": "distmm-matmul-0", "streamed": "sum-distmm-matmul-0"}[kind]
    assert {key[1:] for key in played.made if key[0] == last} == {(1, 0), (1, 1), (1, 2)}
    failed = {key[1:] for key, state in played.states.items() if state == "erred"}  # type: ignore[attr-defined]
    assert failed == {(0, 0), (0, 1), (0, 2)}


class Lost(Scripted):
    """Both workers are lost at the same time, and one is replaced."""

    def draw(self) -> None:
        super().draw()
        for rank in range(2):
            self.later(2.0, partial(self._lose, rank))
        self.later(3.0, self.join)

    async def _lose(self, rank: int) -> None:
        address = self.plugin.ranks[rank]
        self.workers[address].dead = True
        await self.scheduler.remove_worker(address, stimulus_id="lost", close=False)


def test_a_product_ends_on_one_worker_where_both_were_lost_and_one_came_back() -> None:
    played = play(lambda: Lost("kept", (3, 3, 3)))
    assert set(played.states.values()) == {"memory"}  # type: ignore[attr-defined]
    assert played.now > 3.0 + STRANDED_SECONDS / 2


def test_a_chain_that_was_given_up_while_it_waited_takes_no_slot() -> None:
    slots, first, second = OutputSlots(1), *(Placement("c", (), 0, j, 0, j, owners=(0,)) for j in range(2))
    for where in (first, second):
        slots.expect(("c", 0, where.j), where)
        slots.ask(("step", 0, where.j), where, (where.j,))
    slots.leave(("c", 0, 0), first)  # its block will never be made
    admitted = [where for _, where in slots.admit(lambda *_: True)]
    assert admitted == [first, second]  # the first may be retried, and must not wait for ever
    assert list(slots.taken[0]) == [("c", second.chain)]


def test_nobody_waits_for_replicas_whose_readers_were_given_up_before_their_step_opened() -> None:
    replicas = Replicas()
    block = ("A", 0, 0)
    replicas.settle(block, 0, ())
    replicas.use(block, 1)
    replicas.used([block], 1)
    replicas.forget(block)
    replicas.want([(block, 1)])
    assert not replicas.missing
