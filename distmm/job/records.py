"""Reads the manifest and the certificate of a job, and says by which command it goes on, without Dask and Zarr.

So `distmm.job.job_status` is fast to start.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex

from distmm.errors import InputError
from distmm.job.folder import Folder, Json, read_json
from distmm.job.forms import Certificate, Manifest
from distmm.storage import file_of, is_url, locate
from distmm.telemetry.batch_job import batch_job

# Version of the format of manifest and certificate.
FORMAT = 4


def read_manifest(folder: Folder) -> Json:
    """Read the manifest of a job.

    Raises
    ------
    InputError
        For another format, and for a manifest that was changed after distmm had written it.
    """
    manifest = read_json(folder.manifest)
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{folder.manifest}: has format {manifest.get('format')}, but this version of distmm reads {FORMAT}: "
            f"finish the job with the version that began it, or start over with --overwrite"
        )
    manifest = read_json(folder.manifest, Manifest)
    # The id becomes part of a path. The hash is no protection against a forged manifest, so the form of the id is
    # checked, too: it must not lead to another folder.
    if manifest.get("sha256") != digest(manifest) or not re.fullmatch("[0-9a-f]{16}", str(manifest.get("id"))):
        raise InputError(
            f"{folder.manifest}: has been changed since distmm wrote it: restore the original, or start over with "
            f"--overwrite"
        )
    return relocated(manifest, folder.target)


def digest(manifest: Json) -> str:
    """Return the hash that a manifest has of itself."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_certificate(folder: Folder, path: str | None = None) -> Json | None:
    """Return the certificate next to C, or the one at `path`, with the paths that hold now. None if there is none.

    Raises
    ------
    InputError
        If it is damaged.
    """
    path = path or folder.certificate
    return relocated(read_json(path, Certificate), folder.target) if folder.store.exists(path) else None


def complete_job(folder: Folder, overwrite: bool) -> Folder | None:
    """Return the names of a job that is complete (it has a pending certificate), but has not ended. None if none.

    With `overwrite`, a manifest that cannot be read counts as none.
    """
    if not folder.exists():
        return None
    try:
        job = folder.of_job(read_manifest(folder)["id"])
    except InputError:
        if overwrite:
            return None
        raise
    return job if job.store.exists(job.pending_certificate) else None


def relocated(content: Json, target: str) -> Json:
    """Return a manifest or certificate with the paths that hold now.

    Parameters
    ----------
    content : dict
    target : str
        Path or URL that C has now.

    Returns
    -------
    dict
        C has the path `target`. A, B or C0 that is not at its old path, but at the same place relative to C, has this
        path.
    """
    named = content["output"]["name"]
    file, dataset = (named, None) if is_url(named) else locate(named)
    if file == target:
        return content
    spec = dict(content["spec"])
    for name in ("A", "B", "C0"):
        path = (spec[name] or {}).get("path")
        if path is not None and not any(map(is_url, (path, file, target))) and not os.path.exists(file_of(path)):
            beside = os.path.relpath(path, os.path.dirname(file))
            now = os.path.normpath(os.path.join(os.path.dirname(target), beside))
            if os.path.exists(file_of(now)):
                spec[name] = {**spec[name], "path": now}
    named = target if dataset is None else f"{target}:{dataset}"
    return {**content, "spec": spec, "output": {**content["output"], "name": named}}


# Variable of the environment in which `distmm submit` tells a batch job the command that submitted it.
SUBMITTED_BY = "DISTMM_SUBMITTED_BY"


def batch_facts() -> Json:
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
