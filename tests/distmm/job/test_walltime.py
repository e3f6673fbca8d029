"""Jobs with a deadline: their waves are short beside it, and two runs in a row that finish nothing are the last."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from distmm import job
from distmm.cli.jobs import shown
from distmm.clusters import cluster
from distmm.errors import DoesNotFitError, InputError, Stopped
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from tests.distmm.job.disturbed import HalfWay, marked, multiply, operands, values


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A folder with A and B; returns their product."""
    monkeypatch.chdir(tmp_path)
    return operands(Path("in"))


class Patient(job.Stop):
    """Has a deadline, at which it does not stop."""

    reason = None


def stopped_at_once() -> job.Stop:
    stop = job.Stop(3600)
    stop.ask("the walltime has come")
    return stop


@pytest.mark.minutes
def test_a_job_is_planned_in_waves_that_are_short_beside_its_deadline(
    client: Client, here: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = cluster.spec

    def slow(*facts: Any) -> ClusterSpec:
        return replace(told(*facts), rate=1e4, workers=4)  # so that products count, wherever this runs

    monkeypatch.setattr(cluster, "spec", slow)
    plans: list[Plan] = []
    job.multiply("in/A.npy", "in/B.zarr", "whole.zarr", client=client, announce=lambda plan, flops: plans.append(plan))
    deadline = plans[0].cost.seconds / 2
    job.multiply(
        "in/A.npy", "in/B.zarr", "C.zarr", client=client, stop=Patient(deadline),
        announce=lambda plan, flops: plans.append(plan),
    )  # fmt: skip
    whole, plan = plans
    assert whole.wave_seconds > deadline / 7 >= plan.wave_seconds
    assert plan.run_seconds == deadline
    np.testing.assert_allclose(values(), here, atol=1e-3)


def test_a_job_that_finishes_no_block_before_its_deadline_is_refused_before_any_work(
    client: Client, here: np.ndarray
) -> None:
    with pytest.raises(DoesNotFitError, match=r"a run is stopped after 1e-06 s, .* no block of C"):
        multiply(client, stop=job.Stop(1e-6))
    assert os.listdir() == ["in"]


@pytest.mark.minutes
def test_the_second_run_in_a_row_without_a_finished_block_is_the_last(client: Client, here: np.ndarray) -> None:
    with pytest.raises(Stopped, match="the walltime has come; 0 of 16"):
        multiply(client, stop=stopped_at_once())
    said = r"neither this run nor the one before it has finished any of the blocks of C.*allow more time"
    with pytest.raises(InputError, match=said):
        multiply(client, stop=stopped_at_once())
    multiply(client)  # whoever calls again, with more time, goes on
    np.testing.assert_allclose(values(), here)


def test_a_run_that_has_finished_blocks_begins_the_count_anew(client: Client, here: np.ndarray) -> None:
    with pytest.raises(Stopped):
        multiply(client, stop=stopped_at_once())
    with pytest.raises(Stopped, match="enough"):
        multiply(client, stop=HalfWay("C.zarr"))
    kept = len(marked())
    with pytest.raises(Stopped, match=f"the walltime has come; {kept} of 16"):
        multiply(client, stop=stopped_at_once())
    with pytest.raises(InputError, match=f"neither this run .*; {kept} of 16 blocks of C are finished and kept"):
        multiply(client, stop=stopped_at_once())


def test_a_restart_says_how_many_blocks_are_kept(
    client: Client, here: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stopped, match="enough"):
        multiply(client, stop=HalfWay("C.zarr"))
    kept = len(marked())
    assert "are finished and kept;" not in capsys.readouterr().out
    shown(job.resume, "C.zarr", client=client)
    assert f"{kept} of 16 blocks of C are finished and kept; the others are made now" in capsys.readouterr().out


def test_who_interrupts_a_job_without_a_deadline_may_do_so_as_often_as_he_likes(
    client: Client, here: np.ndarray
) -> None:
    for _ in range(3):
        stop = job.Stop()
        stop.ask("SIGINT was received")
        with pytest.raises(Stopped, match="0 of 16"):
            multiply(client, stop=stop)
    with pytest.raises(Stopped, match="the walltime has come; 0 of 16"):
        multiply(client, stop=stopped_at_once())
