"""The manifest of a job: specification, output, blocks, and when each run of the job began and ended.

A run that ends with an error records its end in the manifest. The run that completes C records it in the certificate.
A run that is killed cannot record its end. The next run then records the time of the last finished block that it finds:
the killed run lasted at least that long.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from distributed import Client

from distmm.all_workers import everywhere
from distmm.errors import DistmmError, DoesNotFitError, InputError, Stopped
from distmm.job.folder import Folder, Json, write_json
from distmm.job.inputs import stamps
from distmm.job.lock import Lock
from distmm.job.records import FORMAT, batch_facts, digest, read_manifest
from distmm.job.spec import Spec, differences
from distmm.job.stop import Stop
from distmm.planning.plan import Plan
from distmm.planning.schedule import parse
from distmm.storage import locate
from distmm.versions import installed
from distmm.worker import gpu

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
        "seed": secrets.randbits(32) if seed is None else int(seed),
        "missing": {x.path: what for x in spec.inputs if (what := x.missing()) is not None},
        "rejected": 0,
        "stamps": stamps(spec),
        "runs": [],
    }


def run_of(plan: Plan, client: Client, deadline: float | None) -> Json:
    """Describe a run that begins: time, deadline, host, versions, plan, and the host and device of each worker."""
    return {
        "started": time.time(),
        "deadline": deadline,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        **batch_facts(),
        "versions": installed(PACKAGES),
        "device": plan.cluster.device,
        "workers": plan.cluster.workers,
        "plan": str(plan),
        "devices": sorted(set(everywhere(client, _device, plan.cluster.device).values())),
    }


def write_manifest(folder: Folder, manifest: Json) -> None:
    """Write the manifest, with its own hash."""
    manifest["sha256"] = digest(manifest)
    write_json(folder.manifest, manifest, os.path.join(folder.path, folder.owner))


def refuse_changes(folder: Folder, spec: Spec) -> None:
    """Refuse to resume a job whose inputs or options have changed.

    Raises
    ------
    InputError
        With the old and the new values.
    """
    manifest, blocks, plan = read_manifest(folder), spec.choices.blocks, spec.choices.plan
    changed = list(differences(manifest["spec"], spec.json()))
    if blocks is not None and list(blocks) not in (manifest["blocks"], manifest.get("blocks_given")):
        changed.append(f"blocks were {manifest['blocks']}, are {list(blocks)}")
    # Grid, waves and lookahead may change. The bits of C depend only on block edges, and on how k is split into layers.
    shape = None if plan is None else parse(str(plan), spec.problem)
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


def add_run(manifest: Json, run: Json, markers: Iterable[Json]) -> None:
    """Append a new run to a manifest, and complete the entry of a run before it that was killed.

    Parameters
    ----------
    manifest : dict
    run : dict
        What `distmm.job.manifest.run_of` returns.
    markers : iterable of dict
        Markers of the blocks that earlier runs have finished. Their `time` is in seconds since the epoch, by the clock
        of the worker that wrote the block.
    """
    times = [marker["time"] for marker in markers]
    if manifest["runs"] and "ended" not in (killed := manifest["runs"][-1]):
        killed["last_block"] = max((at for at in times if at >= killed["started"]), default=None)
    manifest["runs"].append({**run, "kept": len(times)})


@contextmanager
def recorded_end(folder: Folder, lock: Lock, stop: Stop) -> Iterator[None]:
    """Record the end of the last run of a job in its manifest if the ``with`` block raises an error.

    The error is recorded, too, unless the run was stopped and can go on as it is. So is whether a threshold kept too
    many elements ("over_limit"), because then each further run would fail, too. A manifest that is gone, or is not what
    distmm wrote, stays as it is.
    """
    try:
        yield
    except BaseException as error:
        if not stop.at_once:  # a second signal asks to end without waiting for writes
            with suppress(InputError, OSError):  # lock, disk or manifest are lost: the error of the run says so
                Lock.check(folder.path, lock.token)
                if folder.exists():
                    manifest = read_manifest(folder)
                    run = manifest["runs"][-1]
                    run["ended"] = time.time()
                    if isinstance(error, Exception) and not isinstance(error, Stopped):
                        kind = "" if isinstance(error, DistmmError) else f"{type(error).__name__}: "
                        run["error"] = f"{kind}{error}"
                        run["over_limit"] = isinstance(error, DoesNotFitError)  # others were made `InputError`
                    write_manifest(folder, manifest)
        raise
