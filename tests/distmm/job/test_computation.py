"""The client of a job takes what tasks say, and keeps nothing of a job that has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler

import distmm
from distmm import job
from distmm.job.computation import Computation
from distmm.job.judge import Judge
from distmm.job.reduction import Entries
from distmm.job.spec import Spec
from distmm.job.writer import Writer
from distmm.transfer.counted_writes import CountedRun
from distmm_kernels.tolerance import Tolerance


def test_blocks_that_are_written_before_one_that_fails_count(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    unused: Any = None
    plan = distmm.plan(np.ones((4, 4)), np.ones((4, 4)), blocks=(1, 4, 1))
    spec = Spec.of(*2 * [np.ones((4, 4))], None)
    judge = Judge("", spec.contents, plan, Tolerance.of(*3 * [np.dtype("f8")], 4), 0, 1, 0, {})
    writer = Writer(unused, CountedRun(), unused, judge)
    computation = Computation(client, spec, plan, writer, unused, unused, Entries(plan))

    def record(i: int) -> dict[str, Any]:
        if i == 2:
            raise OSError("the disk is gone")
        return {"i": i, "j": 0, "inputs": {"A": str(i), "B": "0"}, "residual": i / 8, "written": True}

    told: list[Any] = []
    monkeypatch.setattr(computation, "_event", lambda event, **facts: told.append((event, facts)))
    first, second, lost = client.map(record, range(3), pure=False)
    computation._take(first)
    computation._take(second)
    with pytest.raises(OSError, match="the disk is gone"):
        computation._take(lost)
    assert (computation.written, computation.residual) == (2, 1 / 8)
    assert told == [("accepted", {"blocks": [(0, 0)]}), ("accepted", {"blocks": [(1, 0)]})]


def test_a_scheduler_and_a_client_keep_nothing_of_a_job_that_has_ended(client: Client, tmp_path: Path) -> None:
    def topics(dask_scheduler: Scheduler) -> set[str]:
        return set(dask_scheduler._broker._topics)

    A = np.ones((40, 30), "f4")
    kept = []
    for run in range(2):
        np.save(tmp_path / "A.npy", A + run)
        job.multiply(tmp_path / "A.npy", tmp_path / "A.npy", tmp_path / f"C{run}.npy", client=client, transb=True)
        kept.append((client.run_on_scheduler(topics), set(client._event_handlers)))
    assert kept[0] == kept[1]
