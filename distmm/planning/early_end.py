"""How much work a run loses when it is stopped before C is complete, and how short waves must be to limit that.

The blocks of a wave are finished at the end of their chains, nearly all at once. A run that is stopped, at its walltime
for example, loses the wave that is under way. So a run of T seconds is planned in waves of at most T / 7.
"""

from __future__ import annotations

import math
from collections import Counter

from distmm.errors import DoesNotFitError
from distmm.planning.schedule import Schedule

# Share of a run that a wave may take: a run should lose at most a fifth of its work, and a wave may take 1.4 times as
# long as predicted.
WAVE_SHARE = 1 / 7

# A plan is refused if its first wave is predicted to take more than this many runs. It is not 1, because predictions
# have been up to twice too long.
CERTAINLY_TOO_LONG = 2.0

# Jobs that are predicted to take at least this long are cut into short waves even if no time limit is given, because a
# node may fail. Shorter jobs are not, because more waves read A and B more often.
LONG_SECONDS = 1800.0


def largest_share(schedule: Schedule, by_rows: bool) -> float:
    """Largest share of C's blocks that are finished together: one wave, or all waves of the same rows if `by_rows`."""
    all_blocks = max(1, schedule.blocking.whole.c_blocks)
    if not by_rows:
        return max(wave.c_blocks for wave, _ in schedule.kinds_of_waves) / all_blocks
    blocks: Counter[range] = Counter()
    for wave in schedule.waves:
        blocks[wave.rows] += wave.c_blocks
    return max(blocks.values()) / all_blocks


def doublings_too_long(wave_seconds: float, run_seconds: float | None) -> int:
    """How often a wave must be halved until it takes a seventh of a run at most."""
    if run_seconds is None or wave_seconds <= WAVE_SHARE * run_seconds:
        return 0
    return math.ceil(math.log2(wave_seconds / (WAVE_SHARE * run_seconds)))


def refuse(wave_seconds: float, seconds: float, run_seconds: float, workers: int, edges: tuple[int, int, int]) -> None:
    """Refuse a plan that cannot finish its first blocks in one run: each run would begin them anew.

    Parameters
    ----------
    wave_seconds, seconds : float
        Of the longest wave, and of all of C, as predicted.
    run_seconds : float
        Until a run is stopped.
    workers : int
    edges : tuple of int
        Of the blocks (m, k, n).

    Raises
    ------
    DoesNotFitError
        With these figures.
    """
    if wave_seconds <= CERTAINLY_TOO_LONG * run_seconds:
        return
    blocks = "x".join(map(str, edges))
    raise DoesNotFitError(
        f"a run is stopped after {run_seconds:.3g} s, and by then this plan has finished no block of C: its first ones "
        f"take about {wave_seconds:.3g} s, all of C {seconds:.3g} s; allow more time (--deadline, or run.walltime), "
        f"use about {math.ceil(workers * wave_seconds / (WAVE_SHARE * run_seconds))} workers instead of {workers}, or "
        f"smaller blocks (now {blocks})"
    )
