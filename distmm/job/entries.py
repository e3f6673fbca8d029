"""The limit on the elements that a threshold keeps: the job ends before the disk is full."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from typing import Self

from distmm.errors import DoesNotFitError
from distmm.job.folder import Folder, Json
from distmm.job.reduction import Threshold
from distmm.job.spec import Spec
from distmm.planning.plan import Plan
from distmm.product.reduction_limits import bytes_of_entry

# Share of the free disk that finished block rows may take by default. The result needs as much again.
MOST = 0.4


@dataclass
class Entries:
    """Counts the kept elements of finished block rows.

    Attributes
    ----------
    plan : Plan
    most : float
        Number of elements that may be kept. Infinity without a threshold.
    count, seen : int
        Number of elements kept so far, and number of elements of C examined so far.
    """

    plan: Plan
    most: float = math.inf
    count: int = 0
    seen: int = 0

    @classmethod
    def of(cls, spec: Spec, plan: Plan, folder: Folder, most: int | None) -> Self:
        """Return the counter of a job with the caller's limit `most`, or as many elements as fit on the free disk."""
        if not isinstance(spec.reduction, Threshold):
            return cls(plan)
        if most is None:
            used = sum(entry.stat().st_size for entry in os.scandir(folder.rows))
            free = shutil.disk_usage(folder.path).free + used
            most = int(free * MOST) // bytes_of_entry(spec.reduction.dtype(spec.dtype))
        return cls(plan, most)

    def take(self, record: Json) -> None:
        """Count a finished block row.

        Raises
        ------
        DoesNotFitError
            If more than `most` elements are kept.
        """
        if self.most == math.inf:
            return
        self._count(record, record["count"])
        if self.count > self.most:
            raise self._error(
                f"and at most {int(self.most):,} may be kept: choose a stricter threshold, or continue with a higher "
                f"limit"
            )

    def refuse(self, record: Json) -> None:
        """End the job because a block row has more elements than fit into the planned memory of a worker.

        Raises
        ------
        DoesNotFitError
            Always.
        """
        self._count(record, record["too_many"])
        raise self._error(
            f"and block row {record['i']} alone {record['too_many']:,}, more than fit into a worker's memory: choose "
            f"a stricter threshold, or compute all of C with distmm.multiply"
        )

    def _count(self, record: Json, count: int) -> None:
        self.count += count
        self.seen += self.plan.blocking.m[record["i"]] * self.plan.problem.n

    def _error(self, why: str) -> DoesNotFitError:
        whole = math.prod(self.plan.problem.shape)
        return DoesNotFitError(
            f"the threshold keeps {self.count:,} of the {self.seen:,} elements seen so far, of {whole:,}, {why}"
        )
