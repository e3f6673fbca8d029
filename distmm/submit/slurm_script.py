"""The batch script of a job for Slurm: one allocation, in which srun starts scheduler, workers and client."""

from __future__ import annotations

import sys
from pathlib import Path

from dask.utils import parse_bytes

from distmm import templates, tls
from distmm.submit import dashboard_access
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

# Exit code of a job whose client was killed: 128 + SIGKILL, as in shells.
KILLED = 137


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
    run, workers, slurm, gpu = job.run, job.workers, job.slurm, job.workers.device == "gpu"
    certificates = tls.certificate_paths(run.tls, run.folder, run.name)
    folder = run.folder.replace("%", "%%")
    directives = {
        "job-name": run.name,
        "nodes": workers.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": workers.cpus,
        "mem": f"{parse_bytes(workers.memory) // 2**20}M",
        "gres": slurm.gres or (f"gpu:{workers.per_node}" if gpu else ""),
        "time": _minutes(job),
        "signal": f"B:USR1@{job.seconds('grace')}",
        "open-mode": "append",
        "output": f"{folder}/{run.name}-%j.log",
        "error": f"{folder}/{run.name}-%j.slurm",
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": slurm.constraint,
    }
    network = [workers.device, "tls" if run.tls != "none" else workers.transport, workers.interface]
    return templates.filled(
        Path(__file__).with_name("slurm_script.sh"),
        run=run,
        workers=workers,
        slurm=slurm,
        gpu=gpu,
        python=python,
        directives={name: _quoted(value) for name, value in directives.items()},
        variables={
            **dashboard_access.environment(run.dashboard),
            **tls.environment(certificates),
            **(gpu_worker_setup.ENVIRONMENT if gpu else {}),
        },
        threads=max(1, workers.cpus // workers.per_node),
        fabric=[word for word in network if word],
        gigabytes=f"{workers.memory_each / 1e9:.3g}",
        worker_options=gpu_worker_setup.worker_options() if gpu else ["--nworkers", str(workers.per_node)],
        patience=PATIENCE_SECONDS,
        command=job.command(),
        deadline=60 * _minutes(job) - job.seconds("grace"),
        overwrite=job.overwrite,  # only the first start discards finished blocks; a restart resumes
        resumable=RESUMABLE,
        killed=KILLED,
        terminated=TERMINATED,
    )


def _minutes(job: Job) -> int:
    """Return the walltime in minutes, rounded up, which is Slurm's unit."""
    return -(-job.seconds("walltime") // 60)


def _quoted(value: object) -> str:
    """Quote a value for sbatch, which splits lines at spaces and supports double quotes."""
    text = str(value)
    return text if text.isascii() and all(c.isalnum() or c in "_.,:+=@%/*&|()[]-" for c in text) else f'"{text}"'
