"""How many elements a threshold keeps: a job that keeps too much ends before the disk is full."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distmm.errors import DoesNotFitError
from distmm.job.folder import Json
from distmm.planning.plan import Plan

__all__ = ["MOST", "Entries"]

# Part of the free disk that the finished block rows may take by default: the result is made from them, beside them.
MOST = 0.4


@dataclass
class Entries:
    """Counts elements as block rows are finished.

    Attributes
    ----------
    plan : Plan
    most : float
        Elements that may be kept; infinity where there is no threshold.
    count, seen : int
        Elements that are kept so far, of how many of C.
    """

    plan: Plan
    most: float = math.inf
    count: int = 0
    seen: int = 0

    def take(self, record: Json) -> None:
        """Count a finished block row.

        Raises
        ------
        DoesNotFitError
            If that is too much.
        """
        if self.most == math.inf:
            return
        self._count(record, record["count"])
        if self.count > self.most:
            raise self._error(
                f"and at most {int(self.most):,} may be kept: raise the threshold, or go on with a higher limit"
            )

    def refuse(self, record: Json) -> None:
        """End a job one of whose block rows has more elements than a worker may hold.

        Raises
        ------
        DoesNotFitError
        """
        self._count(record, record["too_many"])
        raise self._error(
            f"and block row {record['i']} alone {record['too_many']:,}, more than a worker may hold: raise the "
            f"threshold, or compute all of C with distmm.multiply"
        )

    def _count(self, record: Json, count: int) -> None:
        self.count += count
        self.seen += self.plan.blocking.m[record["i"]] * self.plan.problem.n

    def _error(self, why: str) -> DoesNotFitError:
        whole = math.prod(self.plan.problem.shape)
        return DoesNotFitError(
            f"the threshold keeps {self.count:,} of the {self.seen:,} elements seen so far, of {whole:,}, {why}"
        )
