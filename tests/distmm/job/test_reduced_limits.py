"""How much a reduced product on disk may keep, what memory is planned for it, and what is refused before any work."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dask.array as da
import numpy as np
import pytest
from distributed import Client

from distmm import job
from distmm.errors import DoesNotFitError, InputError
from distmm.job import planning, reduction
from distmm.job.reduction import Entries
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.product.choices import Choices
from distmm.product.request import PlanRequest
from tests.distmm.job.reduced import marked, operands, threshold
from tests.tables import later


@pytest.fixture
def c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A folder with A and B; returns C."""
    monkeypatch.chdir(tmp_path)
    return operands(tmp_path)


@pytest.mark.minutes
def test_a_threshold_that_keeps_too_much_ends_with_the_count_and_goes_on_with_a_higher_limit(
    client: Client, c: np.ndarray
) -> None:
    message = (
        r"keeps [\d,]+ of the [\d,]+ elements seen so far, of 6,300, and at most 900 may be kept: choose a stricter "
        r"threshold, or continue with a higher limit \(the same command with --most, or most=\); \d of 5 block "
        r"rows of C are finished and kept in "
    )
    with pytest.raises(DoesNotFitError, match=message):
        threshold(client, t=0, most=900)
    kept = len(marked())
    assert kept >= 1
    with pytest.raises(DoesNotFitError, match="at most 900"):
        job.resume("out.zarr", client=client)
    found = job.status("out.zarr")
    assert (found.state, found.continue_with, "--most" in str(found.error)) == ("failed", None, True)
    summary = threshold(client, t=0, most=6300)
    assert summary.kept >= kept
    assert summary.entries == np.count_nonzero(c >= 0)


@pytest.mark.minutes
@pytest.mark.parametrize("t", [10**39, -(10**39), 1e39])
def test_a_threshold_beyond_the_numbers_of_c_keeps_all_or_nothing(client: Client, c: np.ndarray, t: float) -> None:
    assert threshold(client, t=t).entries == (c.size if t < 0 else 0)


def test_a_threshold_that_a_job_reads_from_its_files_is_checked_too() -> None:
    with pytest.raises(InputError, match="nan"):
        reduction.Threshold(float("nan")).check(Mock(), Mock())


def _rows_hold(nbytes: int) -> None:
    """Let a row of small blocks keep so many bytes in any case."""
    reduction.ALWAYS_OF_ROW = nbytes


@pytest.mark.minutes
def test_a_block_row_that_a_worker_cannot_hold_ends_the_job_with_the_count(client: Client, c: np.ndarray) -> None:
    before = reduction.ALWAYS_OF_ROW
    client.run(_rows_hold, 0)
    try:
        with pytest.raises(DoesNotFitError, match=r"block row \d alone [\d,]+, more than fit into a worker's memory"):
            threshold(client, t=-100)
    finally:
        client.run(_rows_hold, before)
    assert threshold(client, t=-100).entries == c.size


@pytest.mark.parametrize(
    ("kept", "device"),
    later([
        (reduction.TopK(15), "cpu"), (reduction.TopK(15), "cuda"), (reduction.TopK(20_000), "cpu"),
        (reduction.Threshold(0.9), "cpu"), (reduction.Threshold(0.9), "cuda"),
    ], first=2),
)  # fmt: skip
def test_a_plan_leaves_room_for_what_is_kept_of_blocks_and_rows(
    kept: reduction.Reduction, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where blocks fill the memory, so does what may be kept of them: smaller waves leave room for both."""
    rooms: list[int] = []
    problem = Problem(100_000, 768, 500_000, np.dtype("f4"))

    def plan_for(asked: Any, client: Any) -> Plan:
        rooms.append(asked.kept)
        free = 16 * 10**9 - asked.kept // 2
        memory, host = (free, None) if device == "cpu" else (10**11, free)
        spec = ClusterSpec(2, memory, device, 1e12, 1e10, 1e9, host_memory=host)
        return make_plan(problem, spec, result="out")

    monkeypatch.setattr(planning, "plan_for", plan_for)
    spec: Any = Mock(reduction=kept, dtype=problem.dtype)
    asked = PlanRequest(problem, Mock(), Mock(), Choices())
    made = planning.plan(spec, asked, Mock())
    made.validate()
    assert planning.bytes_of_parts(kept, spec, made) <= rooms[-1]
    assert rooms == sorted(rooms)


@pytest.mark.minutes
def test_the_default_limit_of_a_threshold_follows_the_free_disk(
    client: Client, c: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    take = Entries.take

    def noted(self: Entries, record: dict[str, Any]) -> None:
        seen.append(self.most)
        take(self, record)

    monkeypatch.setattr(Entries, "take", noted)
    monkeypatch.setattr("distmm.job.reduction.shutil.disk_usage", lambda path: type("Usage", (), {"free": 10_000_000}))
    threshold(client)
    assert set(seen) == {4_000_000 // 20}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: job.topk("A.npy", "B.zarr", 91, "o.zarr"), "k is 91, and the product has rows of 90 elements"),
        (lambda: job.topk("A.npy", "B.zarr", 0, "o.zarr"), "k is 0"),
        (lambda: job.topk("A.npy", None, 1, "o.zarr", transb=True), "but B is None"),
        (lambda: job.topk("A.npy", "A.npy", 1, "o.zarr"), r"A has shape \(70, 20\) and B \(70, 20\)"),
        (lambda: job.topk("A.npy", "B.zarr", 1, "o.npy"), r"several arrays, in a Zarr group: name it .*o\.zarr"),
        (lambda: job.topk("A.npy", "B.zarr", 1, "B.zarr/o"), "is inside the Zarr array"),
        (lambda: job.topk("A.npy", "B.zarr", 1, "o.zarr", metric="cos"), "metric 'cos' is not one of"),  # type: ignore[arg-type]
        (lambda: job.topk("A.npy", "B.zarr", 1, "o.zarr", check="full"), "full check"),  # type: ignore[arg-type]
        (lambda: job.topk(np.ones((3, 20), "i4"), np.ones((20, 3), "i4"), 1, "o.zarr", metric="inner"), "A is int32"),
        (lambda: job.topk(np.ones((3, 20), "c8"), "B.zarr", 1, "o.zarr"), "complex64, and complex numbers have no"),
        (lambda: job.threshold("A.npy", "B.zarr", float("nan"), "o.zarr"), "t is nan: give a real number"),
        (lambda: job.threshold("A.npy", "B.zarr", 1j, "o.zarr"), "t is 1j: give a real number"),  # type: ignore[arg-type]
        (lambda: job.threshold("A.npy", "B.zarr", 10**309, "o.zarr"), "t is an integer of 1027 bits, beyond all types"),
        (lambda: job.threshold("A.npy", "B.zarr", 1, "o.zarr", most=-1), "most is -1"),
        (lambda: job.topk(da.ones((3, 20)), "B.zarr", 1, "o.zarr"), "A is a Dask array.*store A"),
    ],
)
def test_bad_input_is_refused_before_any_work(call: Callable[[], object], message: str, c: np.ndarray) -> None:
    with pytest.raises(InputError, match=message):
        call()
    assert sorted(os.listdir(".")) == ["A.npy", "B.zarr"]
