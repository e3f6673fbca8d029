"""A product whose workers are silent, or that has done nothing for long, is stalled; pure functions of a clock."""

from __future__ import annotations

import math

import pytest

from distmm.telemetry import facts, progress
from distmm.telemetry.figures import SILENT_SECONDS, STALLED_PAUSES, STALLED_SECONDS, heard_of, stalled
from distmm.telemetry.record import Record
from tests.distmm.telemetry.test_record import record


@pytest.mark.parametrize(
    ("used", "seen", "workers"),
    [
        ("ab", {"a": 0, "b": 1}, 2),
        ("ab", {"a": 0, "b": 60}, 1),
        ("ab", {"a": 60, "b": 60}, 0),
        ("ab", {"a": 0}, 1),  # one has left
        ("ab", {}, 0),
        ("ab", {"a": 0, "c": 0}, 2),  # another one takes the place of the one that has left
        ("ab", {"a": 0, "b": 60, "c": 0}, 1),  # but not of one that is silent
        ("a", {"a": 0, "b": 0}, 2),  # the second one has nothing to do yet
        ("ab", {"a": 0, "b": 0, "c": 0, "d": 60}, 2),  # the cluster is larger
    ],
)
def test_workers_of_the_plan_count_while_they_are_heard_of(used: str, seen: dict[str, float], workers: int) -> None:
    now = 1000.0
    assert heard_of(2, used, {name: now - age for name, age in seen.items()}, now) == workers


def test_many_workers_may_be_silent_for_longer() -> None:
    seen = {str(n): 0.0 for n in range(4096)}
    assert heard_of(4096, seen, seen, 22.0) == 4096  # they send a heartbeat every 21.5 s
    assert heard_of(4096, seen, seen, 100.0) == 0


def test_a_long_time_without_a_step_is_measured_by_the_longest_pause_so_far() -> None:
    assert stalled(0, 0.0, None)
    assert not stalled(1, 3600.0, None)  # the first reads take their time
    assert not stalled(1, STALLED_SECONDS, 0.1)
    assert stalled(1, STALLED_SECONDS + 1, 0.1)
    assert not stalled(1, STALLED_PAUSES * 600, 600.0)
    assert stalled(1, STALLED_PAUSES * 600 + 1, 600.0)


def half_done(now: float) -> Record:
    """Two workers, a step each 2 s, the last one at `now`."""
    r = record()
    for chain in range(r.chains):
        for step in range(r.steps):
            r.want(chain, step, "ab"[chain % 2])
    for n in range(r.chains):
        at = now - 2 * (r.chains - 1 - n)
        r.step(n, 0, "ab"[n % 2], at - 2, at)
    return r


def test_stopped_workers_make_a_product_stalled_within_half_a_minute_and_no_time_is_left() -> None:
    now = 2000.0
    r = half_done(now)
    states = []
    for age in (1, 10, 16, 29, 480):
        seen = {"a": now, "b": now}  # both were stopped at that moment
        r.seen = seen
        f = r.figures(now + age)
        states.append((f.state, f.workers, f.planned, f.idle, f.silent, math.isfinite(f.left)))
    assert states == [
        ("running", 2, 2, 1, 1, True),
        ("running", 2, 2, 10, 10, True),
        ("stalled", 0, 2, 16, 16, False),
        ("stalled", 0, 2, 29, 29, False),
        ("stalled", 0, 2, 480, 480, False),
    ]
    assert progress.describe(r.figures(now + 42)) == "stalled: no step for 42 s, 0 of 2 workers are heard of"
    page = facts.head(r, now + 42)
    for text in (">stalled<", ">0 of 2<", ">42 s ago<"):
        assert text in page


def test_a_worker_that_changes_does_not_begin_the_time_without_a_step_anew() -> None:
    now = 2000.0
    r = half_done(now)
    r.seen = {"a": now + 30, "b": now + 30}
    assert r.figures(now + 30).state == "stalled"
    r.lose(now + 31, "b")
    r.repeat(now + 31, 1, 0, finished=True)
    r.seen = {"a": now + 32, "c": now + 32}
    f = r.figures(now + 32)
    assert (f.state, f.idle, f.workers) == ("stalled", 32, 2)
    r.step(1, 0, "c", now + 32, now + 34)
    assert r.figures(now + 35).state == "running"


def test_results_that_are_lost_after_the_end_begin_the_time_without_a_step() -> None:
    now = 2000.0
    r = half_done(now)
    for chain in range(r.chains):
        for step in range(1, r.steps):
            r.step(chain, step, "a", now, now + 1)
    assert r.figures(now + 3600).state == "complete"
    r.seen = {"a": now + 3600}
    r.repeat(now + 3600, 0, 0, finished=True)
    f = r.figures(now + 3601)
    assert (f.state, f.idle, f.workers) == ("running", 1, 1)


def test_what_is_over_is_not_stalled() -> None:
    r = half_done(2000.0)
    for chain in range(r.chains):
        for step in range(1, r.steps):
            r.step(chain, step, "a", 2000.0, 2001.0)
    r.seen = {}
    assert r.figures(9000.0).state == "complete"


@pytest.mark.parametrize("age", [SILENT_SECONDS - 1, SILENT_SECONDS + 1])
def test_one_silent_worker_of_two_shows(age: float) -> None:
    r = half_done(2000.0)
    r.seen = {"a": 2000.0, "b": 2000.0 - age}
    assert r.figures(2000.0).workers == (2 if age < SILENT_SECONDS else 1)
