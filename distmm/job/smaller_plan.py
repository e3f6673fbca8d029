"""A job for which the memory of a worker was full goes on with a plan that takes less.

The task that found no room was tried again, alone, before it failed (`distmm.worker.gpu.retrying`). So the plan's
figure was too low, or something else has taken the memory.
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

# Smaller plans that a call tries, one after the other.
MOST = 2

# Part of the peak of a plan for which memory was full that the next plan may have.
SHARE = 0.7

logger = logging.getLogger("distmm.job")


def smaller_plan(
    client: Client, spec: Spec, manifest: Json, device: cluster.Device, full: Plan, error: DeviceMemoryError,
    before: int,
) -> tuple[Plan, str]:  # fmt: skip
    """Return a plan with a lower peak than one for which memory was full, and what log and report say of that.

    The blocks stay, so that finished ones are kept. Fewer of them are under way: in smaller waves, with less lookahead,
    or with fewer panels a task.

    Parameters
    ----------
    client : distributed.Client
    spec : Spec
    manifest : dict
        Of the job.
    device : {"auto", "gpu", "cpu"}
        As the user has asked for it.
    full : Plan
    error : DeviceMemoryError
        Says what found no room.
    before : int
        Smaller plans that this call has tried already.

    Raises
    ------
    DeviceMemoryError
        If there is none, or the call has tried as many as it may.
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
            f"{error}. The plan was {full}, with a peak of {peak}, and {why}: begin anew with smaller blocks "
            f"(--overwrite, --blocks; now {_edges(full)}), use more workers, or free what other programs hold there"
        ) from error
    note = (
        f"the memory of a worker was full with plan {full} (peak {peak}): the job goes on with plan {made} (peak "
        f"{made.peak.worker / 1e9:.3g} GB)"
    )
    logger.warning("%s. %s", error, note)
    return made, note


def _with_less(client: Client, spec: Spec, manifest: Json, device: cluster.Device, full: Plan) -> Plan | None:
    """Plan with less memory; None where no plan has a lower peak."""
    if manifest["layers"] > 1:  # the bits of C depend on how k is split, and so the whole plan stays
        return None
    asked = planning.request(spec, device, None, manifest, None)
    made = planning.planned(spec, replace(asked, most=int(full.peak.worker * SHARE)), client)
    if made.peak.worker >= full.peak.worker:
        return None
    # Where no plan keeps to the share, the one that comes nearest is taken.
    return replace(made, cluster=replace(made.cluster, memory=max(made.cluster.memory, made.peak.worker)))


def _edges(plan: Plan) -> str:
    return "x".join(map(str, plan.block_shape))
