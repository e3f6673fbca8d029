"""The public functions `multiply`, which begins or continues a job, and `resume`, which needs only the path of C."""

from __future__ import annotations

import os
from typing import Any

from distributed import Client

from distmm import config
from distmm.clusters import cluster
from distmm.errors import InputError
from distmm.job.certificate import holds
from distmm.job.commit import refuse_twice, same_call, settle
from distmm.job.folder import Folder, Json
from distmm.job.job import Announce, Job, Progress
from distmm.job.records import read_certificate, read_manifest
from distmm.job.spec import Check, Spec
from distmm.job.stop import Stop
from distmm.job.summary import Summary
from distmm.planning.plan import Plan
from distmm.planning.precision import Precision
from distmm.product.choices import Choices
from distmm.product.scalars import check_scalars, checked_seed
from distmm.product.verification import check_possible
from distmm.storage import is_there, is_url
from distmm.telemetry.figures import Figures

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
    """Multiply matrices on disk, ``C = alpha * op(A) @ op(B) + beta * C``, as a job that can be resumed.

    Invalid calls are refused before any work. Finished blocks of C are written to a folder next to C (``C.zarr.job``),
    each with a marker. C gets its name when it is complete and checked. If the job was stopped or killed, repeat the
    call, or call `resume`: the job continues with the missing blocks.

    Parameters
    ----------
    a, b : str, path, or array
        Matrices of shape (m, k) and (k, n): paths as in `distmm.storage.open_matrix`, or arrays as in `distmm.matmul`.
    out : str or path
        Path of C, of shape (m, n), as in `distmm.storage.create_output`. A Zarr array may be in an object store, given
        by its URL (``s3://bucket/C.zarr``, ``gs://``, ``az://``).
    c : str, path, or array, optional
        The C0 that is multiplied by beta and added. By default it is read from `out`, and the result replaces it. A
        repetition of such a call is refused if `out` is already its result. With `overwrite` it adds the product once
        more.
    client : distributed.Client, optional
        Cluster to use. Its workers must have access to the same paths. By default as in `distmm.matmul`, or else a
        local cluster for this call.
    transa, transb : bool
        Use the transpose of A or B, without a copy.
    alpha, beta : scalars
        Factors of the product and of C0. With a beta of 0, C0 is not read.
    dtype : dtype, optional
        Type of C, which is written in native byte order. By default NumPy's result type. The product is computed in the
        wider of these two types, and cast once.
    precision, kernel, reproducible, device, blocks, plan
        As in `distmm.matmul`. A job may be continued with another plan, for another cluster, with the same blocks.
    overwrite : bool
        Replace an existing C, and discard an unfinished job of it. The existing C is kept until the new one is
        complete. In an object store it is removed before the first block is written.
    check : {"freivalds", "full", "none"}, optional
        "freivalds": compare each block with sketches of A and B before it is written, and compute a wrong block again
        on another worker. "full": compare all elements at the end, for small sizes. By default the value of
        ``distmm.check`` in Dask's configuration, which is "freivalds" unless it is changed.
    seed : int, optional
        Seed of the random vectors of the check. By default a random one. The certificate has it.
    stop : Stop, optional
        A request to stop the job before its end, such as a deadline.
    announce : callable, optional
        Called before work starts, with the plan and the number of operations that remain.
    progress : callable, optional
        Called twice a second with the progress of the job (`distmm.telemetry.figures.Figures`).

    Returns
    -------
    Summary

    Raises
    ------
    InputError, DoesNotFitError
        Before any work. InputError is also raised later for unreadable data and a full disk; finished blocks are kept.
    Stopped
        If `stop` requested it, or the cluster was lost. Finished blocks are kept.
    WrongResultError
        If a block is wrong on several workers.

    Examples
    --------
    >>> distmm.multiply("A.zarr", "B.zarr", "C.zarr", precision="high")  # doctest: +SKIP
    """
    check_scalars(alpha=alpha, beta=beta)
    seed = None if seed is None else checked_seed(seed)
    choices = Choices.of(
        precision=precision, kernel=kernel, device=device, blocks=blocks, plan=plan, reproducible=reproducible
    )
    check = config.chosen("check", check)
    folder = Folder.of(out)
    if is_url(folder.target) and (beta != 0 and c is None):
        raise InputError(
            f"{folder.target}: beta adds the existing C, but in an object store the existing C is removed before the "
            f"new one is written: give another name for the result, and this one as c"
        )
    ended = settle(folder, anew=overwrite)
    spec = Spec.of(
        a, b, out if beta != 0 and c is None else c, transa=transa, transb=transb, alpha=alpha, beta=beta, dtype=dtype,
        precision=choices.precision, kernel=choices.kernel, check=check, reproducible=choices.reproducible,
    )  # fmt: skip
    if check == "full" and beta != 0:
        raise InputError(f"check is full and beta is {beta}: a full check does not support beta; use freivalds or none")
    if is_url(folder.target) and check == "full":
        raise InputError(
            f"{folder.target}: a full check renames a wrong C, but an object store has no rename: use check "
            f"freivalds, and distmm verify A B C --check full when C is complete"
        )
    job = Job(
        folder, os.fspath(out), spec, spec.files(), overwrite or (beta != 0 and c is None), blocks, seed,
        None if plan is None else str(plan),
    )  # fmt: skip
    return begin(job, ended, overwrite, client, choices.device, stop, announce, progress)


def begin(
    job: Job, ended: Json | None, overwrite: bool, client: Client | None, device: cluster.Device, stop: Stop | None,
    announce: Announce | None, progress: Progress | None,
) -> Summary:  # fmt: skip
    """Begin or continue a job, unless it is complete. `ended` is the certificate of a job that was just ended."""
    folder, spec = job.folder, job.spec
    check_possible(spec.check, spec.problem)
    if ended is not None and same_call(folder, ended, spec):
        if not overwrite:
            return Summary.of_complete(folder, ended)
        if spec.reads(folder.target):
            refuse_twice(folder)
    if not overwrite and not folder.exists():
        there = finished(folder, spec, client)
        if there is not None:
            return there
    return job.run(client, device, stop or Stop(), announce, progress or _no_report, anew=overwrite)


def resume(
    out: Path,
    *,
    client: Client | None = None,
    device: cluster.Device | None = None,
    stop: Stop | None = None,
    announce: Announce | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Continue an unfinished job: compute the missing blocks of C, or the missing block rows of a reduced product.

    The files next to C say what is computed, from which inputs, and in which blocks.

    Parameters
    ----------
    out : str or path
        Name of C, as it was given to `multiply`, or of the result of `distmm.job.topk` or `distmm.job.threshold`.
    client, device, stop, announce, progress
        As in `multiply`.

    Returns
    -------
    Summary
        Of this run, or of the whole job if nothing was missing.

    Raises
    ------
    InputError
        As in `multiply`. Also if there is no job, or if A or B has changed since the job began.
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
        content = read_certificate(folder)
        if content is not None and is_there(folder.target):
            if not holds(folder.target, content, client):
                raise _changed(folder)
            return Summary.of_complete(folder, content)
        raise InputError(f"{folder.path}: there is no unfinished job for this output; begin one with distmm multiply")
    manifest = read_manifest(folder)
    spec = Spec.from_json(manifest["spec"])
    job = Job(folder, manifest["output"]["name"], spec, spec.files(), manifest["output"]["overwrite"], None, None)
    return job.run(client, device, stop or Stop(), announce, progress or _no_report, anew=False)


def finished(folder: Folder, spec: Spec, client: Client | None = None) -> Summary | None:
    """Return the summary of a complete C that is the result of the same call. None otherwise.

    Raises
    ------
    InputError
        If the product reads C, and C is already its result. If it does not read C, and C has changed since.
    """
    content = read_certificate(folder)
    if content is None or not is_there(folder.target) or not same_call(folder, content, spec):
        return None
    right, adds = holds(folder.target, content, client), bool(spec.reads(folder.target))
    if right and adds:
        refuse_twice(folder)
    if not right and not adds:
        raise _changed(folder)
    return Summary.of_complete(folder, content) if right else None


def _changed(folder: Folder) -> InputError:
    return InputError(
        f"{folder.target}: has changed since the job that {folder.certificate} describes completed it: restore it, or "
        f"compute it again with distmm multiply --overwrite (overwrite=True)"
    )


def _no_report(figures: Figures) -> None:
    """Do nothing: the default of `progress`."""
