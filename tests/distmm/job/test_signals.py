"""SIGTERM and Ctrl-C, once or several times, end a job with exit code 75, and what is finished is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from distributed import Client

from distmm import job
from distmm.errors import InputError, Stopped
from distmm.job import Stop
from tests.until import until

# Four waves, of which all but the first wait for ever: however late a signal comes, it finds the job half-way.
PROGRAM = """
from distmm.cli import main
from distmm.product.waves import Waves
once = iter([True])
Waves.may_send = lambda waves: next(once, False)
main()
"""
RUN = [sys.executable, "-c", PROGRAM]
OPTIONS = ["--plan", "g1x1x1 b100x400x100 p1 w4x1 l1", "--device", "cpu", "--workers", "1"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"}


class Job(NamedTuple):
    """A job in a group of processes of its own."""

    folder: Path
    process: subprocess.Popen[str]

    @property
    def finished(self) -> int:
        return len(list((self.folder / "C.zarr.job").glob("*/*/done/*.json")))

    def ended(self, client: Client) -> str:
        """Check that the job has ended as one that can be gone on with, and goes on; return what it said."""
        folder, process = self
        out, err = process.communicate(timeout=120)
        assert (process.returncode, "Traceback" in err, "Done" in out) == (75, False, False), err
        # A client that is told twice writes no report.
        assert {*os.listdir(folder)} - {"C.zarr.report.html"} == {"A.npy", "C.zarr.job"}
        done, found = self.finished, job.status(folder / "C.zarr")
        assert (found.state, found.done, found.total) == ("stopped", done, 16)
        assert job.resume(folder / "C.zarr", client=client).kept == done
        assert sorted(os.listdir(folder)) == ["A.npy", "C.zarr", "C.zarr.certificate.json", "C.zarr.report.html"]
        return err


@pytest.fixture
def half_way(tmp_path: Path) -> Iterator[Job]:
    """A job whose first block is on the disk."""
    np.lib.format.open_memmap(tmp_path / "A.npy", mode="w+", dtype="float32", shape=(400, 400)).flush()
    with subprocess.Popen(
        [*RUN, "multiply", "A.npy", "A.npy", "-o", "C.zarr", *OPTIONS], cwd=tmp_path, env=ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        one = Job(tmp_path, process)
        try:
            until(lambda: one.finished or process.poll() is not None)
            yield one
        finally:
            process.kill()


@pytest.mark.minutes
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.minutes)])
def test_one_signal_stops_the_job_which_resume_ends(number: signal.Signals, half_way: Job, client: Client) -> None:
    # Terminals send Ctrl-C to the whole group of processes, and scancel SIGTERM to all of a job step.
    os.killpg(half_way.process.pid, number)
    said = half_way.ended(client)
    assert f"stopped: {number.name} was received; " in said
    assert "of 16 blocks of C are finished and kept" in said


@pytest.mark.minutes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "late"),
    [pytest.param(signal.SIGINT, False, marks=pytest.mark.minutes), (signal.SIGTERM, True)],
)
def test_signals_that_do_not_cease_lose_nothing(
    number: signal.Signals, late: bool, half_way: Job, client: Client
) -> None:
    folder, process = half_way
    before = half_way.finished
    process.send_signal(number)  # to the client alone
    if late:  # until the cluster is being stopped
        until(lambda: not list((folder / "C.zarr.job").glob("lock.*")))
    while process.poll() is None:
        process.send_signal(number)
        time.sleep(0.02)
    assert half_way.finished >= before
    said = half_way.ended(client)
    assert f"stopped: {number.name} was received" in said


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Have the handlers of this process back after the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
def test_a_signal_is_a_request_and_a_second_one_interrupts() -> None:
    stop = Stop()
    before: list[tuple[str | None, bool]] = []

    def work() -> None:
        with stop.on_signals():
            signal.raise_signal(signal.SIGTERM)
            before.append((stop.reason, stop.at_once))
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Stopped, match="SIGTERM was received, twice"):
        work()
    assert before == [("SIGTERM was received", False)]
    assert stop.at_once
    for number in (signal.SIGTERM, signal.SIGINT):  # the program is about to end: its exit code stays
        signal.raise_signal(number)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize("error", [RuntimeError("release unlocked lock"), InputError("no such file")])
def test_what_the_second_signal_breaks_is_a_stop_too(error: Exception) -> None:
    def work(signals: int) -> None:
        stop = Stop()
        with stop.on_signals():
            with suppress(KeyboardInterrupt):
                for _ in range(signals):
                    signal.raise_signal(signal.SIGINT)
            raise error

    with pytest.raises(type(error)):
        work(1)
    with pytest.raises(InputError if isinstance(error, InputError) else Stopped):
        work(2)


@pytest.mark.usefixtures("_handlers")
def test_a_signal_after_the_deadline_is_a_first_one() -> None:
    stop = Stop(0)
    assert stop.reason == "the deadline of 0 s has passed"
    with stop.on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert (stop.reason, stop.at_once) == ("the deadline of 0 s has passed", False)


def test_without_a_signal_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop().on_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
