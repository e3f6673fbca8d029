"""A worker whose blocks are wrong again and again is taken out of the cluster, and named."""

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
from distmm.job.faulty_workers import MOST
from distmm.worker.tasks import products
from tests.distmm.checking.sketched import matrices
from tests.tables import later

Cluster = Callable[[int], Client]
Run = Callable[[Client], tuple[job.Summary, dict[str, Any]]]

PLAN = "g3x1x1 b10x100x20 p1 w1 l2"

# Blocks of worker 1: not all in one row of C, and not all in one column.
BLOCKS = [(1, 0), (1, 1), (4, 0)]


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[tuple[int, int]]], None]:
    """A and B in the current folder, and a way to have some of worker 1's products come out wrong, each otherwise."""
    monkeypatch.chdir(tmp_path)
    for name, values in zip("AB", matrices("float32")[:2], strict=True):
        np.save(f"{name}.npy", values)
    real, made = products.multiply, []

    def spoil(blocks: list[tuple[int, int]]) -> None:
        def multiply(where: Any, *rest: Any, **how: Any) -> Any:
            out = real(where, *rest, **how)
            if str(get_worker().name) != "1" or (where.i, where.j) not in blocks or where.step != 2:
                return out
            made.append(where)
            out = np.array(out)
            out[3, 4] += 1000 + len(made)
            return out

        install(multiply, monkeypatch)

    return spoil


def install(multiply: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "multiply", multiply)


def names(client: Client) -> set[str]:
    """Names of the workers that the scheduler has; what the client knows may be a moment old."""

    def there(dask_scheduler: Any) -> set[str]:
        return {str(worker.name) for worker in dask_scheduler.workers.values()}

    found: set[str] = client.run_on_scheduler(there)
    return found


def whole(client: Client) -> tuple[job.Summary, dict[str, Any]]:
    summary = job.multiply("A.npy", "B.npy", "C.npy", client=client, plan=PLAN)
    np.testing.assert_allclose(np.load("C.npy"), matrices("float32")[2], rtol=1e-3, atol=1e-3)
    return summary, json.loads(Path("C.npy.certificate.json").read_text())


def reduced(client: Client) -> tuple[job.Summary, dict[str, Any]]:
    summary = job.topk("A.npy", "B.npy", 3, "best.zarr", client=client, plan=PLAN)
    return summary, json.loads(Path("best.zarr.certificate.json").read_text())


@pytest.mark.parametrize("run", later([whole, reduced]))
def test_a_worker_that_is_wrong_again_and_again_is_taken_out_and_named(
    run: Run, cluster: Cluster, faulty: Callable[[list[tuple[int, int]]], None], caplog: pytest.LogCaptureFixture
) -> None:
    client = cluster(3)
    faulty(BLOCKS)
    with caplog.at_level(logging.WARNING, "distmm.job"):
        summary, certificate = run(client)
    assert summary.recomputed == certificate["rejected"] > 0
    (retired,) = certificate["retired"]
    assert (retired["worker"], retired["wrong"]) == ("1", MOST)
    assert f"Worker 1 of {retired['host']} is removed" in caplog.text
    assert names(client) == {"0", "2"}
    assert f"worker 1 of {retired['host']}, {MOST} of whose blocks were wrong" in Path(summary.report or "").read_text()


@pytest.mark.minutes
@pytest.mark.parametrize(
    ("run", "blocks"),
    [(whole, BLOCKS[: MOST - 1]), (whole, [(1, j) for j in range(4)]), (reduced, [(1, 0), (4, 0)])],
)
def test_a_worker_stays_that_is_wrong_less_often_or_in_one_row_or_column(
    run: Run, blocks: list[tuple[int, int]], cluster: Cluster, faulty: Callable[[list[tuple[int, int]]], None]
) -> None:
    """One bad block of A or B, which another worker may have sent, spoils a whole row or column."""
    client = cluster(3)
    faulty(blocks)
    summary, certificate = run(client)
    assert summary.recomputed > 0
    assert certificate["retired"] == []
    assert len(names(client)) == 3


@pytest.mark.minutes
@pytest.mark.parametrize("run", ["whole", "reduced"])
def test_blocks_that_cannot_be_compared_are_nobodys_fault(
    run: str, cluster: Cluster, faulty: Callable[[list[tuple[int, int]]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An infinite element of A makes NaN of each block; their bits are not the same on each worker, as on real ones."""
    real = products.multiply

    def multiply(where: Any, *rest: Any, **how: Any) -> Any:
        out = np.array(real(where, *rest, **how))
        return np.copysign(out, -1, where=np.isnan(out), out=out) if str(get_worker().name) == "1" else out

    install(multiply, monkeypatch)
    a = np.load("A.npy")
    a[:, 7] = np.inf
    client = cluster(3)
    if run == "whole":
        summary = job.multiply(a, "B.npy", "C.npy", client=client, plan=PLAN)
    else:
        summary = job.topk(a, "B.npy", 3, "best.zarr", client=client, plan=PLAN)
    assert summary.recomputed > 0
    assert len(names(client)) == 3
