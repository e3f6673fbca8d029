"""Each part of monitoring fails once, and products and jobs still give their results."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

from distmm import job, matmul
from distmm.storage import open_matrix
from distmm.storage.records import Disk
from distmm.telemetry import client as telemetry
from distmm.telemetry import dashboard_server, faults, metrics, report, worker
from distmm.telemetry.record import Record
from distmm.telemetry.scheduler import Telemetry
from distmm.telemetry.worker import WorkerTelemetry
from tests.tables import later

Patch = Callable[[pytest.MonkeyPatch], None]


def raises(where: object, name: str) -> Patch:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError(name)

    return lambda patch: patch.setattr(where, name, broken)


def missing(module: str) -> Patch:
    return lambda patch: patch.setitem(sys.modules, module, None)


def no_room(patch: pytest.MonkeyPatch) -> None:
    """Fill the disk when the report is written."""
    write = Disk.write

    def full(self: Disk, path: str, *content: Any) -> None:
        if path.endswith(".report.html"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, path, *content)

    patch.setattr(Disk, "write", full)


# What fails, and how many warnings a product and a job log: none where Dask logs the error itself.
FAULTS: dict[str, tuple[Patch, int]] = {
    "the scheduler's plugin does not start": (raises(Telemetry, "start"), 1),
    "the page": (raises(dashboard_server, "add_page"), 1),
    "no Bokeh": (missing("bokeh.server.tornado"), 1),
    "the list of targets": (lambda patch: patch.delattr(metrics, "Targets"), 1),
    "the workers' plugin does not start": (raises(WorkerTelemetry, "setup"), 0),
    "listening on the scheduler": (raises(Telemetry, "transition"), 0),
    "listening on workers": (raises(WorkerTelemetry, "transition"), 0),
    "events of jobs": (raises(Telemetry, "log_event"), 0),
    "heartbeats": (raises(worker, "heartbeat"), 0),
    "the progress": (raises(Record, "figures"), 2),  # the report has the same figures
    "the report": (raises(report, "html"), 1),
    "no room for the report": (no_room, 0),
}


@pytest.fixture
def one() -> Iterator[Client]:
    """A cluster in this process, so that patches reach scheduler and worker too."""
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False}),
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.mark.parametrize("fault", later(FAULTS, first=3))
def test_products_and_jobs_go_on_where_monitoring_fails(
    one: Client, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a = np.arange(1024.0).reshape(32, 32)
    np.save(tmp_path / "a.npy", a)
    patch, warnings = FAULTS[fault]
    monkeypatch.setattr(faults, "_logged", set())
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, faults.logger.name):
        patch(patched)
        for _ in range(2):  # the second one does not warn again
            A = da.from_array(a, chunks=16)
            np.testing.assert_allclose(one.compute(matmul(A, A, client=one)).result(timeout=60), a @ a)
            assert telemetry.figures(one, "unknown") is None
        job.multiply(tmp_path / "a.npy", tmp_path / "a.npy", tmp_path / "c.npy", client=one)
        np.testing.assert_allclose(open_matrix(tmp_path / "c.npy")[...], a @ a)
    said = [record.getMessage() for record in caplog.records if record.name == faults.logger.name]
    assert len(said) == warnings, said
