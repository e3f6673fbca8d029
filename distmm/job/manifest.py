"""The manifest of a job: specification, output, blocks, and each of its runs."""

from __future__ import annotations

import os
import secrets
import socket
import time

from distributed import Client

from distmm.all_workers import everywhere
from distmm.errors import InputError
from distmm.job import batch
from distmm.job.folder import Folder, Json, write_json
from distmm.job.input_checksums import stamps
from distmm.job.records import FORMAT, digest, read_manifest
from distmm.job.spec import Spec, differences
from distmm.planning.plan import Plan
from distmm.planning.schedule import parse
from distmm.storage import locate
from distmm.versions import installed
from distmm.worker import gpu

__all__ = ["completed", "new_manifest", "refuse_changes", "run_of", "write_manifest"]

PACKAGES = ("distmm", "numpy", "dask", "distributed", "zarr", "numba", "numba-cuda", "cupy-cuda12x", "cupy-cuda13x")


def new_manifest(job: str, spec: Spec, out: str, overwrite: bool, plan: Plan, seed: int | None, draft: Json) -> Json:
    """Return the manifest of a job that has no runs yet. `draft` is the description of the draft of C."""
    file, dataset = locate(out)
    return {
        "format": FORMAT,
        "id": job,
        "spec": spec.json(),
        "output": {
            "name": file if dataset is None else f"{file}:{dataset}",
            "shape": [plan.problem.m, plan.problem.n],
            "dtype": spec.dtype.name,
            "overwrite": overwrite,
        },
        "draft": draft,
        "blocks": list(plan.block_shape),
        "layers": plan.grid.layers,
        "plan": str(plan),
        "seed": secrets.randbits(32) if seed is None else seed,
        "missing": {x.path: what for x in spec.inputs if (what := x.missing()) is not None},
        "rejected": 0,
        "stamps": stamps(spec),
        "runs": [],
    }


def run_of(plan: Plan, client: Client) -> Json:
    """Describe a run that begins: time, host, versions, plan, and the host and device of each worker."""
    return {
        "started": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        **batch.facts(),
        "versions": installed(PACKAGES),
        "device": plan.cluster.device,
        "workers": plan.cluster.workers,
        "plan": str(plan),
        "devices": sorted(set(everywhere(client, _device, plan.cluster.device).values())),
    }


def write_manifest(folder: Folder, manifest: Json) -> None:
    """Write the manifest, with its own hash."""
    manifest["sha256"] = digest(manifest)
    write_json(folder.manifest, manifest, os.path.join(folder.path, folder.owner, "manifest.draft"))


def completed(folder: Folder, anew: bool) -> Folder | None:
    """Return the names of a job that is complete (it has a pending certificate), but has not ended. None if none.

    With `anew`, a manifest that cannot be read counts as none.
    """
    if not folder.exists():
        return None
    try:
        job = folder.of_job(read_manifest(folder)["id"])
    except InputError:
        if anew:
            return None
        raise
    return job if job.store.exists(job.pending_certificate) else None


def refuse_changes(folder: Folder, spec: Spec, blocks: tuple[int, int, int] | None, plan: str | None) -> None:
    """Refuse to resume a job whose inputs or options have changed.

    Raises
    ------
    InputError
        With the old and the new values.
    """
    manifest = read_manifest(folder)
    changed = list(differences(manifest["spec"], {**spec.json(), **spec.files(again=True)}))
    if blocks is not None and list(blocks) != manifest["blocks"]:
        changed.append(f"blocks were {manifest['blocks']}, are {list(blocks)}")
    # Grid, waves and lookahead may change. The bits of C depend only on block edges, and on how k is split into layers.
    shape = None if plan is None else parse(plan, spec.problem)
    kept = [*manifest["blocks"], manifest["layers"]]
    if shape and (
        [*shape.blocking.largest, shape.grid.layers] != kept or (kept[3] > 1 and str(shape) != manifest["plan"])
    ):
        changed.append(f"plan was {manifest['plan']}, is {shape}")
    if changed:
        raise InputError(
            f"{folder.path}: has an unfinished job that differs: {'; '.join(changed)}; give the same arguments and "
            f"inputs as before, or start over with --overwrite (overwrite=True), which discards its finished blocks"
        )


def _device(kind: str) -> str:
    """Return this worker's host and device. Runs on workers."""
    return f"{socket.gethostname()}: {gpu.device_name() if kind == 'cuda' else 'CPU'}"
