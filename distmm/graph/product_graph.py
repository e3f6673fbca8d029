"""The Dask graph of a product, made from its plan. The only module that names keys of products.

Block ``C[i, j]`` stays with its owner, which runs one chain of steps over k, each into a new block::

    D0 = A[i,0] @ B[0,j];  D1 = D0 + A[i,1] @ B[1,j];  ...;  C[i,j] = epilogue(D_last)

The chain continues a kernel's loop over k across tasks: step s starts from the result of step s - 1. If C has too few
blocks for all workers, k is split: each layer of the grid runs a chain over its part of k, and a binary tree of fixed
shape adds the results. If the operands are in the workers' memory, a table (`distmm.planning.owners`) says which rank
multiplies which blocks; each rank runs a chain over its panels.

A symmetric product has chains for ``i >= j`` only. They read blocks of A alone: ``A[j,p]`` stands for the transpose of
``B[p,j]``, and ``C[j, i]`` is a view of ``C[i, j]`` on the same worker.

Each task carries its `Placement` for the scheduler's plugin, whatever graph the task has become part of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph

from distmm.graph.blocks_read import Block, BlocksRead, Source
from distmm.graph.dask_tasks import List, PlacedTask, ProductTask, TaskRef
from distmm.graph.parametric_layer import ParametricLayer, copyable
from distmm.graph.placement import Chain, Key, Placement
from distmm.graph.reduced_blocks import Reduced
from distmm.planning.blocks import Wave
from distmm.planning.plan import Plan
from distmm.planning.problem import operand_cuts
from distmm.worker.tasks import products
from distmm.worker.tasks.arrivals import Arrivals, Form
from distmm.worker.tasks.epilogue import Epilogue, of_c
from distmm.worker.tasks.kernel_choice import KernelChoice
from distmm.worker.tasks.loads import Load

Ranks = tuple[int, tuple[int, ...], tuple[int, ...]]  # of a task, of the chains of its block, of what it reads


@dataclass(eq=False, repr=False)
class ProductLayer(ParametricLayer):
    """All chains of one product, or of one of its waves, and the mirror images of symmetric products.

    With `out`, the product is one task, which writes C there. `pieces` says whether a block of A, and of B, may be
    several chunks.
    """

    name: str
    plan: Plan
    operands: tuple[Source, Source, Source | None]
    epilogue: Epilogue
    wave: Wave | None = None
    run: str | None = None
    reduced: Reduced | None = None
    dtypes: tuple[np.dtype[Any] | None, ...] = (None, None, None)
    out: Any = None
    forms: tuple[Form, Form] = ("matrix", "matrix")
    pieces: tuple[bool, bool] = (False, False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mirrored = self.plan.problem.symmetry is not None and self.reduced is None

    def get_output_keys(self) -> set[Key]:
        """Keys of the blocks of C."""
        blocks = self.plan.blocking.c_indices(self.wave)
        return {self._key(*b, *at) for b, i, j in blocks for at in ((i, j), *([(j, i)] if self.mirrored else []))}

    def _key(self, *index: int) -> Key:
        """Key of the block ``C[*batch, i, j]``."""
        return (self.name, *of_c(index, self.epilogue.dropped))

    def __len__(self) -> int:
        blocking = self.plan.blocking
        wave = blocking.whole if self.wave is None else self.wave
        mirrored = blocking.mirrored(wave) if self.mirrored else 0
        # Blocks of C have as many tasks each, if there are several waves.
        return self.plan.schedule.tasks * wave.c_blocks // max(1, blocking.whole.c_blocks) + mirrored

    def _tasks(self) -> Iterator[PlacedTask]:
        for wave in self.plan.waves if self.wave is None else (self.wave,):
            yield from self._chains(wave)

    def _chains(self, wave: Wave) -> Iterator[PlacedTask]:
        plan, choice, (a, b, c0) = self.plan, KernelChoice.of(self.plan), self.operands
        symmetry, schedule = plan.problem.symmetry, plan.schedule
        both: dict[str, Any] = {} if symmetry is None else {"symmetry": symmetry}
        if choice.device == "cuda":
            both |= {"most_prepared": plan.peak.most_prepared, "peak": plan.peak.worker}
        else:
            both["tasks"] = wave.c_blocks * plan.layout.layers
        on_diagonal = replace(self.epilogue, symmetry=symmetry)
        orders = schedule.wave_orders
        token = self.name.rpartition("-")[2]
        multiply: Callable[..., Any] = products.multiply
        if self.out is not None:
            multiply, both["out"] = products.multiply_and_store, self.out
        read = BlocksRead(plan, wave, (a, b), self.dtypes, self.forms, self.pieces, token)
        yield from read.tasks()

        def task(
            chain: Chain, key: Key, step: int, order: int, ranks: Ranks, func: Any, *args: Any, **kwargs: Any
        ) -> ProductTask:
            where = Placement(self.name, *chain, step, wave.index * orders + order, *ranks, self.run or self.name)
            last = key[0] == self.name
            added = c0 if isinstance(c0, Load | None) else TaskRef((c0, *key[1:]))
            epilogue = on_diagonal if chain[1] == chain[2] else self.epilogue
            if self.reduced is not None:
                kwargs |= self.reduced.arguments(plan, chain, last)
            return ProductTask(
                key, func, where, choice, *args, epilogue if last else None, added if last else None, plan=plan,
                annotations=self.annotations, **kwargs,
            )  # fmt: skip

        for chain in plan.blocking.c_indices(wave):
            batch, i, j = chain
            c_key = self._key(*batch, i, j)
            chains = schedule.chains(batch, i, j)
            owners = tuple(rank for rank, _ in chains)
            partial: list[tuple[Key, int]] = []  # sums over the parts of k, and their ranks
            first = 0
            for rank, steps in chains:
                previous: TaskRef | None = None
                for s, panels in enumerate(steps):
                    last = len(chains) == 1 and s == len(steps) - 1
                    key = c_key if last else (f"distmm-step-{token}", *batch, i, j, first + s)
                    blocks = [read.of_step(*chain, p) for p in panels]
                    sides = list(zip(*blocks, strict=True))
                    homes = (rank for side in sides for block in side for rank in read.homes(block))
                    arguments = (List(*map(read.argument, side)) for side in sides)
                    both["arrivals"] = self._arrivals(read, chain, blocks)
                    ranks = rank, owners, tuple(homes)
                    end = task(chain, key, first + s, s, ranks, multiply, previous, *arguments, **both)
                    yield end
                    previous = TaskRef(key)
                partial.append((key, rank))
                first += len(steps)
            # A tree of fixed shape: its bits depend on how k was split, and not on which sum was ready first.
            order = schedule.steps
            while len(partial) > 1:
                sums: list[tuple[Key, int]] = []
                for (left, rank), (right, _) in zip(partial[::2], partial[1::2], strict=False):
                    key = c_key if len(partial) == 2 else (f"distmm-sum-{token}", *batch, i, j, first)
                    added = {"arrivals": self._arrivals(read, chain)} if key == c_key and c0 is not None else {}
                    refs = TaskRef(left), TaskRef(right)
                    end = task(chain, key, first, order, (rank, owners, ()), products.combine, *refs, **added)
                    yield end
                    sums.append((key, rank))
                    first += 1
                partial = sums + partial[2 * len(sums) :]
                order += 1
            if self.mirrored and i != j:
                yield PlacedTask(self._key(*batch, j, i), products.mirror, end.placement, symmetry, TaskRef(c_key))

    def _arrivals(self, read: BlocksRead, chain: Chain, blocks: Sequence[tuple[Block, Block]] = ()) -> Arrivals:
        """Return what the operands say of the blocks that a task reads."""
        batch, i, j = chain
        right = int(self.plan.problem.symmetry is None)  # a symmetric product reads A for both
        *stacks, m, _, n = self.plan.blocking.cuts
        of_block = tuple(edges[at] for edges, at in zip((*stacks, m, n), (*batch, i, j), strict=True))
        a, b = (tuple(read.arriving(pair[side]) for pair in blocks) for side in (0, 1))
        forms = self.forms[0], self.forms[right]
        return Arrivals(a, b, of_c(of_block, self.epilogue.dropped), self.dtypes, forms)


def build(
    name: str,
    plan: Plan,
    a: da.Array | Load,
    b: da.Array | Load | None,
    epilogue: Epilogue,
    c0: da.Array | Load | None = None,
    wave: Wave | None = None,
    run: str | None = None,
    reduced: Reduced | None = None,
    norms: tuple[da.Array, ...] = (),
    out: Any = None,
    forms: tuple[Form, Form] = ("matrix", "matrix"),
) -> HighLevelGraph:
    """Return the graph of C, with keys ``(name, *batch, i, j)``, without those indices that ``epilogue.dropped`` names.

    Parameters
    ----------
    name : str
        Name of the resulting Dask array, ending in ``-token``.
    plan : Plan
    a, b : dask.array.Array
        Operands whose chunks are the plan's blocks; a symmetric product has no B.
    epilogue : Epilogue
        Passed to the last task of each chain.
    c0 : dask.array.Array, optional
        Added by the last step, times ``epilogue.beta``; its shape and chunks are those of C.
    wave : Wave, optional
        One of ``plan.waves``: the graph has its blocks of C only. By default it has all waves.
    run : str, optional
        Name that the waves of a job share. Each of them has a product name of its own.
    reduced : Reduced, optional
        Blocks are reduced by the tasks that finish them. A key then stands for the parts of a block, not for the block.
    norms : arrays
        Those that `reduced` names.
    out : ClientOutput, optional
        For a product of one task, which writes C there, and may load operands itself.
    forms : pair of {"matrix", "transpose", "vector"}
        Whether `a` and `b` are the operands, their transposes without a batch, or vectors. The tasks of the product
        transpose and reshape blocks.
    """
    given = a, a if b is None else b, c0
    names = tuple(x.name if isinstance(x, da.Array) else x for x in given)
    dtypes = tuple((a if x is None else x).dtype for x in given)
    problem, cuts, united = plan.problem, plan.blocking.cuts, plan.schedule.chunks is not None
    blocks = operand_cuts("A", cuts, problem.a_batch), operand_cuts("B", cuts, problem.b_batch)
    in_a, in_b = (
        united and isinstance(x, da.Array) and x.npartitions > math.prod(len(edges) for edges in own)
        for x, own in zip((a, b), blocks, strict=True)
    )
    layer = ProductLayer(name, plan, names, epilogue, wave, run, reduced, dtypes, out, forms, (in_a, in_b))
    read = [x for x in (a, b, c0, *norms) if isinstance(x, da.Array)]
    return copyable(HighLevelGraph.from_collections(name, layer, dependencies=read))
