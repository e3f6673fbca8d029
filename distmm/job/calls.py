"""The calls of users: `multiply` begins a job or goes on with it, `resume` needs nothing but the path of C."""

from __future__ import annotations

import os
from typing import Any

from distributed import Client

from distmm import config
from distmm.api.scalars import check_flags
from distmm.api.verify import check_possible
from distmm.clusters import cluster
from distmm.errors import InputError
from distmm.job.certificate import holds
from distmm.job.commit import refuse_twice, same_call, settle
from distmm.job.folder import Folder, Json, read_json
from distmm.job.job import Announce, Job, Progress
from distmm.job.json_forms import CERTIFICATE
from distmm.job.manifest import read_manifest
from distmm.job.spec import Check, Spec
from distmm.job.stop import Stop
from distmm.job.summary import Summary
from distmm.planning.plan import Plan
from distmm.planning.precision import Precision
from distmm.storage import is_there, is_url
from distmm.telemetry.record import Figures

__all__ = ["begin", "finished", "multiply", "resume"]

Path = str | os.PathLike[str]


def multiply(
    a: Any,
    b: Any,
    out: Path,
    c: Any = None,
    *,
    client: Client | None = None,
    transa: bool = False,
    transb: bool = False,
    alpha: complex = 1,
    beta: complex = 0,
    dtype: Any = None,
    precision: Precision | None = None,
    kernel: str | None = None,
    reproducible: bool | None = None,
    device: cluster.Device | None = None,
    blocks: tuple[int, int, int] | None = None,
    plan: Plan | str | None = None,
    overwrite: bool = False,
    check: Check | None = None,
    seed: int | None = None,
    stop: Stop | None = None,
    announce: Announce | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Multiply matrices on disk into a third: ``C = alpha * op(A) @ op(B) + beta * C``, and go on where a job stopped.

    All that can be refused is refused before any work. Blocks of C are written as they are made, each with a marker,
    into a folder beside C (``C.zarr.job``); C gets its name when it is complete and right. A job that was stopped or
    killed goes on with the missing blocks when the same call is made again, or `resume` is.

    Parameters
    ----------
    a, b : str, path, or array
        Matrices of shape (m, k) and (k, n): what `distmm.storage.open_matrix` opens, or arrays as in `distmm.matmul`.
    out : str or path
        Where C (m, n) goes; see `distmm.storage.create_output`. A Zarr array may go to an object store, by its URL
        (``s3://bucket/C.zarr``, ``gs://``, ``az://``).
    c : str, path, or array, optional
        The C that is added, times beta; by default the one that `out` is, which the result then replaces. The same call
        made again is refused as long as `out` is its result: with `overwrite` it adds the product once more.
    client : distributed.Client, optional
        The workers must see the same paths. By default Dask's current client, else a local cluster for this call.
    transa, transb : bool
        Use the transpose of A or B, without a copy.
    alpha, beta : scalars
    dtype : dtype, optional
        Of C; by default NumPy's result type. The product is computed in the wider of the two types, and cast once.
    precision, kernel, reproducible, device, blocks, plan
        As in `distmm.matmul`. A job that goes on takes another plan, for another cluster, if it has the same blocks.
    overwrite : bool
        Replace an existing C, and an unfinished job on it. What is there stays until C is complete; in an
        object store it goes when the first block is to be written.
    check : {"freivalds", "full", "none"}, optional
        "freivalds", the default if Dask's configuration has no other as ``distmm.check``: each block is compared with
        sketches of A and B as it is made, and made again on another worker where they disagree; "full": all elements at
        the end, for small sizes.
    seed : int, optional
        Of the random vectors of the check; chosen at random by default, and kept in the certificate.
    stop : Stop, optional
        Asks the job to stop before its end.
    announce : callable, optional
        Called with the plan, and the operations that are left to do, before work starts.
    progress : callable, optional
        Called with how far the job is (`distmm.telemetry.record.Figures`), twice a second.

    Returns
    -------
    Summary

    Raises
    ------
    InputError, DoesNotFitError
        Before any work; also for data that turn out to be unreadable, and a full disk: finished blocks are kept.
    Stopped
        Where `stop` asked for it, or the cluster was lost; finished blocks are kept.
    WrongResultError
        If a block stays wrong on several workers.

    Examples
    --------
    >>> distmm.multiply("A.zarr", "B.zarr", "C.zarr", precision="high")  # doctest: +SKIP
    """
    precision, kernel = config.chosen("precision", precision), config.chosen("kernel", kernel)
    promised = config.chosen("reproducible", reproducible)
    check_flags(reproducible=promised)
    device, check = config.chosen("device", device), config.chosen("check", check)
    folder = Folder.of(out)
    if is_url(folder.target) and (beta != 0 and c is None):
        raise InputError(
            f"{folder.target}: beta adds to the C that is there, and in an object store that C goes before the new one "
            f"comes: give another name for the result, and this one as c"
        )
    ended = settle(folder, anew=overwrite)
    spec = Spec.of(
        a, b, out if beta != 0 and c is None else c, transa=transa, transb=transb, alpha=alpha, beta=beta, dtype=dtype,
        precision=precision, kernel=kernel, check=check, reproducible=promised,
    )  # fmt: skip
    if check == "full" and beta != 0:
        raise InputError("a full check knows no beta: use check freivalds, or none")
    if is_url(folder.target):
        _refuse_in_store(folder, spec)
    job = Job(
        folder, os.fspath(out), spec, spec.files(), overwrite or (beta != 0 and c is None), blocks, seed,
        None if plan is None else str(plan),
    )  # fmt: skip
    return begin(job, ended, overwrite, client, device, stop, announce, progress)


def begin(
    job: Job, ended: Json | None, overwrite: bool, client: Client | None, device: cluster.Device, stop: Stop | None,
    announce: Announce | None, progress: Progress | None,
) -> Summary:  # fmt: skip
    """Begin a job or go on with it, unless it is complete; `ended` is the certificate of one that was ended now."""
    folder, spec = job.folder, job.spec
    check_possible(spec.check, spec.problem)
    if ended is not None and same_call(folder, ended, spec):
        if not overwrite:
            return Summary.of_complete(folder, ended)
        if spec.reads(folder.target):
            refuse_twice(folder, spec)
    spec.result.refuse(job.out, job.overwrite)
    if not overwrite and not folder.exists():
        there = finished(folder, spec)
        if there is not None:
            return there
    return job.run(client, device, stop or Stop(), announce, progress or _unseen, anew=overwrite)


def resume(
    out: Path,
    *,
    client: Client | None = None,
    device: cluster.Device | None = None,
    stop: Stop | None = None,
    announce: Announce | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Continue an unfinished job: compute the blocks of C, or the block rows of a reduced product, that are missing.

    What is computed, from which inputs and how it is cut is read from the files beside C.

    Parameters
    ----------
    out : str or path
        Name of C, as it was given to `multiply`, or of the result of `distmm.job.topk` or `distmm.job.threshold`.
    client, device, stop, announce, progress
        As in `multiply`.

    Returns
    -------
    Summary
        Of this run; of the whole job where nothing was missing.

    Raises
    ------
    InputError
        If there is no job, or A or B has changed since it began; else as `multiply`.
    Stopped
        As in `multiply`.
    WrongResultError
        As in `multiply`.

    Examples
    --------
    >>> distmm.resume("C.zarr")  # doctest: +SKIP
    """
    device = config.chosen("device", device)
    folder = Folder.of(out)
    ended = settle(folder, anew=False)
    if ended is not None:
        return Summary.of_complete(folder, ended)
    if not folder.exists():
        if folder.store.exists(folder.certificate) and is_there(folder.target):
            return Summary.of_complete(folder, read_json(folder.certificate, CERTIFICATE))
        raise InputError(f"{folder.path}: there is no unfinished job for this output; begin one with distmm multiply")
    manifest = read_manifest(folder)
    spec = Spec.from_json(manifest["spec"])
    job = Job(folder, manifest["output"]["name"], spec, spec.files(), manifest["output"]["overwrite"], None, None)
    return job.run(client, device, stop or Stop(), announce, progress or _unseen, anew=False)


def _refuse_in_store(folder: Folder, spec: Spec) -> None:
    """Refuse what cannot be done where a C is removed before the one that replaces it is complete."""
    names = spec.reads(folder.target)
    if names:
        raise InputError(
            f"{folder.target}: the product reads {' and '.join(names)} from there, and in an object store that goes "
            f"before the new C comes: give another name for the result"
        )
    if spec.check == "full":
        raise InputError(
            f"{folder.target}: a full check keeps a wrong C under another name, and in an object store names cannot be "
            f"changed: use check freivalds, and distmm verify A B C --check full when C is complete"
        )


def finished(folder: Folder, spec: Spec) -> Summary | None:
    """Return the summary if C is complete, and of just this product: a job that is sent again has no more to do.

    Raises
    ------
    InputError
        If the product reads C, and C is its result already.
    """
    if not (folder.store.exists(folder.certificate) and is_there(folder.target)):
        return None
    content = read_json(folder.certificate, CERTIFICATE)
    if not same_call(folder, content, spec):
        return None
    if spec.reads(folder.target):
        if not holds(folder.target, content):
            return None
        refuse_twice(folder, spec)
    return Summary.of_complete(folder, content)


def _unseen(figures: Figures) -> None:
    """Report to nobody."""
