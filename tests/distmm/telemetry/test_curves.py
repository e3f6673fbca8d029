"""Traces are bounded and lose no work; curves and colours come from records alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from distmm.planning.blocks import cut
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.telemetry import charts, dashboard_figures, theme
from distmm.telemetry.activity import MOST_POINTS, Lane
from distmm.telemetry.batch_job import batch_job
from distmm.telemetry.record import Record
from distmm.telemetry.scheduler import Telemetry


@pytest.mark.parametrize("seconds", [0.01, 3.0, 1e4, 1e6])
def test_a_trace_is_bounded_and_keeps_all_work(seconds: float) -> None:
    rng, lane = np.random.default_rng(1), Lane()
    for start in np.sort(rng.random(3000)) * seconds:
        lane.step(100 + start, 100 + start + rng.random() * seconds / 50, 7.0)
        assert len(lane.work.points) <= MOST_POINTS
    assert lane.work.at(np.array([0.0, 100 + 1.02 * seconds])).tolist() == [0.0, 3000 * 7.0]
    times = [at for at, _ in lane.work.points]
    assert times == sorted(times)


def test_a_steady_rate_is_flat_over_time() -> None:
    lane = Lane()
    for second in range(1, 2001):
        lane.step(second, second + 1, 5.0)
    np.testing.assert_allclose(np.diff(lane.work.at(np.linspace(1, 2001, 241))), 5.0 * 2000 / 240)


def test_a_rate_is_that_of_the_steps_and_not_of_the_waits_between_them() -> None:
    lane = Lane()
    lane.step(100.0, 110.0, 50.0)
    lane.silences.append((200.0, 205.0))
    lane.step(200.0, 210.0, 50.0)
    assert np.diff(lane.work.at(np.array([100.0, 105.0, 110.0, 205.0, 210.0]))).tolist() == [25.0, 25.0, 0.0, 50.0]


def record(workers: int = 2) -> Record:
    """Make the record of a product of 64 blocks, of one step each, that has begun."""
    problem = Problem(800, 800, 800, np.dtype("f4"))
    plan = make_plan(problem, ClusterSpec(workers, 10**9, "cuda", 1e8, 1e9), blocking=cut(problem, (100, 800, 100)))
    r = Record("C", plan, 1000.0)
    for chain in range(r.chains):
        for step in range(r.steps):
            r.want(chain, step, f"w{chain % workers}")
    return r


def work(r: Record, slow: float = 1.0) -> None:
    """Let the workers make all blocks without a pause; w0 takes `slow` times as long."""
    workers = len(r.lanes)
    free = [1000.0] * workers
    for chain in range(r.chains):
        at = chain % workers
        for step in range(r.steps):
            seconds = float(r.step_flops[chain, step]) / r.plan.cluster.rate * (1.0 if at else slow)
            r.step(chain, step, f"w{at}", free[at], free[at] + seconds)
            free[at] += seconds


def test_rate_and_memory_over_time_stay_when_the_product_has_ended() -> None:
    r = record()
    r.lane("w0").sample(1001.0, 5 * 10**6, 10**7, 0)
    work(r)
    assert r.over
    found = {curve.name: curve for curve in charts.rate(r, 1e6)}
    assert set(found) == {"w0", "w1"}
    for name, curve in found.items():
        assert curve.times[-1] <= r.advanced - 1000
        assert curve.values.max() == pytest.approx(r.plan.cluster.rate, rel=0.01)
        assert curve.color == r.color(name)
    (memory,) = (curve for curve in charts.memory(r, 1e6) if curve.name == "w0")
    assert set(memory.values) == {0, 5e6}


def test_many_workers_are_drawn_as_three_curves() -> None:
    r = record(workers=32)
    for name in r.lanes:
        r.lane(name).sample(1000.01, int(name[1:]) * 10**6, 0, 0)
    work(r)
    highest, middle, lowest = charts.memory(r, 2000.0)
    assert (highest.name, highest.values.max()) == ("highest", 31e6)
    assert (lowest.name, lowest.values.max()) == ("lowest", 0)
    assert middle.values.max() == 15.5e6
    assert len(charts.rate(r, 2000.0)) == 3


@pytest.mark.parametrize("workers", [1, 2, 32, 256])
def test_each_worker_has_a_bar_that_its_tooltip_names_and_some_have_labels(workers: int) -> None:
    r = record(workers)
    work(r)
    r.fall_silent("w0", 1000.0)
    text = dashboard_figures.PANES["rate"](r, 2000.0)
    assert {name for name in r.lanes if f"<title>{name}: " in text} == set(r.lanes)
    (silent,) = (line for line in text.splitlines() if "<title>w0: " in line)
    assert theme.NOBODY in silent
    assert min(workers, 2) <= text.count('text-anchor="middle"') <= 8


def test_the_panes_of_a_product_without_workers_are_drawn() -> None:
    r = Record("C", record().plan, 1000.0)
    assert all("</svg>" in draw(r, 1001.0) for draw in dashboard_figures.PANES.values())


def test_a_worker_has_one_colour_in_all_products_of_a_scheduler() -> None:
    numbers = {"w0": 0, "w1": 1}
    plan = record().plan
    first, second = (Record(name, plan, 1000.0, numbers=numbers) for name in "ab")
    second.lane("w1")
    first.lane("w0")
    assert first.color("w1") == second.color("w1") != first.color("w0")


def test_workers_keep_their_numbers_when_they_leave_and_come_back() -> None:
    scheduler: Any = SimpleNamespace(workers={f"tcp://{n}": SimpleNamespace(name=f"w{n}") for n in range(3)})
    telemetry = Telemetry()
    telemetry.add_worker(scheduler, "tcp://0")
    telemetry.add_worker(scheduler, "tcp://1")
    del telemetry.names["tcp://0"]  # it has left
    telemetry.add_worker(scheduler, "tcp://2")
    telemetry.add_worker(scheduler, "tcp://0")
    assert telemetry.numbers == {"w0": 0, "w1": 1, "w2": 2}


def test_colours_of_workers_are_seen_on_both_grounds() -> None:
    def luminance(color: str) -> float:
        red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue))
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    colors = theme.WORKERS
    assert len(set(colors)) == len(colors)
    r = record()
    r.numbers = {"first": 0, "after the last": len(colors)}
    assert r.color("first") == r.color("after the last") == colors[0]
    for color in colors:
        for ground in (theme.LIGHT["ground"], theme.DARK["ground"]):
            darker, lighter = sorted([luminance(color), luminance(ground)])
            assert (lighter + 0.05) / (darker + 0.05) >= 3


def test_the_batch_job_is_named() -> None:
    assert batch_job({}) == ""
    assert batch_job({"SLURM_JOB_ID": "12"}) == "Slurm job 12"
    array = {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1"}
    assert batch_job(array) == "Slurm job 15 (12_3), restart 1"
    assert batch_job({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "c-worker-0"}) == "Kubernetes pod c-worker-0"
