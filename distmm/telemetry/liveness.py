"""Whether a product goes on: which of its workers are heard of, and how long ago it did something. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["STALLED_SECONDS", "heard_of", "stalled"]

# A worker that has sent no heartbeat for so many seconds is not counted. Heartbeats come every 0.5 s, and less often
# where there are many workers: every n / 200 + 1 seconds.
SILENT_SECONDS, SILENT_SECONDS_A_WORKER = 15.0, 0.02

# A product is stalled when it has done nothing for so many seconds, and for so many times the longest pause so far.
STALLED_SECONDS, STALLED_PAUSES = 20.0, 3.0


def heard_of(planned: int, used: Iterable[str], seen: Mapping[str, float], now: float) -> int:
    """Return how many of the workers that a plan asks for are there and not silent.

    Parameters
    ----------
    planned : int
        Workers of the plan.
    used : iterable of str
        Names of the workers that own blocks of the product, or have made some.
    seen : mapping
        When each worker of the cluster was last heard of; one that has left is not in it.
    now : float

    Notes
    -----
    A worker that the product does not use yet takes the place of one that has left, and not of one that is silent: the
    scheduler gives it the tasks when the silent one is given up.
    """
    used = set(used)
    limit = SILENT_SECONDS + SILENT_SECONDS_A_WORKER * len(seen)
    silent = sum(now - seen[name] > limit for name in used & seen.keys())
    spare = sum(now - at <= limit for name, at in seen.items() if name not in used)
    gone = max(planned - len(used & seen.keys()), 0)
    return max(0, planned - silent - max(0, gone - spare))


def stalled(workers: int, idle: float, pause: float | None) -> bool:
    """Whether a product stands still.

    Parameters
    ----------
    workers : int
        Those that are heard of.
    idle : float
        Seconds since it did something.
    pause : float or None
        The longest time so far between two steps; None before the first one, which may wait for slow reads.
    """
    return not workers or (pause is not None and idle > max(STALLED_SECONDS, STALLED_PAUSES * pause))
