"""Errors of runs that end before C is complete: what was wrong, what is kept, and how to continue."""

from __future__ import annotations

from distmm.errors import DeviceMemoryError, DistmmError, DoesNotFitError, InputError, Stopped, WrongResultError
from distmm.job.folder import Folder, Json
from distmm.job.records import batch_facts, continuation
from distmm.job.reduction import Threshold
from distmm.job.spec import Spec
from distmm.planning.plan import Plan
from distmm.storage.matrix import Matrix


def explained(error: DistmmError | OSError, folder: Folder, spec: Spec, out: str, total: int) -> Exception:
    """Return an error whose message also says what is kept, and how to continue.

    Parameters
    ----------
    error : DistmmError or OSError
    folder : Folder
    spec : Spec
    out : str
        The user's name of C.
    total : int
        Number of blocks or block rows of C.

    Returns
    -------
    Exception
        Of the same type for `Stopped`, `WrongResultError` and `DeviceMemoryError`. For other errors `InputError`, or
        `Stopped` if the scheduler is lost.
    """
    what = f"{spec.contents.name} of C"
    try:
        done = f"{len(folder.markers())} of {total} {what} are finished and kept"
    except (OSError, InputError):  # the mount with the markers is lost
        done = f"the finished {what} are kept"
    arrays = any(not isinstance(x.source, Matrix) for x in spec.operands.values())
    kept = f"{done} in {folder.path}; continue with: {continuation(batch_facts(), out, arrays)}"
    if isinstance(error, (Stopped, WrongResultError, DeviceMemoryError)):
        return type(error)(f"{error}; {kept}")
    if isinstance(error, DoesNotFitError) and isinstance(spec.reduction, Threshold):
        return DoesNotFitError(f"{error}; {done} in {folder.path}")  # `error` has the remedy
    if not isinstance(error, OSError):
        return InputError(f"{error}; {kept}, after the cause is removed")
    # Dask's errors of lost connections have no errno.
    if error.errno is None or isinstance(error, ConnectionError):
        return Stopped(f"the scheduler is lost ({type(error).__name__}); {kept}")
    return InputError(f"{error.filename or folder.path}: {error.strerror}; {kept}, after the cause is removed")


def past_deadline(stopped: DistmmError, folder: Folder, manifest: Json, spec: Spec, plan: Plan) -> DistmmError:
    """Return the error of a stopped run with a deadline: another one for a second such run without a finished block.

    A batch system would repeat such a run forever. The exit code 2 of that error prevents it. A run without a deadline
    does not count: its user may have interrupted it after a second.
    """
    finished = len(folder.markers())
    if sum(run.get("kept") == finished and run.get("deadline") is not None for run in manifest["runs"][-2:]) < 2:
        return stopped
    return InputError(
        f"{stopped}, and neither this run nor the one before it has finished any of the {spec.contents.name} of "
        f"C: a third run would not either. A wave was predicted to take {plan.wave_seconds:.3g} s: allow more time "
        f"(--deadline, run.walltime), use more workers, or start over with smaller blocks (--overwrite, --blocks; "
        f"now {'x'.join(map(str, plan.block_shape))})"
    )


def rejected_text(record: Json) -> str:
    """Return a text on a block that is not written, and on the worker where it failed its check, or was changed."""
    block = f"C[{record['i']}, {record['j']}] is not written"
    if "changed" not in record:
        return f"{block}: it failed its check on worker {record['worker']} of {record['host']}"
    where = record["changed"]
    return (
        f"{block}: {where['block']} changed in the memory of worker {where['worker']} of {where['host']} after it was "
        f"{where['since']}"
    )


def wrong_text(record: Json, before: Json | None) -> str:
    """Return the message for a block that is wrong in all attempts. `before` is an attempt with the same bits."""
    residual, attempts = record["residual"], f"after {record['attempt'] + 1} attempts"
    if "changed" in record:
        return f"{rejected_text(record)}, {attempts}: check the memory of that worker's host"
    error = "differs" if residual is None else f"is off by {residual:.2g} times the tolerance for rounding"
    cause = "A kernel or a bound is wrong"
    if before is not None and before["worker"] != record["worker"]:
        attempts = f"with the same bits on worker {before['worker']} of {before['host']}"
    elif before is not None:
        attempts, cause = "with the same bits twice on one worker", "A kernel, a bound or this worker is wrong"
    return (
        f"C is not A @ B: block C[{record['i']}, {record['j']}] {error} in its row {record['row']}, {attempts}, the "
        f"last one on worker {record['worker']} of {record['host']}; it is not written. {cause}: try --kernel or "
        f"--check none, and report it"
    )
