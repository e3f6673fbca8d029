"""Reads the manifest and the certificate of a job, its progress, and by which command it goes on.

It needs only the files next to C, so any machine with access to them can show the progress. Neither Dask nor Zarr is
imported, so `status` is fast to start.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shlex
import time
from dataclasses import dataclass

from distmm import units
from distmm.errors import InputError
from distmm.job.folder import Folder, Json, read_json
from distmm.job.forms import Certificate, Manifest
from distmm.job.lock import holder
from distmm.planning.blocks import even_edges
from distmm.storage import file_of, is_there, is_url, locate, stamp_of
from distmm.storage.paths import DATASET
from distmm.telemetry.batch_job import batch_job
from distmm.telemetry.time_left import Pace

# Version of the format of manifest and certificate.
FORMAT = 5


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
    return _relocated(manifest, folder)


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
    return _relocated(read_json(path, Certificate), folder) if folder.store.exists(path) else None


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


def _relocated(content: Json, folder: Folder) -> Json:
    """Return a manifest or certificate with the paths that hold now.

    C has the path that it has now. A, B or C0 that is not at its old path, but at the same place relative to C, has
    this path.

    Raises
    ------
    InputError
        If the user named another dataset of the HDF5 file than that of the job.
    """
    named, target = content["output"]["name"], folder.target
    file, dataset = (named, None) if is_url(named) else locate(named)
    if folder.dataset not in (None, dataset or DATASET):
        start_over = "" if is_there(target) else ", or --overwrite (overwrite=True) to start over"
        raise InputError(
            f"{target}: the job of this file writes the dataset {dataset or DATASET}, not {folder.dataset}: give "
            f"{target}:{dataset or DATASET} or another file, as distmm writes one matrix to a file{start_over}"
        )
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


def names_of_arrays(spec: Json) -> list[str]:
    """Return which operands of a job were arrays of a Python program, and not files, by `Spec.json`."""
    return [name for name in ("A", "B", "C0") if spec[name] is not None and "path" not in spec[name]]


def continuation(run: Json, out: str, arrays: bool = False) -> str:
    """Return the command that goes on with the job `out`, whose last run was `run`.

    After a run in a Slurm job it submits another one: `distmm resume` would compute on the login node. If operands are
    `arrays` of a program, no command can read them.
    """
    if arrays:
        return "the same call in the Python program that has the arrays"
    job = str(run.get("batch_job", ""))
    if not job.startswith("Slurm"):
        return f"distmm resume {shlex.quote(out)}"
    return f"{run.get('submitted_by') or 'distmm submit JOB.toml --cluster slurm'} (the last run was {job})"


@dataclass(frozen=True)
class Status:
    """The progress of a job.

    Attributes
    ----------
    path : str
        Path of C.
    state : {"running", "stopped", "failed", "complete", "changed", "missing"}
        A job whose process has died is stopped. One whose last run ended with an error has failed. If C was complete,
        and its files were written or copied since, it is changed, and `distmm verify` says whether it is right. If they
        were removed or renamed, it is missing.
    done, total : int
        Number of finished blocks of C (or block rows), and of all blocks.
    runs, rejected : int
        Number of runs, and number of blocks that failed their check and were computed again.
    owner : str or None
        Process and host of a running job.
    seconds_left : float or None
        Predicted from the rate of this run's last blocks. None if the job is not running, or has finished no block yet.
    certificate : str or None
        Path of the certificate of a complete job.
    report : str or None
        Path of the report of the last run that ended.
    error : str or None
        Error of the last run of a job that has failed.
    ended : float or None
        End of the last run of a job that is stopped or failed, in seconds since the epoch. None if it was killed.
    continue_with : str or None
        Command, or call of a program, that goes on with a job that is stopped or failed. None if `error` says what has
        to change before.
    """

    path: str
    state: str
    done: int
    total: int
    runs: int
    rejected: int
    owner: str | None = None
    seconds_left: float | None = None
    certificate: str | None = None
    report: str | None = None
    error: str | None = None
    ended: float | None = None
    continue_with: str | None = None

    def rows(self) -> list[tuple[str, str]]:
        """Return it as a table of label and value."""
        rows = [
            ("state", self.state if self.owner is None else f"{self.state}, {self.owner}"),
            ("blocks", f"{self.done} of {self.total} ({100 * self.done / max(1, self.total):.0f} %)"),
            ("runs", f"{self.runs}, {self.rejected} blocks computed again"),
        ]
        path, left = shlex.quote(self.path), self.seconds_left
        more = {
            "left": None if left is None else f"about {units.duration(left)}",
            "certificate": self.certificate,
            "report": self.report,
            "error": self.error,
            "ended": None if self.ended is None else units.date(self.ended),
            "continue with": self.continue_with,
            "check with": f"distmm verify {path}" if self.state == "changed" else None,
            "compute again with": f"the same command, with -o {path}" if self.state == "missing" else None,
        }
        return rows + [(label, value) for label, value in more.items() if value is not None]


def status(out: str | os.PathLike[str]) -> Status:
    """Return the progress of a job, from the files next to its output.

    Parameters
    ----------
    out : str or path
        Name of C, as it was given to `multiply`.

    Returns
    -------
    Status
        State, finished blocks and time left. It needs no cluster.

    Raises
    ------
    InputError
        If there is neither an unfinished job nor a certificate.

    Examples
    --------
    >>> distmm.status("C.zarr").state  # doctest: +SKIP
    'complete'
    """
    folder = Folder.of(out)
    if folder.exists():
        manifest = read_manifest(folder)
        markers = folder.of_job(manifest["id"]).markers()
        (m, n), (edge_m, _, edge_n) = manifest["output"]["shape"], manifest["blocks"]
        reduced = manifest["spec"]["reduction"] is not None  # then units are whole block rows
        total = len(even_edges(m, edge_m)) * (1 if reduced else len(even_edges(n, edge_n)))
        counts = len(markers), total, len(manifest["runs"]), manifest["rejected"]
        owner = holder(folder.path)
        if owner is None or owner.stale:
            last = manifest["runs"][-1] if manifest["runs"] else {}
            error, state = last.get("error"), "failed" if "error" in last else "stopped"
            arrays = bool(names_of_arrays(manifest["spec"]))
            again = None if last.get("over_limit") else continuation(last, folder.target, arrays)
            return Status(
                folder.target, state, *counts, report=_report(folder), error=error, ended=last.get("ended"),
                continue_with=again,
            )  # fmt: skip
        pace = Pace(manifest["runs"][-1]["started"])
        for written in sorted(marker["time"] for marker in markers.values()):
            if written >= pace.times[0]:
                pace.add(written, 1)
        left = pace.left(time.time(), total - len(markers))
        process = f"process {owner.pid} on {owner.host}"
        return Status(folder.target, "running", *counts, process, left if math.isfinite(left) else None)
    content = read_certificate(folder)
    if content is not None:
        done, state = len(content["done"]), "complete"
        if not is_there(folder.target):
            state = "missing"
        elif "stamp" in content and content["stamp"] != stamp_of(folder.target):
            state = "changed"
        counts = done, done, len(content["runs"]), content["rejected"]
        return Status(folder.target, state, *counts, certificate=folder.certificate, report=_report(folder))
    raise InputError(
        f"{folder.target}: there is no unfinished job ({folder.path}) and no certificate ({folder.certificate}); check "
        f"the name, or begin with distmm multiply, topk or threshold"
    )


def _report(folder: Folder) -> str | None:
    return folder.report if folder.store.exists(folder.report) else None
