"""A job for which the memory of a worker is full goes on with a smaller plan, says so, and ends after two of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, get_worker

from distmm import job
from distmm.errors import DeviceMemoryError
from distmm.product import smaller_plan
from distmm.worker import gpu
from distmm.worker.tasks import products
from tests.tables import later

Cluster = Callable[[int], Client]

M, K, N = 120, 60, 120
PLAN = "g2x1x1 b20x30x20 p1 w1 l2"  # 36 blocks of C in one wave


def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((M, K), dtype="f4"), rng.standard_normal((K, N), dtype="f4")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "error",
    later(
        [DeviceMemoryError("the GPU's memory is full: a block of C found no room"), MemoryError("std::bad_alloc: 8 GB")]
    ),
)
def test_a_job_goes_on_with_a_smaller_plan_and_says_so(
    error: Exception,
    cluster: Cluster,
    room: Callable[..., list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = operands()
    waves = room(20, error)
    with caplog.at_level(logging.WARNING, "distmm.job"):
        summary = job.multiply(a, b, "C.npy", client=cluster(2), plan=PLAN)
    np.testing.assert_allclose(np.load("C.npy"), a @ b, rtol=1e-3, atol=1e-4)
    assert waves[0] == 36
    assert max(waves[1:]) < 36
    assert "the memory of a worker was full with plan g2x1x1 b20x30x20 p1 w1 l2" in caplog.text
    certificate = json.loads(Path("C.npy.certificate.json").read_text())
    assert certificate["blocks"] == [20, 30, 20]
    assert len(certificate["runs"]) == 2
    report = Path(summary.report or "").read_text()
    assert "the memory of a worker was full with plan g2x1x1" in report


def test_a_job_for_which_memory_stays_full_ends_with_the_figures_and_keeps_what_it_has(
    cluster: Cluster,
    room: Callable[..., list[int]],
) -> None:
    a, b = operands()
    waves = room(0, DeviceMemoryError("the GPU's memory is full: a block of C found no room"))
    with pytest.raises(
        DeviceMemoryError, match=r"(?s)found no room.*kept in .*C.npy.job.*peak of .* kB a worker.*--blocks"
    ):
        job.multiply(a, b, "C.npy", client=cluster(2), plan=PLAN)
    assert len(waves) <= 1 + len(smaller_plan.SHARES)
    assert job.status("C.npy").state == "failed"


def test_a_job_whose_k_is_split_keeps_its_plan(cluster: Cluster, room: Callable[..., list[int]]) -> None:
    """The bits of C depend on the whole plan then."""
    a, b = operands()
    waves = room(0, DeviceMemoryError("the GPU's memory is full: a block of C found no room"))
    with pytest.raises(DeviceMemoryError, match=r"b60x30x60.* no other plan has a lower peak: start over"):
        job.multiply(a, b, "C.npy", client=cluster(2), plan="g1x1x2 b60x30x60 p1 w1 l2")
    assert len(waves) == 1


@pytest.mark.minutes
def test_a_task_that_was_made_when_it_was_tried_again_is_an_incident_of_the_report(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "PAUSES", (0.0,))
    real, full = products.multiply, [MemoryError("no room for 8 GB")]

    def multiply(where: Any, *rest: Any, **how: Any) -> Any:
        def work() -> Any:
            if full and str(get_worker().name) == "1":
                raise full.pop()
            return real(where, *rest, **how)

        return gpu.retrying(work, "a block of C, 20 x 20 float32,")

    monkeypatch.setattr(products, "multiply", multiply)
    a, b = operands()
    with caplog.at_level(logging.WARNING, "distmm.worker.gpu"):
        summary = job.multiply(a, b, "C.npy", client=cluster(2), plan=PLAN)
    np.testing.assert_allclose(np.load("C.npy"), a @ b, rtol=1e-3, atol=1e-4)
    assert (
        "the GPU's memory was full (no room for 8 GB): a block of C, 20 x 20 float32 was made at try 2" in caplog.text
    )
    assert "memory was full on worker 1: a block of C" in Path(summary.report or "").read_text()
