"""Plans with less memory, for a job that continues after the memory of a worker was full.

The task that ran out of memory was retried alone before it failed (`distmm.worker.gpu.retrying`). So the plan's figure
was too low, or another program has taken memory.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from distributed import Client

from distmm.clusters import cluster
from distmm.errors import DeviceMemoryError
from distmm.job import planning
from distmm.job.folder import Json
from distmm.job.spec import Spec
from distmm.planning.plan import Plan

__all__ = ["MOST", "SHARE", "smaller_plan"]

# Number of smaller plans that a call tries.
MOST = 2

# The peak of the next plan, as a share of the peak of the plan for which memory was full.
SHARE = 0.7

logger = logging.getLogger("distmm.job")


def smaller_plan(
    client: Client, spec: Spec, manifest: Json, device: cluster.Device, full: Plan, error: DeviceMemoryError,
    before: int,
) -> tuple[Plan, str]:  # fmt: skip
    """Return a plan with a lower memory peak, and a note on it for log and report.

    The block edges stay the same, so that finished blocks can be kept. The plan has smaller waves, less lookahead, or
    fewer panels in a task.

    Parameters
    ----------
    client : distributed.Client
    spec : Spec
    manifest : dict
        The job's manifest.
    device : {"auto", "gpu", "cpu"}
        The user's choice.
    full : Plan
        The plan for which memory was full.
    error : DeviceMemoryError
        The error of the task that ran out of memory.
    before : int
        Number of smaller plans that this call has already tried.

    Returns
    -------
    plan : Plan
    note : str

    Raises
    ------
    DeviceMemoryError
        If there is no such plan, or `before` is `MOST`.
    """
    peak = f"{full.peak.worker / 1e9:.3g} GB a worker"
    made = _with_less(client, spec, manifest, device, full) if before < MOST else None
    if made is None:
        why = (
            f"{before} smaller plans have been tried"
            if before == MOST
            else f"no plan with blocks {_edges(full)} has a lower peak"
        )
        raise DeviceMemoryError(
            f"{error}. The plan was {full}, with a peak of {peak}, and {why}: start over with smaller blocks "
            f"(--overwrite, --blocks; now {_edges(full)}), use more workers, or free memory of other programs there"
        ) from error
    note = (
        f"the memory of a worker was full with plan {full} (peak {peak}): the job continues with plan {made} (peak "
        f"{made.peak.worker / 1e9:.3g} GB)"
    )
    logger.warning("%s. %s", error, note)
    return made, note


def _with_less(client: Client, spec: Spec, manifest: Json, device: cluster.Device, full: Plan) -> Plan | None:
    """Plan with less memory. None if no plan has a lower peak."""
    if manifest["layers"] > 1:  # the bits of C depend on how k is split, so the plan cannot change
        return None
    asked = planning.request(spec, device, None, manifest, None)
    made = planning.planned(spec, replace(asked, most=int(full.peak.worker * SHARE)), client)
    if made.peak.worker >= full.peak.worker:
        return None
    # If no plan has so low a peak, the plan with the lowest peak is used.
    return replace(made, cluster=replace(made.cluster, memory=max(made.cluster.memory, made.peak.worker)))


def _edges(plan: Plan) -> str:
    return "x".join(map(str, plan.block_shape))
