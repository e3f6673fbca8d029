"""Products of matrices on disk: checked, planned, computed block by block, verified as written, then named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import dask.array as da
import numpy as np
from distributed import Client, Future, Worker, futures_of

from distmm import array
from distmm.errors import InputError, WrongResultError
from distmm.plan import Plan
from distmm.runtime import cluster
from distmm.storage import Matrix, Target, create_output, open_matrix
from distmm.telemetry import units
from distmm.verify import FULL_FLOPS, Verdict, verify

__all__ = ["Check", "Summary", "multiply"]

Check = Literal["freivalds", "full", "none"]
Path = str | os.PathLike[str]

# Seconds between two looks at the cluster: each costs a round trip to the scheduler.
POLL_SECONDS = 0.2

# Seconds to wait, after an interrupt, for tasks that cannot be stopped: they may still be writing blocks.
PATIENCE_SECONDS = 10.0


@dataclass(frozen=True)
class Summary:
    """What a finished product was, took and is worth.

    Attributes
    ----------
    path : str
        Where C is.
    shape, dtype
        Of C.
    plan : Plan
    seconds : float
        From the first task to the last block on disk.
    bytes_moved : int
        Bytes that workers received from one another meanwhile.
    verdict : Verdict or None
        Outcome of the check of C as written; None if none was asked for.
    """

    path: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    plan: Plan
    seconds: float
    bytes_moved: int
    verdict: Verdict | None

    @property
    def flops_per_second(self) -> float:
        """Operations per second, reading and writing included."""
        return self.plan.problem.flops / max(self.seconds, 1e-9)

    def rows(self) -> list[tuple[str, str]]:
        """Return the summary as a table of label and value."""
        v = self.verdict
        return [
            ("time", f"{units.duration(self.seconds)}, reading and writing included"),
            ("rate", units.scaled(self.flops_per_second, "FLOP/s")),
            ("moved", f"{units.size(self.bytes_moved)} between workers, {units.size(self.plan.bytes_moved)} planned"),
            ("error", "not checked" if v is None else f"{v.residual:.2g} of the bound {v.bound:g}: {v.message}"),
            ("C", f"{self.path} ({self.shape[0]} x {self.shape[1]}, {self.dtype})"),
        ]


def multiply(
    a: Path,
    b: Path,
    out: Path,
    *,
    client: Client,
    transa: bool = False,
    transb: bool = False,
    precision: str = "highest",
    kernel: str | None = None,
    device: cluster.Device = "auto",
    blocks: tuple[int, int, int] | None = None,
    overwrite: bool = False,
    check: Check = "freivalds",
    announce: Callable[[Plan], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Multiply two matrices on disk into a third: ``C = op(A) @ op(B)``.

    All that can be refused is refused before any work. C gets its name when it is complete and has passed its check;
    until then it is written beside it, and whatever has that name already stays.

    Parameters
    ----------
    a, b : str or path
        Matrices of shape (m, k) and (k, n) as stored formats know them: see `distmm.storage.open_matrix`.
    out : str or path
        Where C (m, n) goes, of NumPy's result type; see `distmm.storage.create_output`.
    client : distributed.Client
        The workers must see the same paths.
    transa, transb : bool
        Use the transpose of A or B, without a copy.
    precision, kernel, device, blocks
        As in `distmm.matmul`.
    overwrite : bool
        Replace an existing C.
    check : {"freivalds", "full", "none"}
        How C is verified, as read back from disk: see `distmm.verify`.
    announce : callable, optional
        Called with the plan before work starts.
    progress : callable, optional
        Called with steps done and steps in all, a few times a second.

    Returns
    -------
    Summary

    Raises
    ------
    InputError, DoesNotFitError
        Before any work; also for stored data that turn out to be unreadable.
    WrongResultError
        If C fails its check. C is kept under a name that says so.
    """
    how: dict[str, Any] = {"transa": transa, "transb": transb, "client": client}
    left, right = open_matrix(a), open_matrix(b)
    plan = array.plan(left, right, precision=precision, kernel=kernel, device=device, blocks=blocks, **how)
    plan.validate()
    _check_possible(check, plan)
    c = array.gemm(1, left, right, plan=plan, **how)
    target = create_output(out, c.shape, c.dtype, (c.chunks[0][0], c.chunks[1][0]), overwrite)
    try:
        if announce is not None:
            announce(plan)
        moved, started = cluster.bytes_moved(client), time.perf_counter()
        _store(client, c, target, progress or _unseen)
        seconds = time.perf_counter() - started
        moved = cluster.bytes_moved(client) - moved
        verdict = None
        if check != "none":
            with client.as_current():
                verdict = verify(left, right, _written(target), check=check, transa=transa, transb=transb)
            if not verdict.ok:
                kept = target.output.set_aside()
                raise WrongResultError(f"{verdict.message}; the result is kept as {kept}")
        path = target.output.commit()
    finally:
        target.output.discard()  # nothing is left to discard where C has got a name
    return Summary(path, target.shape, target.dtype, plan, seconds, moved, verdict)


def _unseen(done: int, total: int) -> None:
    """Report to nobody."""


def _check_possible(check: str, plan: Plan) -> None:
    """Refuse a check that `verify` would refuse after the work."""
    problem = plan.problem
    if check not in ("freivalds", "full", "none"):
        raise InputError(f"check {check!r} is not one of freivalds, full, none")
    if check == "freivalds" and problem.dtype.kind == "b":
        raise InputError("C is boolean, and Freivalds' test needs a ring: use --check full or none")
    if check == "full" and problem.flops > FULL_FLOPS:
        raise InputError(
            f"a full check of a product of {problem.flops:.2g} operations would take more than {FULL_FLOPS:.2g} in "
            f"float64: use --check freivalds"
        )


def _written(target: Target) -> Matrix:
    """Open the draft, with a new reader: what is verified is what is on disk."""
    return open_matrix(target.output.draft)


def _store(client: Client, c: da.Array, target: Target, progress: Callable[[int, int], None]) -> None:
    """Compute all blocks of C and write each once, on the workers if the format allows, else here."""
    if target.parallel:
        pending: dict[Future, Any] = {client.compute(da.store(c, target, lock=False, compute=False)): None}
    else:
        regions = dict(zip(np.ndindex(*c.numblocks), da.core.slices_from_chunks(c.chunks), strict=True))
        pending = {future: regions[future.key[1:]] for future in futures_of(client.persist(c))}
    total = 0
    try:
        while pending:
            for future in [future for future in pending if future.done()]:
                block, region = future.result(), pending.pop(future)
                if region is not None:
                    target[region] = block
            done, known = cluster.progress(client, c)
            total = max(total, known)
            progress(done, known)
            if pending:
                time.sleep(POLL_SECONDS)
        progress(total, total)
    except BaseException:
        if client.status == "running":
            client.cancel(list(pending), force=True)
            _wait_for_silence(client)
        raise


def _wait_for_silence(client: Client) -> None:
    """Wait until no worker runs a task: cancelling stops none that has begun, and it may be writing."""

    def running(dask_worker: Worker) -> int:
        return len(dask_worker.state.executing)

    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(client.run(running, on_error="ignore").values()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
