"""Once a tenth of the work is done, the predicted time left errs by at most 10 % of the total time (virtual time)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.telemetry.record import Record
from distmm.telemetry.time_left import Pace

SUBMITTED = 1000.0


@dataclass(frozen=True)
class Job:
    """A job in waves on virtual workers. Each step takes a second, unless an attribute below says otherwise.

    Attributes
    ----------
    blocks, steps : int
        C has ``blocks x blocks`` blocks, each made in so many steps.
    waves, workers : int
    start : float
        Seconds before the first step.
    gap : float
        Seconds before the first step of each wave.
    slow : float
        Fraction of the work, at the beginning, that takes three times as long.
    noise : float
        Steps take at random up to this fraction more or less.
    write : float
        Seconds from a block's last step until it is checked and written; the next steps run meanwhile.
    kept : float
        Fraction of the blocks that were on disk before.
    repeated : float
        Fraction of the steps whose results are lost, and that are done again.
    """

    blocks: int = 8
    steps: int = 8
    waves: int = 1
    workers: int = 2
    start: float = 0.0
    gap: float = 0.0
    slow: float = 0.0
    noise: float = 0.0
    write: float = 0.0
    kept: float = 0.0
    repeated: float = 0.0

    def record(self) -> Record:
        side, depth = 32 * self.blocks, 32 * self.steps
        plan = make_plan(
            Problem(side, depth, side, np.dtype("f4")), ClusterSpec(self.workers, 10**9, "cpu", 1e9, 1e9),
            text=f"g1x{self.workers}x1 b32x32x32 p1 w1 l2",
        )  # fmt: skip
        assert (plan.blocking.c_blocks, len(plan.blocking.parts()[0])) == (self.blocks**2, self.steps)
        return Record("job", plan, SUBMITTED, "/data/C.zarr", range(int(self.kept * self.blocks**2)))

    def events(self) -> list[tuple[float, str, tuple[Any, ...]]]:
        """All events in the order of time: their times, and a method of the record with its arguments."""
        return sorted(self._events(), key=lambda event: event[0])

    def _events(self) -> Iterator[tuple[float, str, tuple[Any, ...]]]:
        rng = np.random.default_rng(7)
        missing = range(int(self.kept * self.blocks**2), self.blocks**2)
        at = np.full(self.workers, SUBMITTED + self.start)
        made = 0
        for wave in np.array_split(missing, self.waves):
            at[:] = at.max() + self.gap
            for step in range(self.steps):
                for index, chain in enumerate(wave):
                    worker = index % self.workers
                    for again in range(1 + (rng.random() < self.repeated)):
                        made += 1
                        first = made <= self.slow * len(missing) * self.steps
                        begin = at[worker]
                        at[worker] += (3 if first else 1) * (1 + self.noise * rng.uniform(-1, 1))
                        if again:
                            yield begin, "repeat", (begin, int(chain), step, True)
                        yield at[worker], "step", (int(chain), step, str(worker), begin, float(at[worker]))
                    if step == self.steps - 1 and self.write:
                        written = float(at[worker] + self.write)
                        yield written, "check", (written, int(chain), True)


JOBS = {
    "steady": Job(),
    "few steps": Job(blocks=4, steps=1, workers=4),
    "one worker": Job(workers=1),
    "many workers": Job(workers=32),
    "waves": Job(waves=16, gap=0.5),
    "waves that leave workers idle": Job(blocks=12, waves=36, gap=1.0, workers=3),
    "slow start": Job(start=60.0),
    "slow first reads": Job(waves=16, slow=0.04),
    "uneven steps": Job(noise=0.5),
    "written blocks": Job(waves=8, write=15.0, gap=0.3),
    "half of it kept": Job(waves=4, kept=0.5),
    "steps done again": Job(repeated=0.05),
    "all at once": Job(waves=16, start=20.0, gap=0.3, slow=0.03, noise=0.3, write=5.0, kept=0.5, repeated=0.05),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_after_a_tenth_of_the_work_the_predicted_end_is_right_within_a_tenth(job: Job) -> None:
    record, events = job.record(), job.events()
    end = events[-1][0]
    total = end - SUBMITTED
    last = max(at for at, method, _ in events if method == "step")  # afterwards only checks and writes are left
    worst, looked = 0.0, 0
    for now in np.arange(SUBMITTED, last, total / 500):
        while events and events[0][0] <= now:
            _, method, arguments = events.pop(0)
            getattr(record, method)(*arguments)
        figures = record.figures(float(now))
        if figures.done >= figures.total / 10:
            looked += 1
            worst = max(worst, abs(now + figures.left - end) / total)
    assert looked > 250
    assert worst <= 0.1


def test_before_the_first_step_nothing_is_known_and_after_the_last_nothing_is_left() -> None:
    job = replace(JOBS["steady"], blocks=2, steps=2)
    record = job.record()
    assert record.figures(SUBMITTED + 1).left == math.inf
    for _, method, arguments in job.events():
        getattr(record, method)(*arguments)
    assert record.figures(SUBMITTED + 100).left == 0


def test_the_time_runs_down_between_lumps_and_stands_still_where_one_is_late() -> None:
    pace = Pace(100.0)
    assert pace.left(101.0, 1) == math.inf
    for at in (110.0, 120.0, 130.0):
        pace.add(at, 4)
    assert [pace.left(now, 40) for now in (130.0, 135.0, 140.0, 150.0, 1000.0)] == [100.0, 95.0, 90.0, 90.0, 90.0]


def test_work_that_comes_at_one_moment_is_one_lump() -> None:
    pace = Pace(0.0)
    for lump in (100.0, 200.0):
        for at in (lump, lump + 0.1, lump + 0.2, lump + 0.1):  # clocks of workers differ
            pace.add(at, 1)
    assert pace.left(200.2, 4) == pytest.approx(100.0, rel=0.01)


def test_many_steps_take_few_points() -> None:
    pace = Pace(0.0)
    for step in range(1, 100_001):
        pace.add(step * 1e-2, 1)
    assert len(pace.times) < 1000
    assert pace.left(1000.0, 100_000) == pytest.approx(1000.0, rel=1e-6)
