"""The batch script of a job for Slurm: one allocation, in which srun starts scheduler, workers and client."""

from __future__ import annotations

import sys
from pathlib import Path

from dask.utils import parse_bytes

from distmm import templates
from distmm.submit import dashboard_access, tls
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
    run, workers, gpu = job.run, job.workers, job.workers.device == "gpu"
    certificates = tls.certificate_paths(run.tls, run.folder, run.name)
    # The walltime in minutes, rounded up, which is Slurm's unit.
    minutes, log = -(-job.seconds("walltime") // 60), f"{run.folder.replace('%', '%%')}/{run.name}-%j"
    return templates.filled(
        Path(__file__).with_name("slurm_script.sh"),
        run=run,
        workers=workers,
        slurm=job.slurm,
        gpu=gpu,
        python=python,
        gres=job.slurm.gres or (f"gpu:{workers.per_node}" if gpu else ""),
        megabytes=parse_bytes(workers.memory) // 2**20,
        minutes=minutes,
        grace=job.seconds("grace"),
        output=_quoted(f"{log}.log"),
        error=_quoted(f"{log}.slurm"),
        variables={
            **dashboard_access.environment(run.dashboard),
            **tls.environment(certificates),
            **(gpu_worker_setup.ENVIRONMENT if gpu else {}),
        },
        worker_options=gpu_worker_setup.worker_options() if gpu else ["--nworkers", str(workers.per_node)],
        patience=PATIENCE_SECONDS,
        command=job.command(),
        deadline=60 * minutes - job.seconds("grace"),
        overwrite=job.overwrite,  # only the first start discards finished blocks; a restart resumes
        resumable=RESUMABLE,
        killed=KILLED,
        terminated=TERMINATED,
    )


def _quoted(text: str) -> str:
    """Quote a value for sbatch, which splits lines at spaces and supports double quotes."""
    return text if text.isascii() and all(c.isalnum() or c in "_.,:+=@%/*&|()[]-" for c in text) else f'"{text}"'
