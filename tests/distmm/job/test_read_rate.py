"""How fast workers read files is measured once, where a plan uses it; a failed measurement fails no job."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

import distmm
from distmm import job
from distmm.clusters import cluster, measured
from distmm.job import planning
from distmm.job import planning as job_planning
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.product import request as plan_request
from distmm.product import resources
from distmm.product.choices import Choices
from distmm.product.operand import wrap
from distmm.product.request import PlanRequest
from distmm.product.resources import FileJob
from distmm.storage import open_matrix
from distmm.storage.matrix import Matrix

sizes = st.integers(1, 3000)


@given(sizes, sizes, st.none() | st.tuples(sizes, sizes), st.integers(1, 40))
def test_readers_read_whole_chunks_and_none_twice(
    rows: int, columns: int, chunks: tuple[int, int] | None, readers: int
) -> None:
    matrix = Slow("A.npy", (rows, columns), np.dtype("c16"), chunks)
    height, width = chunks or (1, columns)
    read = [list(planning.pieces(matrix, readers, reader)) for reader in range(readers)]
    assert all(read)
    for i, j in (piece for pieces in read for piece in pieces):
        assert 0 <= i.start < i.stop <= rows
        assert 0 <= j.start < j.stop <= columns
        assert i.start % height == j.start % width == 0
        assert i.stop == rows or i.stop % height == 0
        assert j.stop == columns or j.stop % width == 0
        whole = (i.stop - i.start) * (j.stop - j.start) * 16
        assert whole <= max(planning.PIECE_BYTES, height * width * 16)
    starts = [{(i.start, j.start) for i, j in pieces} for pieces in read]
    assert all(len(found) == len(pieces) for found, pieces in zip(starts, read, strict=True))
    if len(set.union(*starts)) >= readers:
        assert sum(map(len, starts)) == len(set.union(*starts))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Matrices of each measurement. Earlier measurements are forgotten, and every job is worth one."""
    seen: list[str] = []
    once = planning.measured_once

    def noted(client: Client, name: str, of: Any, measure: Callable[[], float]) -> float | None:
        def counted() -> float:
            seen.append(Path(name).name)
            return measure()

        return once(client, name, of, counted)

    monkeypatch.setattr(measured, "_rates", type(measured._rates)())
    monkeypatch.setattr(planning, "measured_once", noted)
    monkeypatch.setattr(plan_request, "WORTH_MEASURING_SECONDS", 0.0)
    return seen


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Plans of the jobs of a test."""
    plans: list[Plan] = []
    plan_for = plan_request.plan_for

    def noted(*args: Any) -> Plan:
        plans.append(plan_for(*args))
        return plans[-1]

    monkeypatch.setattr("distmm.job.planning.plan_for", noted)
    return plans


@pytest.fixture
def _matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("A", "B"):
        zarr.create_array(tmp_path / f"{name}.zarr", data=rng.standard_normal((60, 60)), chunks=(20, 30))
    np.save("A.npy", open_matrix("A.zarr")[...])


@pytest.mark.usefixtures("_matrices")
def test_a_job_counts_with_the_rate_at_which_its_slowest_file_is_read_and_asks_once(
    client: Client, asked: list[str], planned: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(job_planning.LOADS, "cpu", 1e15)
    for out in ("C.zarr", "D.zarr"):
        job.multiply("A.zarr", "B.zarr", out, client=client)
    assert sorted(asked) == ["A.zarr", "B.zarr"]
    rates = [planning.read_rate(client, wrap(open_matrix(name), "A"), "cpu") for name in ("A.zarr", "B.zarr")]
    assert {plan.cluster.load for plan in planned} == {min(rate for rate in rates if rate is not None)}


@pytest.mark.usefixtures("_matrices")
def test_files_that_are_read_faster_than_assumed_change_no_plan(
    client: Client, asked: list[str], planned: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(job_planning.LOADS, "cpu", 1.0)
    job.multiply("A.npy", np.eye(60), "C.zarr", client=client)
    assert asked == ["A.npy"]
    assert planned[0].cluster.load == planned[0].cluster.threads


@pytest.mark.usefixtures("_matrices")
def test_short_jobs_do_not_wait_for_a_measurement(
    client: Client, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_request, "WORTH_MEASURING_SECONDS", 1e9)
    job.multiply("A.zarr", "B.zarr", "C.zarr", client=client)
    assert asked == []


@pytest.mark.usefixtures("_matrices")
def test_a_file_that_cannot_be_read_is_no_matter_of_the_measurement(
    client: Client, asked: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    matrix = wrap(open_matrix("A.zarr"), "A")
    shutil.rmtree("A.zarr")
    assert planning.read_rate(client, matrix, "cpu") is None
    assert "A.zarr could not be measured" in caplog.text
    assert planning.read_rate(client, matrix, "cpu") is None
    assert asked == ["A.zarr"]


def test_a_plan_that_leaves_host_memory_free_is_not_made_anew_where_no_rate_is_lower(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = np.broadcast_to(np.float32(0), (60_000, 60_000))
    hosts = distmm.gpus(4, "H200", host_memory="1TB").spec(a.dtype, None, "highest")
    monkeypatch.setattr(cluster, "describe", lambda *args, **how: hosts)
    monkeypatch.setattr(resources, "link_rate", lambda *args: None)
    made: list[int | None] = []
    planned_for = plan_request._planned_for

    def noted(request: PlanRequest, spec: ClusterSpec) -> Plan:
        made.append(spec.host_memory)
        return planned_for(request, spec)

    monkeypatch.setattr(plan_request, "_planned_for", noted)
    on_disk = FileJob(0.2, {"cuda": 1e10}, 100 * 10**9, lambda choice: None, lambda *args: None)
    choices = Choices(device="gpu")
    request = PlanRequest(
        Problem(60_000, 60_000, 60_000, a.dtype), wrap(a, "A"), wrap(a, "B"), choices, True, job=on_disk
    )
    assert plan_request.plan_for(request, client).cost.seconds > plan_request.WORTH_MEASURING_SECONDS
    assert made == [100 * 10**9]


def test_a_slow_disk_is_seen_by_all_that_read_from_it(client: Client, asked: list[str], tmp_path: Path) -> None:
    slow = Slow(str(tmp_path / "A.npy"), (10**6, 600), np.dtype("f8"), None)
    rate = planning.read_rate(client, wrap(slow, "A"), "cpu")
    assert rate is not None
    assert 0 < rate < planning.PIECE_BYTES / 0.05


class Slow(Matrix):
    """A matrix of which a piece is read in 50 ms."""

    def _read(self, *region: slice) -> np.ndarray:
        time.sleep(0.05)
        return np.empty([part.stop - part.start for part in region], self.dtype)
