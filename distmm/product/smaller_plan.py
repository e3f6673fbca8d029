"""Plans with less memory, for a job, or a product that is written, that starts again after a worker's memory was full.

The task that ran out of memory was retried alone before it failed (`distmm.worker.gpu.retrying`). So the plan's figure
was too low, or another program has taken memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from distmm import units
from distmm.errors import DeviceMemoryError, DistmmError
from distmm.planning.plan import Plan

# The peak of each smaller plan that a call tries, as a share of the peak of the plan before. The first is for a plan
# that was a little too large. If it fails, too, another program has probably taken memory, and may have taken much.
SHARES = (0.7, 0.4)

logger = logging.getLogger(__name__)


def memory_full(error: MemoryError) -> DistmmError:
    """Return the error of a task that found no memory. NumPy, and Dask when it receives blocks, raise other types.

    The error of a product that was refused (`DoesNotFitError`) stays: no task of it has run.
    """
    if isinstance(error, DistmmError):
        return error
    return DeviceMemoryError(f"the memory of a worker is full: {str(error) or type(error).__name__}")


def smaller_plan(
    full: Plan, error: DeviceMemoryError, before: int, plan_within: Callable[..., Plan | None], what: str, remedy: str
) -> tuple[Plan, str]:
    """Return a plan with a lower memory peak, and a note on it, which is also logged.

    Parameters
    ----------
    full : Plan
        The plan for which memory was full.
    error : DeviceMemoryError
        The error of the task that ran out of memory.
    before : int
        Number of smaller plans that this call has already tried.
    plan_within : callable
        Takes `most`: the bytes that blocks may take on a worker. Returns a plan, or None if the plan cannot change.
    what : str
        What continues with the plan, such as "the job continues", for the note.
    remedy : str
        What the user can do if there is no such plan, for the error.

    Returns
    -------
    plan : Plan
    note : str

    Raises
    ------
    DeviceMemoryError
        If there is no such plan, or all of `SHARES` have been tried.
    """
    peak = f"{units.size(full.peak.worker)} a worker"
    made = plan_within(most=int(full.peak.worker * SHARES[before])) if before < len(SHARES) else None
    if made is None or made.peak.worker >= full.peak.worker:
        tried = f"{before} smaller plans have been tried"
        why = tried if before == len(SHARES) else "no other plan has a lower peak"
        raise DeviceMemoryError(
            f"{error}. The plan was {full}, with a peak of {peak}, and {why}: {remedy}, use more workers, or "
            f"free memory of other programs there"
        ) from error
    # If no plan has so low a peak, the plan with the lowest peak is used.
    made = replace(made, cluster=replace(made.cluster, memory=max(made.cluster.memory, made.peak.worker)))
    note = (
        f"the memory of a worker was full with plan {full} (peak {peak}): {what} with plan {made} (peak "
        f"{units.size(made.peak.worker)})"
    )
    logger.warning("%s. %s", error, note)
    return made, note
