"""The public functions `multiply`, which begins or continues a job, and `resume`, which needs only the path of C."""

from __future__ import annotations

from typing import Any, Unpack

from distmm import config
from distmm.errors import InputError
from distmm.job.certificate import holds
from distmm.job.commit import changed, end_complete
from distmm.job.folder import Folder
from distmm.job.job import Job, JobKeywords, Path, RunKeywords, begin
from distmm.job.records import read_certificate, read_manifest
from distmm.job.spec import Spec
from distmm.job.summary import Summary
from distmm.product.choices import Choices, takes
from distmm.product.scalars import check_scalars
from distmm.storage import is_there, is_url, locate


@takes(JobKeywords)
def multiply(
    a: Any,
    b: Any,
    out: Path,
    c: Any = None,
    *,
    transa: bool = False,
    transb: bool = False,
    alpha: complex = 1,
    beta: complex = 0,
    dtype: Any = None,
    **keywords: Unpack[JobKeywords],
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
    transa, transb : bool
        Use the transpose of A or B, without a copy.
    alpha, beta : scalars
        Factors of the product and of C0. With a beta of 0, C0 is not read.
    dtype : dtype, optional
        Type of C, which is written in native byte order. By default NumPy's result type. The product is computed in the
        wider of these two types, and cast once.
    precision, kernel, reproducible, device
        As in `distmm.matmul`.
    client : distributed.Client, optional
        Cluster to use. Its workers must have access to the same paths. By default as in `distmm.matmul`, or else that
        of `connect`.
    blocks, plan
        As in `distmm.matmul`. A job may be continued with another plan, for another cluster, with the same blocks. The
        chunks of a Zarr C are these blocks. If they are small, the job computes several of them as one block.
    connect : callable, optional
        Returns a context manager of a client, such as that of `distmm.clusters.connect`, for this call. It is called
        without arguments, after the checks that need no cluster. By default a local cluster.
    stop : Stop, optional
        A request to stop the job before its end, such as a deadline.
    announce : callable, optional
        Called before work starts, with the plan and the number of operations that remain.
    progress : callable, optional
        Called twice a second with the progress of the job (`distmm.telemetry.figures.Figures`).
    overwrite : bool
        Replace an existing C, and discard an unfinished job of it. The existing C is kept until the new one is
        complete. In an object store it is removed before the first block is written.
    check : {"freivalds", "full", "none"}, optional
        "freivalds": compare each block with sketches of A and B before it is written, and compute a wrong block again
        on another worker. "full": compare all elements at the end, for small sizes. By default the value of
        ``distmm.check`` in Dask's configuration, which is "freivalds" unless it is changed.
    seed : int, optional
        Seed of the random vectors of the check. By default a random one. The certificate has it.

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
    adds = beta != 0 and c is None
    if adds and is_url(locate(out)[0]):
        raise InputError(
            f"{out}: beta adds the existing C, but in an object store the existing C is removed before the "
            f"new one is written: give another name for the result, and this one as c"
        )
    return begin(
        a, b, out if adds else c, out, keywords, adds=adds, transa=transa, transb=transb, alpha=alpha, beta=beta,
        dtype=dtype,
    )  # fmt: skip


@takes(RunKeywords)
def resume(
    out: Path,
    **keywords: Unpack[RunKeywords],
) -> Summary:
    """Continue an unfinished job: compute the missing blocks of C, or the missing block rows of a reduced product.

    The files next to C say what is computed, from which inputs, and in which blocks.

    Parameters
    ----------
    out : str or path
        Name of C, as it was given to `multiply`, or of the result of `distmm.job.topk` or `distmm.job.threshold`.
    connect, stop, announce, progress, client, device
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
    choices, folder = Choices(device=config.chosen("device", keywords.get("device"))), Folder.of(out)
    content = end_complete(folder, overwrite=False)
    if content is None and folder.exists():
        manifest = read_manifest(folder)
        spec, output = Spec.from_json(manifest["spec"], choices), manifest["output"]
        return Job(output["name"], spec, False, output["overwrite"], keywords).run(spec.files())
    if content is None:
        content = read_certificate(folder)
        if content is None or not is_there(folder.target):
            raise InputError(
                f"{folder.path}: there is no unfinished job; begin one with distmm multiply, topk or threshold"
            )
        if not holds(folder.target, content, keywords.get("client")):
            raise changed(folder)
    return Summary.of_complete(folder, content)
