"""Who was asleep (SIGSTOP, a suspended machine) while another one took over changes nothing when it wakes up.

Wherever it fell asleep: each test stops a process between its last look at the lock and the change that follows.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from distmm import job
from distmm.job import lock
from distmm.storage import flat
from tests.distmm.job import sleepers
from tests.distmm.job.disturbed import multiply, operands, values
from tests.distmm.job.sleepers import REFUSED, SAID, STOPPED, Moment, asleep, killed_at_the_end, seen, started, wake
from tests.until import until

OWNER, ID = "[0-9a-f]{32}", "[0-9a-f]{16}"
LATER = pytest.mark.minutes


@pytest.fixture
def c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A folder with A and B; returns their product. Nobody waits for what sleeps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lock, "STALE_SECONDS", -1)
    monkeypatch.setattr(flat, "ENDING_SECONDS", 0.1)
    return operands(Path("in"))


def lost(out: str) -> str:
    return f"{os.getcwd()}/{out}.job: another job has taken over this output; this job stops without further writes"


# Where a process falls asleep, and what another one then does.
RESUME, ANEW, OTHER = ("resume", {}), ("multiply", {}), ("multiply", {"alpha": 2, "overwrite": True})
MOMENTS = {
    "it has the lock": ("C.zarr", Moment(rf"mkdir .*\.job/{OWNER}/{ID}$"), ANEW, {}),
    "it has the lock, and would clear up": ("C.zarr", Moment(r"rename .*manifest\.json"), OTHER, {"overwrite": True}),
    "the manifest is written": ("C.zarr", Moment(r"replace .*manifest\.json$"), ANEW, {}),
    "a chunk is open": ("C.zarr", Moment(r"write_rows .*\.draft", 2), RESUME, {}),
    "a chunk has no name": ("C.zarr", Moment(r"link .*/c/\d+/\d+$", 2), RESUME, {}),
    "a chunk has no name, and C is made anew": ("C.zarr", Moment(r"link .*/c/\d+/\d+$", 2), OTHER, {}),
    "a block of .npy is not written": ("C.npy", Moment(r"write_rows .*C\.npy", 2), RESUME, {}),
    "a block of HDF5 is not synced": ("C.h5", Moment(r"fsync .*C\.h5$", 4), RESUME, {}),
    "a marker has no name": ("C.zarr", Moment(r"replace .*/done/.*\.json$", 2), RESUME, {}),
    "all is there": ("C.zarr", Moment(rf"replace .*/{ID}/certificate\.json$"), RESUME, {}),
    "C has no name": ("C.zarr", Moment(r"rename .*/C\.zarr [^ ]*/C\.zarr$"), RESUME, {}),
    "C has no name, and is made anew": ("C.npy", Moment(r"rename .*/C\.npy [^ ]*/C\.npy$"), OTHER, {}),
    "C is not replaced": ("C.zarr", Moment(r"exchange "), RESUME, {"overwrite": True}),
    "C has its name": ("C.zarr", Moment(r"rename .*/C\.zarr [^ ]*/C\.zarr$", after=True), RESUME, {}),
    "the certificate has no name": ("C.zarr", Moment(r"replace .*C\.zarr\.certificate\.json$"), RESUME, {}),
    "the manifest goes": ("C.zarr", Moment(r"rename .*manifest\.json "), RESUME, {}),
}  # fmt: skip
NORMAL = ("a chunk has no name", "a block of .npy is not written")


@pytest.mark.minutes
@pytest.mark.parametrize(
    "moment", [pytest.param(name, marks=() if name in NORMAL else LATER, id=name) for name in MOMENTS]
)
def test_a_machine_that_slept_while_another_took_over_changes_nothing(
    moment: str, client: Client, c: np.ndarray
) -> None:
    out, where, (call, options), asked = MOMENTS[moment]
    if asked:
        multiply(client, out, alpha=3)
    process = started(sleepers.run_all, where, "multiply", (out,), asked)
    with killed_at_the_end(process):
        until(lambda: asleep(process))
        if call == "resume":
            job.resume(out, client=client)
        else:
            multiply(client, out, **options)
        before = seen(Path.cwd())
        assert {name for name in os.listdir() if not name.endswith(".html")} == {"in", out, f"{out}.certificate.json"}
        wake(process)
        process.join()
        assert seen(Path.cwd()) == before
    assert (process.exitcode, Path(SAID).read_text()) == (REFUSED, lost(out))
    np.testing.assert_array_equal(values(out), options.get("alpha", 1) * c)
    assert job.recheck(out).outcome == "right"


def three(pattern: str, out: str, questions: int = 10**6) -> tuple[Any, ...]:
    """Scheduler, worker and client, each a process of its own; the worker falls asleep."""
    return (
        started(sleepers.run_scheduler),
        started(sleepers.run_worker, Moment(pattern, 2)),
        started(sleepers.run_client, questions, "multiply", (out,), {}),
    )


@pytest.mark.minutes
@pytest.mark.parametrize(
    ("out", "pattern"),
    [
        ("C.zarr", r"link .*/c/\d+/\d+$"),
        pytest.param("C.zarr", r"replace .*/done/.*\.json$", marks=LATER),
        pytest.param("C.npy", r"write_rows .*C\.npy", marks=LATER),
    ],
)
def test_a_worker_that_slept_while_another_cluster_took_over_changes_nothing(
    out: str, pattern: str, client: Client, c: np.ndarray
) -> None:
    """Its own client is killed meanwhile: nobody can tell the worker anything but the files."""
    scheduler, worker, asks = three(pattern, out)
    with killed_at_the_end(scheduler, worker, asks):
        until(lambda: asleep(worker))
        asks.kill()
        asks.join()
        job.resume(out, client=client)
        before = seen(Path.cwd())
        wake(worker)
        scheduler.kill()  # the worker ends with it
        worker.join()
        assert seen(Path.cwd()) == before
    np.testing.assert_array_equal(values(out), c)
    assert job.recheck(out).outcome == "right"


@pytest.mark.minutes
def test_a_client_whose_scheduler_slept_while_another_cluster_took_over_changes_nothing(
    client: Client, c: np.ndarray
) -> None:
    scheduler, worker, asks = three(r"link .*/c/\d+/\d+$", "C.zarr")
    with killed_at_the_end(scheduler, worker, asks):
        until(lambda: asleep(worker))
        os.kill(scheduler.pid or 0, signal.SIGSTOP)
        until(lambda: asleep(scheduler))
        wake(worker)
        job.resume("C.zarr", client=client)
        before = seen(Path.cwd())
        wake(scheduler)
        asks.join()
        assert seen(Path.cwd()) == before
    assert (asks.exitcode, Path(SAID).read_text()) == (REFUSED, lost("C.zarr"))
    np.testing.assert_array_equal(values(), c)


@pytest.mark.minutes
def test_a_client_whose_scheduler_does_not_wake_up_ends_with_a_job_to_go_on_with(client: Client, c: np.ndarray) -> None:
    """The system of a stopped process acknowledges all that is sent to it: TCP sees nothing."""
    scheduler, worker, asks = three(r"link .*/c/\d+/\d+$", "C.zarr", questions=40)  # of half a second
    with killed_at_the_end(scheduler, worker, asks):
        until(lambda: asleep(worker))
        os.kill(scheduler.pid or 0, signal.SIGSTOP)
        asks.join(120)
    assert asks.exitcode == STOPPED
    assert "the scheduler" in Path(SAID).read_text()
    job.resume("C.zarr", client=client)
    np.testing.assert_array_equal(values(), c)
