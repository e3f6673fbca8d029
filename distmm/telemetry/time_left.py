"""Estimate of the time left, from the times at which earlier work was done. Pure: times are arguments."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise

# Events within 1/64 of the time so far become one point, such as the workers of a step or the blocks of a wave. This
# also bounds the memory: time that grows by a factor of e adds 64 points.
RESOLUTION = 64

# The rate ignores this first fraction of the work so far. With a smaller fraction, a slow start would distort the rate
# for longer. With a larger one, the rate would depend on too few steps, or on a part of a wave.
FORGOTTEN = 0.4


class Pace:
    """Work done over time, and the time that more of it will take.

    The rate is that of the last 60 % of the work. So costs that occur once (start-up, the first reads from a cold disk)
    stop counting when 1.5 times as much work has been done since then. Rates are measured from one completion of work
    to another, since work completes in lumps.

    Parameters
    ----------
    start : float
        When the work began, in seconds. All times use the same clock.
    """

    def __init__(self, start: float) -> None:
        self.times, self.work = [start], [0.0]
        self._opened = start  # time of the first event of the last point

    def add(self, time: float, work: float) -> None:
        """Add work that was completed at `time`; a time before the last one counts as the last one."""
        time, total = max(time, self.times[-1]), self.work[-1] + work
        if len(self.times) > 1 and time - self._opened <= (time - self.times[0]) / RESOLUTION:
            self.times[-1], self.work[-1] = time, total
            return
        self.times.append(time)
        self.work.append(total)
        self._opened = time

    def left(self, now: float, work: float) -> float:
        """Return the seconds from `now` until `work` more is done; infinity before the first work is done.

        The result decreases between two completions. It stays constant while the next completion is late.
        """
        at = max(0, bisect_right(self.work, self.work[-1] * FORGOTTEN) - 1)
        done, seconds = self.work[-1] - self.work[at], self.times[-1] - self.times[at]
        if not done or not seconds:
            return math.inf
        return max(0.0, work * seconds / done - min(max(0.0, now - self.times[-1]), _longest(self.times[at:])))

    @property
    def pause(self) -> float:
        """The longest time between two completions so far, in seconds."""
        return _longest(self.times)


def _longest(times: list[float]) -> float:
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)
