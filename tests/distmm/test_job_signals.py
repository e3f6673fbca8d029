"""SIGTERM and Ctrl-C, once or several times, end a job with exit code 75, and what is finished is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

from distmm import job
from distmm.errors import InputError, Stopped
from distmm.job import Stop

# Four waves, of which all but the first wait for ever: however late a signal comes, it finds the job half-way.
PROGRAM = """
from distmm.cli import main
from distmm.job.loop import Loop
Loop._at_the_tail = lambda loop: not loop.waves
main()
"""
RUN = [sys.executable, "-c", PROGRAM]
OPTIONS = ["--plan", "g1x1x1 b300x300x300 p1 w4x1 l1", "--device", "cpu", "--workers", "1"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"}


def started(folder: Path) -> subprocess.Popen[str]:
    """A job in a group of processes of its own, whose first block is on the disk."""
    np.lib.format.open_memmap(folder / "A.npy", mode="w+", dtype="float32", shape=(1200, 1200)).flush()
    process = subprocess.Popen(
        [*RUN, "multiply", "A.npy", "A.npy", "-o", "C.zarr", *OPTIONS], cwd=folder, env=ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not finished(folder) and process.poll() is None:
        time.sleep(0.01)
    return process


def finished(folder: Path) -> int:
    return len(list((folder / "C.zarr.job" / "done").glob("*.json")))


def ended(process: subprocess.Popen[str], folder: Path, client: Client) -> str:
    """Check that the job has ended as one that can be gone on with, and goes on; return what it said."""
    out, err = process.communicate(timeout=120)
    assert (process.returncode, "Traceback" in err, "Done" in out) == (75, False, False), err
    assert sorted(os.listdir(folder)) == ["A.npy", "C.zarr.job"]
    done, found = finished(folder), job.status(folder / "C.zarr")
    assert (found.state, found.done, found.total) == ("stopped", done, 16)
    assert job.resume(folder / "C.zarr", client=client).kept == done
    assert sorted(os.listdir(folder)) == ["A.npy", "C.zarr", "C.zarr.certificate.json", "C.zarr.report.html"]
    return err


def to_the_client(process: subprocess.Popen[str], number: signal.Signals) -> None:
    process.send_signal(number)


def to_all(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Terminals send Ctrl-C to the whole group of processes, and scancel SIGTERM to all of a job step."""
    os.killpg(process.pid, number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "send"), [(signal.SIGINT, to_all), (signal.SIGTERM, to_the_client), (signal.SIGTERM, to_all)]
)
def test_one_signal_stops_the_job_which_resume_ends(
    number: signal.Signals,
    send: Callable[[subprocess.Popen[str], signal.Signals], None],
    client: Client,
    tmp_path: Path,
) -> None:
    with started(tmp_path) as process:
        send(process, number)
        said = ended(process, tmp_path, client)
    assert f"stopped: {number.name} was received; " in said
    assert "of 16 blocks of C are finished and kept" in said


@pytest.mark.slow
@pytest.mark.parametrize(("number", "late"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_signals_that_do_not_cease_lose_nothing(
    number: signal.Signals, late: bool, client: Client, tmp_path: Path
) -> None:
    with started(tmp_path) as process:
        before = finished(tmp_path)
        process.send_signal(number)
        while late and list((tmp_path / "C.zarr.job").glob("lock.*")):  # until the cluster is being stopped
            time.sleep(0.002)
        while process.poll() is None:
            process.send_signal(number)
            time.sleep(0.002)
        assert finished(tmp_path) >= before
        said = ended(process, tmp_path, client)
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
    assert stop.reason == "the deadline of 0 s has come"
    with stop.on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert (stop.reason, stop.at_once) == ("the deadline of 0 s has come", False)


def test_without_a_signal_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop().on_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
