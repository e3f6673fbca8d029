"""Submit a job to Slurm and follow it to its end. In its one allocation, srun starts scheduler, workers and client."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dask.utils import parse_bytes

from distmm import templates
from distmm.errors import InputError
from distmm.submit import dashboard_access, tls
from distmm.submit.patience import NoAnswerError, Say, patiently
from distmm.submit.schema import Job
from distmm.worker import gpu_worker_setup

# Seconds from the start of the steps until all workers must have joined. Many nodes that import CUDA libraries from a
# shared folder at once need minutes; a node that needs longer than this is broken.
PATIENCE_SECONDS = 600

# Exit code of a job that was stopped, or lost its scheduler or workers, and can be resumed (EX_TEMPFAIL of sysexits.h).
RESUMABLE = 75

# Exit code of a client that SIGTERM ended before its product started, for instance during its imports. No work is lost,
# so the job counts as stopped.
TERMINATED = 143

# Seconds between two requests to slurmctld, which serves the whole site.
POLL_SECONDS = 2.0

# Limit for Slurm's commands. They try to reach slurmctld for 10 s (MessageTimeout), and then its backup.
ANSWER_SECONDS = 60.0

# Reasons for which a pending job never starts, even on an idle cluster (squeue, JOB REASON CODES): its request does not
# exist, is not allowed, or exceeds the limit of a single job.
NEVER = re.compile(
    "AccountNotAllowed|BadConstraints|InvalidAccount|InvalidQOS|PartitionConfig|PartitionInactive|PartitionNodeLimit|"
    r"PartitionTimeLimit|QOSNotAllowed|ReservationDeleted|(Assoc|QOS)Max\w+Per(Job|Node)(Limit)?|QOSMin\w+"
)

# What a job requests, as Slurm names it.
REQUESTED = ("NumNodes", "Partition", "TimeLimit", "ReqTRES")

# States in which a job has ended (squeue, JOB STATE CODES). About twenty other states are temporary.
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip


def check_program() -> None:
    """Raise `InputError` on a machine without Slurm."""
    if shutil.which("sbatch") is None:
        raise InputError("there is no sbatch here: submit from a login node of the cluster, or use --cluster local")


def submit(job: Job, *, python: str = sys.executable, submitted_by: str = "") -> str:
    """Write the batch script of a job to its folder, and submit it with ``sbatch``.

    Parameters
    ----------
    job : Job
    python : str, optional
        Interpreter that the nodes start; by default the present one.
    submitted_by : str
        Command that submits the job again, for `distmm status` and messages of the job.

    Returns
    -------
    str
        Slurm's job number.

    Raises
    ------
    InputError
        For a folder that cannot be written, and if Slurm refuses the job.
    """
    folder = Path(job.run.folder)
    script = folder / f"{job.run.name}.sh"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tls.prepared(job.run.tls, job.run.folder, job.run.name)
        script.write_text(render(job, python=python))
    except OSError as error:
        raise InputError(f"{folder}: {error}; set run.folder to a folder that you and all nodes can write") from error
    environment = {**os.environ, "DISTMM_SUBMITTED_BY": submitted_by}  # which sbatch gives to the job
    return _run("sbatch", "--parsable", str(script), environment=environment).strip().split(";")[0]


def render(job: Job, *, python: str = sys.executable) -> str:
    """Return the batch script of a job.

    Parameters
    ----------
    job : Job
    python : str
        Interpreter with distmm that all nodes can start; by default the present one.

    Returns
    -------
    str
        Text for ``sbatch``. Every value from the job file is quoted.
    """
    run, gpu = job.run, job.workers.device == "gpu"
    certificates = tls.certificate_paths(run.tls, run.folder, run.name)
    log = f"{run.folder.replace('%', '%%')}/{run.name}-%j"
    return templates.filled(
        Path(__file__).with_name("slurm_script.sh"),
        job=job,
        python=python,
        megabytes=parse_bytes(job.workers.memory) // 2**20,
        output=_quoted(f"{log}.log"),
        error=_quoted(f"{log}.slurm"),
        variables=dashboard_access.environment(dashboard_access.settings(run.dashboard) | tls.settings(certificates))
        | (gpu_worker_setup.ENVIRONMENT if gpu else {}),
        worker_options=gpu_worker_setup.worker_options() if gpu else ["--nworkers", str(job.workers.per_node)],
        patience=PATIENCE_SECONDS,
        resumable=RESUMABLE,
        terminated=TERMINATED,
    )


def _quoted(text: str) -> str:
    """Quote a value for sbatch, which splits lines at spaces and supports double quotes."""
    return text if text.isascii() and all(c.isalnum() or c in "_.,:+=@%/*&|()[]-" for c in text) else f'"{text}"'


def follow(number: str, say: Say) -> int:
    """Report the states and the log of a job until it ends.

    Parameters
    ----------
    number : str
        Slurm's job number.
    say : callable
        Called with each line.

    Returns
    -------
    int
        Exit code of the job; 75 if it was cancelled or has used up its restarts. Finished blocks are kept then.

    Raises
    ------
    InputError
        If Slurm does not know the number, or does not answer for ten minutes, and for a job that can never start, which
        is cancelled.
    """
    facts = partial(patiently, "Slurm", f"distmm submit --follow {number}", say, POLL_SECONDS, _job_facts, number)
    shown = facts()
    if shown is None:
        raise InputError(
            f"Slurm knows no job {number}, or no longer: it forgets a job some minutes after its end. Look for its log "
            f"NAME-{number}.log in its run.folder"
        )
    path, before = Path(shown["StdOut"]), ""
    log = _tail(path)
    while True:
        for line in next(log):
            say(line)
        if shown is None:
            return _code_of_forgotten(path)
        state, reason = shown["JobState"], shown["Reason"]
        current = f"{state.lower()} ({reason})" if reason != "None" else state.lower()
        if current != before:
            nodes = f" on {shown['NodeList']}" if state == "RUNNING" else ""
            say(f"job {number}: {current}{nodes}")
            before = current
        if state == "PENDING" and NEVER.fullmatch(reason):
            _run("scancel", number)
            request = ", ".join(f"{name}={shown[name]}" for name in REQUESTED if name in shown)
            raise InputError(
                f"job {number} can never start: {reason}; it was cancelled. It requests {request}: compare with sinfo"
            )
        time.sleep(POLL_SECONDS)  # after the end, too: a shared file system may show the log's last lines late
        if state in ENDED:
            for line in next(log):
                say(line)
            code = int(shown["ExitCode"].split(":")[0])  # of Slurm's code:signal
            # Without a code the job was cancelled, timed out or preempted, or its node failed.
            return code if state == "COMPLETED" else code or RESUMABLE
        shown = facts()


def _code_of_forgotten(log: Path) -> int:
    """Return the exit code in the file next to a job's log; 75 without this file, since the job was then cancelled."""
    left = log.with_suffix(".exit")
    try:
        return int(left.read_text())
    except (OSError, ValueError):
        return RESUMABLE


def _job_facts(number: str) -> dict[str, str] | None:
    """Return Slurm's facts about a job; None for a job that it does not know, or has forgotten after its end.

    Raises
    ------
    NoAnswerError
        If Slurm does not answer.
    """
    asked = ["scontrol", "--oneliner", "show", "job", number]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"{' '.join(asked)}: no answer within {ANSWER_SECONDS:.0f} s") from error
    found = dict(re.findall(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)", done.stdout))  # a path may have spaces
    if "JobState" in found:
        return found
    if "Invalid job id" in done.stderr:
        return None
    raise NoAnswerError(f"{' '.join(asked)}: {done.stderr.strip() or done.stdout.strip() or 'no output'}")


def _tail(path: Path) -> Iterator[list[str]]:
    """Yield the complete lines that were appended to a file since the last time; the file may not exist yet."""
    position = 0
    while True:
        lines: list[str] = []
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                whole, newline, _ = file.read().rpartition(b"\n")
            position += len(whole) + len(newline)
            lines = (whole + newline).decode(errors="replace").splitlines()
        yield lines


def _run(*command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise InputError(f"{command[0]} refuses: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
