"""A plan executed in one process and one loop. It defines what the Dask graph must compute, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from distmm.planning.blocks import slices
from distmm.planning.plan import Plan
from distmm.planning.problem import operand_batch
from distmm.worker.tasks import products
from distmm.worker.tasks.epilogue import Epilogue
from distmm.worker.tasks.kernel_choice import KernelChoice


def execute(plan: Plan, a: Any, b: Any, choice: KernelChoice, epilogue: Epilogue, c0: Any = None) -> np.ndarray:
    """Multiply `a` ``(*batch, m, k)`` by `b` ``(*batch, k, n)``: waves, their blocks, each chain in ascending k.

    A symmetric product reads only `a`, and copies the blocks below the diagonal to their places above it.

    Returns
    -------
    numpy.ndarray of shape ``plan.problem.shape`` and dtype ``epilogue.dtype``
    """
    problem, blocking = plan.problem, plan.blocking
    symmetry = problem.symmetry
    m, k, n = slices(blocking.m), slices(blocking.k), slices(blocking.n)
    batches = [slices(edges) for edges in blocking.batch]
    c = np.empty(problem.shape, epilogue.dtype)
    for batch, i, j in (index for wave in plan.waves for index in blocking.c_indices(wave)):
        at = tuple(edges[x] for edges, x in zip(batches, batch, strict=True))
        a_at = _own(at, operand_batch(batch, problem.a_batch), problem.a_batch)
        b_at = _own(at, operand_batch(batch, problem.b_batch), problem.b_batch)
        added = None if c0 is None else c0[(*at, m[i], n[j])]
        ending = replace(epilogue, symmetry=symmetry) if i == j else epilogue
        partial = []
        chains = plan.schedule.chains(batch, i, j)
        for _, steps in chains:
            block = None
            for s, panels in enumerate(steps):
                last = len(chains) == 1 and s == len(steps) - 1
                a_blocks = [a[(*a_at, m[i], k[p])] for p in panels]
                b_blocks = [a[(*a_at, m[j], k[p])] if symmetry else b[(*b_at, k[p], n[j])] for p in panels]
                b_blocks = a_blocks if symmetry and i == j else b_blocks
                end, there = (ending, added) if last else (None, None)
                block = products.multiply(None, choice, block, a_blocks, b_blocks, end, there, symmetry)
            partial.append(block)
        while len(partial) > 1:
            end, there = (ending, added) if len(partial) == 2 else (None, None)
            pairs = zip(partial[::2], partial[1::2], strict=False)
            sums = [products.combine(None, choice, *pair, end, there) for pair in pairs]
            partial = sums + partial[2 * len(sums) :]
        c[(*at, m[i], n[j])] = partial[0]
        if symmetry and i != j:
            c[(*at, m[j], n[i])] = products.mirror(None, symmetry, partial[0])
    return c


def _own(at: tuple[slice, ...], index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Batch slices of an operand: those of C along the dimensions that it has, and all of a broadcast dimension."""
    own = at[len(at) - len(index) :]
    return tuple(slice(None) if length == 1 else s for s, length in zip(own, shape, strict=True))
