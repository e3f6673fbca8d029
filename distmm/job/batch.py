"""The batch job that a run belongs to, and the command that goes on with its product."""

from __future__ import annotations

import os
import shlex

from distmm.job.folder import Json
from distmm.telemetry.batch_job import batch_job

# Variable of the environment in which `distmm submit` tells a batch job the command that submitted it.
SUBMITTED_BY = "DISTMM_SUBMITTED_BY"


def facts() -> Json:
    """Return what the entry of a run says of this process's batch job."""
    return {"batch_job": batch_job(), "submitted_by": os.environ.get(SUBMITTED_BY, "")}


def continuation(run: Json, out: str) -> str:
    """Return the command that goes on with the job `out`, whose last run was `run`.

    After a run in a Slurm job it submits another one: `distmm resume` would compute on the login node.
    """
    job = str(run.get("batch_job", ""))
    if not job.startswith("Slurm"):
        return f"distmm resume {shlex.quote(out)}"
    return f"{run.get('submitted_by') or 'distmm submit JOB.toml --cluster slurm'} (the last run was {job})"
