"""How finished blocks of C are reduced: what the tasks of their chains get so that the last one reduces its block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from distmm.graph.dask_tasks import List, TaskRef
from distmm.graph.placement import Chain
from distmm.planning.blocks import slices
from distmm.planning.plan import Plan
from distmm.worker.tasks.metrics import needs_exponents
from distmm.worker.tasks.reductions import BlockReduction, Reduction


@dataclass(frozen=True)
class Reduced:
    """How each block of C is reduced by the task that finishes it.

    Attributes
    ----------
    reduction : Reduction
    down : bool
        Whether lines are columns of C; otherwise they are rows.
    norms : pair of str, optional
        Names of the arrays of squared norms, ``(m,)`` and ``(n,)``, cut like C.
    mirrored : bool
        Whether a block of a symmetric product is reduced a second time, as its mirror image.
    dtype : dtype, optional
        Type of the blocks that are reduced; by default that of the product.
    """

    reduction: Reduction
    down: bool = False
    norms: tuple[str, str] | None = None
    mirrored: bool = True
    dtype: np.dtype[Any] | None = None

    def arguments(self, plan: Plan, chain: Chain, last: bool) -> dict[str, Any]:
        """Return what a task of a chain gets: norms of the rows and columns, and the last task the reduction."""
        (_, i, j), given = chain, {}
        # With exponents all steps need norms, and not the last alone.
        if self.norms is not None and (last or needs_exponents(plan.problem.dtype)):
            given["norms"] = List(TaskRef((self.norms[0], i)), TaskRef((self.norms[1], j)))
        if last:
            row, column = slices(plan.blocking.m)[i].start, slices(plan.blocking.n)[j].start
            symmetry = plan.problem.symmetry if i != j and self.mirrored else None
            given["reduction"] = BlockReduction(self.reduction, row, column, self.down, symmetry)
        return given
