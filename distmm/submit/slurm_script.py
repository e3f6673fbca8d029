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
