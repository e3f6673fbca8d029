"""Which workers are silent, and whether a product is stalled, from heartbeats and the time since a step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# A worker is silent after so many seconds without a heartbeat, plus so many for each worker of the cluster. Heartbeats
# come every 0.5 s, and every n / 200 + 1 seconds from many workers.
SILENT_SECONDS, SILENT_SECONDS_A_WORKER = 15.0, 0.02

# A product is stalled after so many seconds without a step, check or write, if that is also this many times its longest
# pause so far.
STALLED_SECONDS, STALLED_PAUSES = 20.0, 3.0


def silent(seen: Mapping[str, float], now: float) -> set[str]:
    """Return the workers that are silent, of all that have not left; `seen` has the time of their last heartbeat."""
    limit = SILENT_SECONDS + SILENT_SECONDS_A_WORKER * len(seen)
    return {name for name, at in seen.items() if now - at > limit}


def heard_of(planned: int, used: Iterable[str], seen: Mapping[str, float], now: float) -> int:
    """Return how many of a plan's workers are connected and not silent.

    Parameters
    ----------
    planned : int
        Number of workers in the plan.
    used : iterable of str
        Names of the workers that own blocks of the product, or have computed some.
    seen : mapping
        Time of the last heartbeat by name of the worker, for all workers that have not left the cluster.
    now : float
        Seconds since the epoch.

    Notes
    -----
    A worker that the product does not use yet replaces a worker that has left. It does not replace a silent one: the
    scheduler moves the tasks only after it has removed the silent worker.
    """
    used, quiet = set(used), silent(seen, now)
    spare = len(seen.keys() - used - quiet)
    gone = max(planned - len(used & seen.keys()), 0)
    return max(0, planned - len(used & quiet) - max(0, gone - spare))


def stalled(workers: int, idle: float, pause: float | None) -> bool:
    """Whether a product is stalled.

    Parameters
    ----------
    workers : int
        Number of workers that send heartbeats (`heard_of`).
    idle : float
        Seconds since the last step, check or write.
    pause : float or None
        The longest time between two steps so far. None before the first step, which may wait for slow reads.
    """
    return not workers or (pause is not None and idle > max(STALLED_SECONDS, STALLED_PAUSES * pause))
