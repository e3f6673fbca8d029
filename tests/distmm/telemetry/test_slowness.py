"""Why a product is slow: each staged cause is named on page, terminal and report. Records and clocks are made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from markupsafe import escape

from distmm.planning.blocks import cut
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.telemetry import facts, progress, report
from distmm.telemetry.activity import Kind
from distmm.telemetry.heartbeats import Heartbeats
from distmm.telemetry.record import Record

START = 1000.0


def record(workers: int = 4) -> Record:
    """Make the record of a product of 64 blocks, of one step each, that has begun."""
    problem = Problem(800, 800, 800, np.dtype("f4"))
    plan = make_plan(problem, ClusterSpec(workers, 10**9, "cuda", 1e8, 1e9), blocking=cut(problem, (100, 800, 100)))
    r = Record("C", plan, START)
    for chain in range(r.chains):
        for step in range(r.steps):
            r.want(chain, step, f"w{chain % workers}")
    return r


def work(r: Record, slow: float = 1.0, pause: float = 0.0) -> float:
    """Let the workers make all blocks; w0 takes `slow` times as long, and each pauses after a block. Return the end."""
    workers = len(r.lanes)
    free = [START] * workers
    for chain in range(r.chains):
        at = chain % workers
        for step in range(r.steps):
            seconds = float(r.step_flops[chain, step]) / r.plan.cluster.rate * (1.0 if at else slow)
            r.step(chain, step, f"w{at}", free[at], free[at] + seconds)
            free[at] += seconds + pause
    return max(free) - pause


def work_beside(r: Record, kind: Kind, share: float, what: str = "") -> None:
    """Let the workers make all blocks, and do something else for this share of the time."""
    end = work(r, pause=0.5)
    for name in r.lanes:
        r.work(name, kind, START, START + share * (end - START), what)


def another_product(r: Record) -> str:
    work_beside(r, "other", 0.6, "D.zarr")
    return "other work on the same workers takes 60% of their time: D.zarr"


def the_operands_own_tasks(r: Record) -> str:
    work_beside(r, "operands", 0.7)
    return "the operands' own tasks take 70% of the workers' time"


def slow_links(r: Record) -> str:
    end = work(r, pause=0.5)
    for name in r.lanes:
        half = (end - START) / 2
        r.lane(name).sample(end, 0, 0, received=int(half * 1e8), receiving=half)
    return "links carry 100 MB/s, 1 GB/s were planned: transfers take 50% of the time"


def a_straggler(r: Record) -> str:
    for name in r.lanes:
        r.lane(name).sample(START, 0, 0, host=f"node-{name}")
    work(r, slow=4.0)
    return "worker w0 on node-w0 computes at 25% of the median worker's rate"


def checks_and_writes(r: Record) -> str:
    work_beside(r, "write", 0.4)
    return "checks and writes of C take 40% of the workers' time"


def reads(r: Record) -> str:
    work_beside(r, "load", 0.3)
    return "reads of A and B take 30% of the workers' time"


def a_silent_worker(r: Record) -> str:
    r.lane("w1").sample(START, 0, 0, host="node7")
    r.fall_silent("w1", START + 1)
    r.wake("w1", START + 7)
    work(r, pause=0.5)
    return "worker w1 on node7 was silent for 6 s"


def nothing_that_is_known(r: Record) -> str:
    end = work(r, pause=0.5)
    return f"it takes {end - START:.3g} s, {r.plan.cost.seconds:.3g} s were planned: workers compute for"


CAUSES = [
    another_product,
    the_operands_own_tasks,
    slow_links,
    a_straggler,
    checks_and_writes,
    reads,
    a_silent_worker,
    nothing_that_is_known,
]


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named_on_page_terminal_and_report(cause: Callable[[Record], str]) -> None:
    r = record()
    expected = cause(r)
    figures = r.figures(r.advanced)
    assert figures.state == "complete"
    assert len(figures.reasons) == 1
    assert expected in figures.reasons[0]
    assert expected in progress.describe(figures)
    assert escape(expected) in facts.head(r, r.advanced)
    text = report.html(r)
    assert f"<li>{escape(expected)}" in text
    assert "Nothing." not in text


def test_a_transfer_that_ends_before_the_task_that_reads_its_block_is_slow_too() -> None:
    r = record()
    r.arrays.add("a")
    worker = SimpleNamespace(address="w0", nbytes=0, metrics={})
    heartbeats = Heartbeats(SimpleNamespace(workers={"w0": worker}), {"C": r}, str)
    rest = {"held": {}, "device": None, "host": "node7"}
    for received, receiving in (({}, 0.0), ({}, 5.0), ({"a": 5 * 10**7}, 5.0), ({"a": 10**8}, 9.0)):
        heartbeats.take("w0", {"received": received, "receiving": receiving, **rest})
    assert (r.lanes["w0"].received, r.lanes["w0"].receiving) == (10**8, 9.0)


def test_causes_are_ordered_by_their_shares() -> None:
    r = record()
    end = work(r, pause=0.5)
    for kind, share in (("load", 0.2), ("other", 0.3), ("write", 0.4)):
        for name in r.lanes:
            r.work(name, kind, START, START + share * (end - START), "D.zarr")
    first = [reason.split()[0] for reason in r.figures(r.advanced).reasons]
    assert first == ["checks", "other", "reads"]


def test_a_product_that_runs_as_planned_has_no_reason_to_be_slow() -> None:
    r = record()
    work(r)
    assert r.figures(1e6).reasons == []
    assert "<li>Nothing that takes a second.</li>" in report.html(r)


def test_a_product_that_is_late_by_less_than_a_second_is_not_called_slow() -> None:
    r = record()
    seconds, planned = work(r, pause=0.05) - START, r.plan.cost.seconds
    assert 1.2 * planned < seconds < planned + 1
    assert r.figures(1e6).reasons == []
    assert "<li>Nothing that takes a second.</li>" in report.html(r)


def test_kernels_that_are_slower_than_planned_are_named() -> None:
    r = record(workers=1)
    work(r, slow=1.3)
    (reason,) = r.figures(1e6).reasons
    assert reason == "while they compute, workers reach 77% of the plan's rate"


def test_a_late_product_says_that_none_of_its_products_of_blocks_has_ended() -> None:
    r = record(workers=2)
    r.seen = dict.fromkeys(r.lanes, START + 100)
    (reason,) = r.figures(START + 100).reasons
    assert reason.startswith("it takes 1 min 40 s")
    assert reason.endswith("were planned: no product of blocks has ended so far")


def test_a_product_under_way_names_missing_workers_and_repeated_steps() -> None:
    r = record(workers=2)
    r.seen = {"w0": START + 11}
    r.step(0, 0, "w0", START, START + 0.08)
    for _ in range(r.chains):
        r.repeat(START + 9, 0, 0, finished=True)
    missing, again, *_ = r.figures(START + 10).reasons
    assert missing == "1 of 2 workers are heard of"
    assert again.endswith("steps were lost and computed again")


def test_a_worker_that_is_silent_now_comes_first() -> None:
    r = record()
    r.lane("w1").sample(START, 0, 0, host="node7")
    r.fall_silent("w1", START + 1)
    figures = r.figures(START + 30)
    assert figures.reasons[0].startswith("worker w1 on node7 has been silent since ")
    assert figures.reasons[0] in progress.describe(figures)


def test_the_time_of_a_silent_worker_is_nobodys() -> None:
    r = record()
    r.fall_silent("w0", START + 2)
    r.wake("w0", START + 102)
    r.work("w0", "write", START + 1, START + 103)
    r.step(0, 0, "w0", START + 1, START + 104)
    lane = r.lanes["w0"]
    assert lane.seconds == {"write": 2.0, "multiply": 3.0}
    assert lane.busy_rate == 0  # a rate from an interrupted step would be wrong
    (incident,) = r.incidents
    assert incident.what.startswith("worker w0 was silent from ")
    assert incident.what.endswith("(1 min 40 s)")
