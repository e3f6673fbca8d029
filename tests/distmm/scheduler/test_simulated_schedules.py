"""Thousands of small products of all kinds through the state machine, in random orders of events, and without Dask.

`Model` checks each decision: no more than the lookahead's steps are open, no rank holds more blocks of C than it has
slots, every task starts at its owner, and replicas are dropped after their last planned use. The tests here check how
products end: all wanted blocks are made, no task is held when nothing can go on, and nothing of them is left.

`DISTMM_SCHEDULES=12500` plays 12500 seeds of each kind, 100 000 schedules together; `DISTMM_SCHEDULES=17:18` the 17th.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.distmm.scheduler.disturbed_faults import Faults
from tests.distmm.scheduler.drawn_products import BLOCK, draw, is_operand, planned
from tests.distmm.scheduler.simulated import Model
from tests.distmm.scheduler.simulated_play import Play
from tests.tables import number_of

FIRST, SEEDS = [0, *map(int, os.environ.get("DISTMM_SCHEDULES", str(number_of(125))).split(":"))][-2:]


@contextmanager
def named(seed: int) -> Iterator[None]:
    """Say with an error how to see it again."""
    try:
        yield
    except Exception as error:
        error.add_note(f"again, with the name of this test: DISTMM_SCHEDULES={seed}:{seed + 1} pytest")
        raise


def test_one_product_keeps_to_the_bounds_of_its_plan() -> None:
    for seed in range(FIRST, SEEDS):
        rng = random.Random(seed)
        workers = rng.randint(1, 4)
        drawn = draw(rng, 0, workers, ("A", "B"))
        play = Play(model := Model(workers, rng), [drawn], faults := Faults(late=rng.random() < 0.5))
        with named(seed):
            play.run()
            of_products = {key: number for key, number in model.made.items() if not key[0].startswith(("raw-", *"ABE"))}
            assert set(of_products.values()) <= {1}, "a block was made or written twice"
            plan, refused = planned(drawn), model.checks.refused
            moved = BLOCK * sum(
                number  # of A and B, and of sums over parts of k
                for (key, _), number in model.fetched.items()
                if is_operand(key) or key[0].startswith(("distmm-step-", "distmm-sum-"))
            )
            again = [key for key, number in model.fetched.items() if number > 1 and is_operand(key[0])]
            if drawn.kind in ("kept", "streamed", "reduced"):
                assert not again, f"{again[0]} was sent twice to the same worker"
                if len(plan.waves) == 1 and not drawn.added:
                    assert moved == plan.cost.bytes_moved, f"{moved} bytes moved, not {plan.cost.bytes_moved}"
            # Tasks that read a streamed C may fetch blocks of it, which no plan counts.
            if drawn.kind in ("kept", "reduced") and not drawn.added and not faults.late:
                peak = max(worker.peak for worker in model.workers.values())
                assert peak <= plan.peak.worker, f"{peak / BLOCK} blocks, and the plan says {plan.peak.worker / BLOCK}"
            assert all(model.tasks[key].state == "memory" for key in model.wanted if key not in refused)
            play.end()


@pytest.mark.parametrize(
    "faults",
    [
        Faults(late=True),
        Faults(kill=3),
        Faults(kill=3, join=3, late=True),
        Faults(fail=0.03),
        Faults(fail=0.03, retry=3, late=True),
        Faults(cancel=2, again=2, late=True),
        Faults(late=True, kill=2, join=1, fail=0.02, cancel=1, again=1, retry=1),
    ],
    ids=["late", "kills", "kills and joins", "failures", "retried failures", "cancelled", "everything"],
)
def test_two_products_end_whatever_happens_and_in_whatever_order(faults: Faults) -> None:
    losses = stale = 0
    for seed in range(FIRST, SEEDS):
        rng = random.Random(seed)
        workers = rng.randint(1, 4)
        # The second product may read the same A and B, and may be planned for more workers than there are.
        products = [
            draw(rng, 0, workers, ("A", "B")),
            draw(rng, 1, workers + rng.randint(0, 1), ("A", rng.choice("BD"))),
        ]
        model = Model(workers, rng, retries=rng.choice([0, 2]) if faults.fail else 0)
        play = Play(model, products, faults)
        with named(seed):
            play.run()
            states = {key: model.tasks[key].state for key in model.wanted if key not in model.checks.refused}
            assert faults.fail or set(states.values()) <= {"memory"}, f"not all is made: {states}"
            play.end()
        losses, stale = losses + play.losses, stale + play.stale
    assert losses > (SEEDS - FIRST) // 4 or not faults.kill or FIRST
    assert stale or not faults.late or FIRST
