"""A real Slurm: products submitted, followed, stopped before the walltime, requeued, cancelled."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import zarr
from typer.testing import CliRunner

from distmm.errors import InputError
from distmm.storage import open_matrix
from distmm.submit import jobfile
from distmm.submit import slurm as batch
from tests.scraping import scraping
from tests.until import until

pytestmark = pytest.mark.minutes

JOB = """\
[product]
a = "A.npy"
b = "B.npy"
c = "C.zarr"
[run]
folder = "run"
walltime = "5m"
grace = "1m"
[workers]
nodes = 2
device = "cpu"
cpus = 1
memory = "1GB"
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(6)
    np.save(tmp_path / "A.npy", rng.integers(-9, 9, (300, 200)))
    np.save(tmp_path / "B.npy", rng.integers(-9, 9, (200, 250)))
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A Python whose ``-m distmm multiply`` notes its starts and stops in a file, and finishes at its third start."""
    client = tmp_path / "client.py"
    client.write_text(STAND_IN)
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/bash\n"
        f'[ "$2 $3" = "distmm multiply" ] && exec {sys.executable} {client} {tmp_path}/starts\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


# It keeps the contract of distmm multiply: SIGTERM ends it with 75 and its work kept; the third start finishes. With a
# file "starts.early" it is as distmm while Python imports: SIGTERM just ends it.
STAND_IN = """\
import os, signal, sys, time
def stop(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write("stopped\\n")
    os._exit(75)
if not os.path.exists(sys.argv[1] + ".early"):
    signal.signal(signal.SIGTERM, stop)
with open(sys.argv[1], "a") as file:
    file.write("started\\n")
if open(sys.argv[1]).read().count("started") == 3:
    sys.exit(0)
time.sleep(300)
"""


def _submit(job_file: Path, python: Path, *changes: str) -> tuple[jobfile.Job, str]:
    job = jobfile.load(job_file, changes)
    return job, batch.submit(job, python=str(python))


def _until_log(path: Path, pattern: str) -> None:
    until(lambda: path.exists() and re.search(pattern, path.read_text()), f"{path} does not say {pattern!r}")


def test_a_submitted_product_runs_over_two_nodes_and_is_right(slurm: Path, job_file: Path) -> None:
    from distmm.cli.app import app

    done = CliRunner().invoke(app, ["submit", str(job_file), "--cluster", "slurm", "--set", "run.tls=temporary"])
    assert done.exit_code == 0, done.output
    expected = np.load(job_file.parent / "A.npy") @ np.load(job_file.parent / "B.npy")
    assert np.array_equal(open_matrix(job_file.parent / "C.zarr")[:, :], expected)
    assert "Cluster with 2 workers" in done.output
    assert "ssh -N -L 8787:127.0.0.1:" in done.output
    assert not WRONG.search(done.output), done.output


def test_results_have_the_modes_of_the_users_umask_in_batch_jobs(slurm: Path, job_file: Path) -> None:
    job = jobfile.load(job_file)
    before = os.umask(0o007)  # a user who shares with his group
    try:
        assert batch.follow(batch.submit(job), lambda line: None) == 0
    finally:
        os.umask(before)
    made = [path for path in job_file.parent.rglob("*") if "/C.zarr" in str(path)]
    assert len(made) > 4
    modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in made}
    assert set(modes.values()) == {0o660, 0o770}, modes


def test_a_job_that_meets_its_walltime_twice_requeues_itself_and_finishes(
    slurm: Path, job_file: Path, stand_in: Path
) -> None:
    _, number = _submit(job_file, stand_in, "run.walltime=1m", "run.grace=20s")
    said: list[str] = []
    assert batch.follow(number, said.append) == 0, said
    assert (job_file.parent / "starts").read_text().split() == ["started", "stopped"] * 2 + ["started"]
    # More often where scheduler and workers were slow, and the end came before the client: that loses nothing.
    assert sum("requeued, to compute the missing blocks" in line for line in said) >= 2


@pytest.mark.parametrize("early", [False, True])
def test_a_preempted_job_stops_cleanly_and_comes_back(slurm: Path, job_file: Path, stand_in: Path, early: bool) -> None:
    (job_file.parent / "starts").write_text("started\nstopped\n")  # so that the second start finishes
    if early:
        (job_file.parent / "starts.early").touch()
    job, number = _submit(job_file, stand_in, "slurm.partition=low", "workers.cpus=4")
    _until_log(job_file.parent / "starts", "stopped\nstarted")
    urgent = ["sbatch", "--partition=high", "--nodes=2", "--cpus-per-task=4", "--output=/dev/null", "--wrap=sleep 1"]
    subprocess.run(urgent, check=True, capture_output=True)
    said: list[str] = []
    assert batch.follow(number, said.append) == 0, said
    stopped = [] if early else ["stopped"]
    assert (job_file.parent / "starts").read_text().split() == ["started", "stopped", "started", *stopped, "started"]
    said_by_all = _without_cut_connections(_log(job, number))
    assert not WRONG.search(said_by_all), said_by_all


def test_a_product_that_is_stopped_twice_goes_on_with_its_missing_blocks(slurm: Path, waves: jobfile.Job) -> None:
    from distmm.cli.app import app

    folder, number = Path(waves.product.c).parent, batch.submit(waves)
    log, kept = folder / "run" / f"distmm-{number}.log", {}
    for start in range(1, 3):
        until(functools.partial(_more, folder, len(kept)), f"start {start} finishes no block")
        # The signal that Slurm sends before the walltime.
        subprocess.run(["scancel", "--batch", "--signal=USR1", number], check=True)
        _until_log(log, rf"(?s)(requeued, to compute the missing blocks.*){{{start}}}")
        before, kept = kept, _finished(folder)
        assert before.items() <= kept.items()
        assert len(before) < len(kept) < 64
        assert re.search(rf"{len(kept)} of 64 blocks\s+of\s+C\s+are\s+finished\s+and\s+kept", log.read_text())
    assert batch.follow(number, lambda line: None) == 0
    assert f"64, {len(kept)} of them finished before" in log.read_text()
    assert not WRONG.search(log.read_text()), log.read_text()
    certificate = json.loads((folder / "C.zarr.certificate.json").read_text())
    assert (len(certificate["runs"]), len(certificate["done"])) == (3, 64)
    # The same markers, with the time and the worker of each block's only writing.
    done = [{"job": certificate["job"], **block} for block in certificate["done"]]
    assert [content for _, content in kept.values() if json.loads(content) not in done] == []
    assert _right(folder)
    assert CliRunner().invoke(app, ["verify", str(folder / "C.zarr")]).exit_code == 0


def test_a_cancelled_product_does_not_come_back_and_goes_on_when_it_is_submitted_again(
    slurm: Path, waves: jobfile.Job
) -> None:
    folder, number = Path(waves.product.c).parent, batch.submit(waves)
    until(functools.partial(_more, folder, 0), "no block is finished")
    subprocess.run(["scancel", number], check=True)
    assert batch.follow(number, lambda line: None) == 75
    assert number not in _queue()
    said = _without_cut_connections(_log(waves, number))
    assert re.findall(r".*(?:distmm-|check your connection).*", said.partition("Plan\n")[2]) == []
    assert f"continue with: distmm submit JOB.toml --cluster slurm (the last run was Slurm job {number})" in said
    kept = _finished(folder)
    assert 0 < len(kept) < 64
    assert not WRONG.search(said), said
    lines: list[str] = []
    assert batch.follow(batch.submit(waves), lines.append) == 0
    assert f"64, {len(kept)} of them finished before" in "\n".join(lines)
    assert _right(folder)


def _without_cut_connections(said: str) -> str:
    """Leave out what Dask logs if Slurm's signal comes at a bad time.

    The scheduler may order a graph, ask workers that Slurm has ended, or fetch the record of a block from one; a worker
    may copy a block from one that has ended sooner, or send a heartbeat.
    """
    error = r"[^\n]*distributed\.{} - ERROR - "
    scheduler, worker = error.format("scheduler"), error.format("worker")
    for cut in (
        scheduler + r"\nTraceback.*?CancelledError\n",
        scheduler + r"broadcast to [^\n]* failed[^\n]*\n",
        scheduler + r"Couldn't gather keys[^\n]*\n",
        worker
        + r"(failed during get data|Worker stream died|Failed to communicate with scheduler)[^\n]*\n"
        + r"Traceback.*?CommClosedError: [^\n]*\n",
    ):
        said = re.sub(cut, "", said, flags=re.DOTALL)
    return said


@pytest.fixture
def waves(job_file: Path) -> jobfile.Job:
    """A product of integers (no BLAS is so fast that a stop comes too late), in eight waves of eight blocks."""
    rng = np.random.default_rng(7)
    for name in "AB":
        np.save(job_file.parent / f"{name}.npy", rng.integers(-9, 9, (4000, 4000)))
    return jobfile.load(job_file, ["product.plan=g1x2x1 b500x1000x500 p1 w8x1 l2", "workers.memory=4GB"])


def _right(folder: Path) -> bool:
    a, b = np.load(folder / "A.npy").astype(float), np.load(folder / "B.npy").astype(float)
    return np.array_equal(open_matrix(folder / "C.zarr")[:, :], a @ b)  # exact: sums are below 2**53


def _more(folder: Path, than: int) -> bool:
    return len(_finished(folder)) > than


def _finished(folder: Path) -> dict[str, tuple[int, str]]:
    """Markers of the blocks that are finished: when each was written, and what it says."""
    markers = (folder / "C.zarr.job").glob("*/*/done/*.json")
    return {path.name: (path.stat().st_mtime_ns, path.read_text()) for path in markers}


def test_a_job_that_loses_its_workers_ends_and_says_so(slurm: Path, job_file: Path, stand_in: Path) -> None:
    _, number = _submit(job_file, stand_in)
    _until_log(job_file.parent / "starts", "started")
    steps = subprocess.run(["squeue", "-hs", "-o", "%j %i"], capture_output=True, text=True, check=True).stdout
    subprocess.run(["scancel", dict(line.split() for line in steps.splitlines())["workers"]], check=True)
    said: list[str] = []
    assert batch.follow(number, said.append) == 75
    assert any("the workers ended before the product" in line for line in said)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("slurm.partition=short", "PartitionTimeLimit|PartitionConfig"),
        ("workers.nodes=3", "PartitionNodeLimit|PartitionConfig|BadConstraints"),
    ],
)
def test_a_job_that_can_never_start_is_reported_and_taken_from_the_queue(
    slurm: Path, job_file: Path, change: str, reason: str
) -> None:
    job = jobfile.load(job_file, [change])
    number = batch.submit(job)
    with pytest.raises(InputError, match=f"can never start: ({reason})"):
        batch.follow(number, lambda line: None)
    assert subprocess.run(["squeue", "-h", "-j", number], capture_output=True, check=False).stdout == b""


def test_what_slurm_refuses_is_said_in_its_words(slurm: Path, job_file: Path) -> None:
    with pytest.raises(InputError, match=r"sbatch refuses: .*partition"):
        batch.submit(jobfile.load(job_file, ["slurm.partition=nowhere"]))


def test_the_best_of_each_row_come_from_nodes_by_the_same_job_file(slurm: Path, job_file: Path) -> None:
    from distmm.cli.app import app

    folder = job_file.parent
    topk = ["topk", f"{folder}/A.npy", f"{folder}/B.npy", "-k", "3", "-o", f"{folder}/T.zarr", "--device", "cpu"]
    for words in (topk, ["verify", f"{folder}/T.zarr"]):
        done = CliRunner().invoke(app, ["submit", str(job_file), "--cluster", "slurm", "--", *words])
        assert done.exit_code == 0, done.output
    assert "block rows are what was written" in done.output
    product = np.load(folder / "A.npy") @ np.load(folder / "B.npy")
    values = np.asarray(zarr.open_group(folder / "T.zarr", mode="r")["values"])
    assert np.array_equal(values, -np.sort(-product, axis=1)[:, :3])


def _queue() -> set[str]:
    return set(subprocess.run(["squeue", "-h", "-o", "%A"], capture_output=True, text=True, check=True).stdout.split())


def test_prometheus_reaches_every_worker_of_a_default_job(slurm: Path, waves: jobfile.Job, tmp_path: Path) -> None:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("no Prometheus here: apt-get install prometheus")
    number = batch.submit(waves)
    log = Path(waves.run.folder) / f"distmm-{number}.log"
    _until_log(log, "8787:127.0.0.1:")
    found = re.search(r"8787:127.0.0.1:(\d+)", log.read_text())
    assert found is not None
    until(functools.partial(_more, tmp_path, 0), "no block is finished")  # the first product brings the targets
    shipped = (Path(__file__).parents[2] / "deploy" / "monitoring" / "prometheus.yml").read_text()
    text = shipped.replace("scheduler:8787", f"127.0.0.1:{found[1]}").replace("15s", "1s")
    text = text.replace("rule_files:\n  - alerts.yml", "")
    with scraping(prometheus, text, tmp_path) as ask:
        until(lambda: len(ask('up{job="distmm-workers"} == 1')) == 2, lambda: str(ask("up")))
        assert not ask("up == 0")
    subprocess.run(["scancel", number], check=True)
    assert batch.follow(number, lambda line: None) == 75


def test_a_node_whose_workers_die_gets_others(slurm: Path, waves: jobfile.Job) -> None:
    folder, number = Path(waves.product.c).parent, batch.submit(waves)
    until(functools.partial(_more, folder, 0), "no block is finished")
    (nanny,) = _processes("worker", "--scheduler-file", f"distmm-{number}", "n2")
    nanny.kill()
    said: list[str] = []
    assert batch.follow(number, said.append) == 0
    assert any("the workers of n2 have ended with code 137" in line for line in said)
    assert _right(folder)


def _processes(*words: str) -> list[psutil.Process]:
    """Pythons whose command has these words; the last one is its last argument."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command = process.cmdline()
            if command[-1:] == [words[-1]] and command[1] == "-m" and all(word in " ".join(command) for word in words):
                found.append(process)
    return found


# In the log of a run that did not fail there is no traceback and no error; "error  at most ..." is a result.
WRONG = re.compile(r"Traceback|ERROR|CRITICAL|\b[Ee]rror\b(?! +at most)")


def _log(job: jobfile.Job, number: str) -> str:
    return (Path(job.run.folder) / f"distmm-{number}.log").read_text()
