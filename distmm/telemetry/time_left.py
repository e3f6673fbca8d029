"""The time left, from the times at which the work so far was done. Pure: times are arguments."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise

__all__ = ["Pace"]

# Events within 1/64 of the time so far count as one: the workers of a step, the blocks of a wave. This also bounds the
# memory: a factor of e in time takes 64 points.
RESOLUTION = 64

# The rate leaves out this first part of the work so far. If it were smaller, a slow start would count for longer. If it
# were larger, the rate would be that of too few steps, or of a part of a wave.
FORGOTTEN = 0.4


class Pace:
    """Work done over time, and the time that more of it will take.

    The rate is that of the last 60 % of the work. So costs that come once (start-up, the first reads from a cold disk)
    no longer count when one and a half times as much work has been done since. Work that comes in lumps is counted from
    lump to lump.

    Parameters
    ----------
    start : float
        Seconds; when the work began.
    """

    def __init__(self, start: float) -> None:
        self.times, self.work = [start], [0.0]
        self._opened = start  # when the last point began

    def add(self, time: float, work: float) -> None:
        """Note that some work was done at a time; an earlier time than the last one counts as that."""
        time, total = max(time, self.times[-1]), self.work[-1] + work
        if len(self.times) > 1 and time - self._opened <= (time - self.times[0]) / RESOLUTION:
            self.times[-1], self.work[-1] = time, total
            return
        self.times.append(time)
        self.work.append(total)
        self._opened = time

    def left(self, now: float, work: float) -> float:
        """Seconds that more work will take from `now` on; infinity where nothing has been done yet.

        Between two lumps the time left decreases; while the next lump is late, it stays.
        """
        at = max(0, bisect_right(self.work, self.work[-1] * FORGOTTEN) - 1)
        done, seconds = self.work[-1] - self.work[at], self.times[-1] - self.times[at]
        if not done or not seconds:
            return math.inf
        return max(0.0, work * seconds / done - min(max(0.0, now - self.times[-1]), _longest(self.times[at:])))

    @property
    def pause(self) -> float:
        """The longest time so far between two lumps."""
        return _longest(self.times)


def _longest(times: list[float]) -> float:
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)
