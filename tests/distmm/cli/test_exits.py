"""Exit codes of real processes: interrupts before any work, a closed output pipe, a scheduler that dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from distributed import Client
from typer.testing import CliRunner

from distmm import job
from distmm.cli import demo, session
from distmm.cli.app import app
from tests.programs import started
from tests.until import until

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"}
ONE = ["--device", "cpu", "--workers", "1"]

# The command exits with 130. Where the signal interrupts one of Python's own imports, Python ends by the signal. A
# shell shows 130 for both.
INTERRUPTED = (130, -signal.SIGINT)


@contextmanager
def start(folder: Path, *command: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program in a folder with a matrix, in a process group of its own, as a terminal does."""
    np.save(folder / "A.npy", np.ones((400, 400), "float32"))
    environment = {**ENVIRONMENT, **variables}
    with started([sys.executable, *command], environment, cwd=folder, stdin=subprocess.PIPE) as process:
        yield process


def test_ctrl_c_while_the_command_is_imported_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "dask.py").write_text("import signal; print('here', flush=True); signal.pause()")
    path = f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
    with start(tmp_path, "-m", "distmm", "plan", "A.npy", "A.npy", PYTHONPATH=path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "interrupted\n")


@pytest.mark.parametrize("text", ["distmm: [unclosed", "- a list"])
def test_a_configuration_that_dask_cannot_read_is_wrong_input(tmp_path: Path, text: str) -> None:
    (tmp_path / "dask.yaml").write_text(text)
    with start(tmp_path, "-m", "distmm", "plan", "A.npy", "A.npy", DASK_CONFIG=str(tmp_path)) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err.startswith(f"error: A dask config file at '{tmp_path / 'dask.yaml'}' is malformed")


STARTING = """
import sys
from distmm.cli import main
from distmm.clusters import local_cluster
made = local_cluster.LocalCluster
def make(**options):
    found = made(**options)
    print("here", flush=True)
    sys.stdin.readline()
    return found
local_cluster.LocalCluster = make
main()
"""


@pytest.mark.minutes
def test_ctrl_c_while_the_cluster_starts_is_no_error(tmp_path: Path) -> None:
    with start(tmp_path, "-c", STARTING, "multiply", "A.npy", "A.npy", "-o", "C.npy", *ONE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate("\n", timeout=120)
    assert (process.returncode in INTERRUPTED, err) == (True, "interrupted\n")
    assert os.listdir(tmp_path) == ["A.npy"]


HALF_STARTED = """
import asyncio, os, signal
from distributed import Nanny
from distributed.deploy.spec import SpecCluster
from distmm.cli import main
async def start(nanny):
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)
Nanny.start_unsafe = start
SpecCluster.close = lambda *how, **options: print("waits for workers that have not started")
main()
"""


def test_a_cluster_that_sigterm_has_left_half_started_is_not_waited_for(tmp_path: Path) -> None:
    with start(tmp_path, "-c", HALF_STARTED, "verify", "A.npy", "A.npy", "A.npy", "--workers", "1") as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (128 + signal.SIGTERM, "", "")


ENDING = """
import atexit, os, signal, sys
from distmm.cli import main
from distmm.clusters import local_cluster
def closing():
    print("here", flush=True)
    sys.stdin.readline()
atexit.register(closing)
def make(**options):
    os.kill(os.getpid(), signal.NUMBER)
local_cluster.LocalCluster = make
main()
"""


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGINT, (130, "interrupted\ninterrupted\n")), (signal.SIGTERM, (128 + signal.SIGTERM, ""))],
)
def test_a_second_signal_while_the_command_ends_is_no_error(
    number: signal.Signals, expected: tuple[int, str], tmp_path: Path
) -> None:
    program = ENDING.replace("NUMBER", number.name)
    with start(tmp_path, "-c", program, "verify", "A.npy", "A.npy", "A.npy", "--workers", "1") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        os.killpg(process.pid, number)
        _, err = process.communicate("\n", timeout=120)
    assert (process.returncode, err) == expected


def test_closed_streams_and_a_removed_folder_end_in_no_traceback(tmp_path: Path) -> None:
    plan = ["-m", "distmm", "plan", "../A.npy", "../A.npy"]
    (tmp_path / "here").mkdir()
    for how, expected in {
        'exec "$@" >&-': (0, "", ""),
        'exec "$@" 2>&- >&- <&-': (0, "", ""),
        'exec "$@" >/dev/full': (3, "", "a part of the output is lost: [Errno 28] No space left on device\n"),
        'rmdir ../here; exec "$@"': (2, "", "error: the working folder of this shell has been removed: change to one"),
    }.items():
        command = ["sh", "-c", f"cd here; {how}", "sh", sys.executable, *plan]
        np.save(tmp_path / "A.npy", np.ones((4, 4)))
        found = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
        assert (found.returncode, found.stdout, found.stderr[: len(expected[2]) or None]) == expected, how


@pytest.mark.minutes
def test_a_closed_output_pipe_changes_nothing(tmp_path: Path) -> None:
    with start(tmp_path, "-m", "distmm", "multiply", "A.npy", "A.npy", "-o", "C.npy", *ONE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert (process.wait(timeout=120), "Broken" in (process.stderr or sys.stdin).read()) == (0, False)
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), np.full((400, 400), 400))


@pytest.mark.minutes
def test_a_full_disk_of_the_log_does_not_end_a_job(tmp_path: Path) -> None:
    run = 'exec "$@" >/dev/full 2>&1'
    command = ["sh", "-c", run, "sh", sys.executable, "-m", "distmm", "multiply", "A.npy", "A.npy", "-o", "C.npy", *ONE]
    np.save(tmp_path / "A.npy", np.ones((400, 400), "float32"))
    assert subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, timeout=120).returncode == 3
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), np.full((400, 400), 400))


HALF_WAY = """
from distmm.cli import main
from distmm.product.waves import Waves
once = iter([True])
Waves.may_send = lambda waves: next(once, False)
main()
"""


@pytest.mark.minutes
@pytest.mark.slow
def test_a_job_whose_scheduler_is_killed_can_be_resumed(tmp_path: Path) -> None:
    plan = ["--plan", "g1x1x1 b100x400x100 p1 w4x1 l1", "--device", "cpu"]
    dask = ["-m", "dask"]
    with (
        start(tmp_path, *dask, "scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", "s.json") as scheduler,
        start(tmp_path, *dask, "worker", "--scheduler-file", "s.json", "--no-nanny", "--no-dashboard") as worker,
    ):
        try:
            until(lambda: (tmp_path / "s.json").exists())
            command = ["multiply", "A.npy", "A.npy", "-o", "C.zarr", *plan, "--cluster", "s.json"]
            with start(tmp_path, "-c", HALF_WAY, *command) as process:
                folder = tmp_path / "C.zarr.job"
                until(lambda: list(folder.glob("*/*/done/*.json")) or process.poll() is not None)
                scheduler.kill()
                _, err = process.communicate(timeout=120)
        finally:
            scheduler.kill()
            worker.kill()
    assert (process.returncode, "Traceback" in err) == (75, False), err
    assert "stopped: the scheduler " in err
    assert "continue with: distmm resume C.zarr" in err
    assert job.status(tmp_path / "C.zarr").state == "stopped"


@pytest.mark.minutes
def test_ctrl_c_while_the_demo_makes_its_matrices_leaves_no_draft(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(block: np.ndarray) -> np.ndarray:
        time.sleep(0.1)
        return block

    def interrupt() -> None:
        until(lambda: list(tmp_path.glob("here/.A.draft*/c/*/*")))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(demo, "CHUNK", 40)
    monkeypatch.setattr(demo, "_random", lambda shape, *_: da.ones(shape, chunks=40, dtype="f4").map_blocks(slow))

    @contextmanager
    def shared(*_: object) -> Iterator[Client]:
        with client.as_current():
            yield client

    monkeypatch.setattr(session, "cluster", shared)
    thread = threading.Thread(target=interrupt)
    thread.start()
    result = CliRunner().invoke(app, ["demo", "--size", "400", "--device", "cpu", "--dir", str(tmp_path / "here")])
    thread.join()
    gc.collect()  # asyncio logs errors that nobody has looked at
    assert (result.exit_code, "interrupted" in result.output, caplog.text) == (130, True, "")
    assert os.listdir(tmp_path / "here") == [demo.MARK]
