"""Errors of runs that end before C is complete: they say what is kept, and how to continue."""

from __future__ import annotations

from distmm.errors import DeviceMemoryError, DistmmError, DoesNotFitError, InputError, Stopped, WrongResultError
from distmm.job import batch
from distmm.job.folder import Folder, Json
from distmm.job.reduction import Threshold
from distmm.job.spec import Spec
from distmm.planning.plan import Plan

__all__ = ["explained", "no_progress", "without_progress"]


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
    what = f"{spec.result.name} of C"
    try:
        done = f"{len(folder.markers())} of {total} {what} are finished and kept"
    except (OSError, InputError):  # the mount with the markers is lost
        done = f"the finished {what} are kept"
    kept = f"{done} in {folder.path}; continue with: {batch.continuation(batch.facts(), out)}"
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


def without_progress(folder: Folder, manifest: Json) -> bool:
    """Whether neither this run nor the one before it has finished a block of C."""
    return [run.get("kept") for run in manifest["runs"][-2:]] == [len(folder.markers())] * 2


def no_progress(stopped: Stopped, spec: Spec, plan: Plan) -> InputError:
    """Return the error for a second consecutive run that reached its deadline without a finished block of C.

    A batch system would repeat such a run forever. The exit code 2 of this error prevents that.
    """
    return InputError(
        f"{stopped}, and neither this run nor the one before it has finished any of the {spec.result.name} of "
        f"C: a third run would not either. A wave was predicted to take {plan.wave_seconds:.3g} s: allow more time "
        f"(--deadline, run.walltime), use more workers, or start over with smaller blocks (--overwrite, --blocks; "
        f"now {'x'.join(map(str, plan.block_shape))})"
    )
