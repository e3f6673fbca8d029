"""The name of the batch job that a process belongs to, for reports and manifests."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def batch_job(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of this process's Slurm job or Kubernetes pod, as in ``Slurm job 7``; else an empty text."""
    if job := environ.get("SLURM_JOB_ID"):
        array = environ.get("SLURM_ARRAY_JOB_ID")
        element = f" ({array}_{environ.get('SLURM_ARRAY_TASK_ID', '')})" if array else ""
        restart = environ.get("SLURM_RESTART_COUNT", "0")
        return f"Slurm job {job}{element}" + (f", restart {restart}" if restart != "0" else "")
    if "KUBERNETES_SERVICE_HOST" in environ:
        return f"Kubernetes pod {environ.get('HOSTNAME') or socket.gethostname()}"
    return ""
