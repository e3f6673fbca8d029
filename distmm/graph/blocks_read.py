"""The blocks of A and B that tasks of a product read: as their arguments, with their ranks, and as they arrive.

A block may be a union of the user's chunks. A worker takes 0.4 ms for each chunk that it gets from another one, however
small. So on CPU clusters, if there are many, a task of each worker *gathers* its chunks of a block in one array, and
the tasks of the product read these arrays. A block that is multiplied where all of its chunks are is read as it is.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from distmm.graph.dask_tasks import GATHERED, GatherTask, List, TaskRef
from distmm.planning.blocks import Wave, slices
from distmm.planning.plan import Plan
from distmm.planning.problem import along_operand, operand_batch
from distmm.worker.tasks.arrivals import Form, gather
from distmm.worker.tasks.loads import Load
from distmm.worker.united_chunks import Gathered

Source = str | Load  # of the blocks of an operand: the name of an array, or what the only task loads itself
Operand = Literal["A", "B"]


class Block(NamedTuple):
    """A block of an operand, and its index there."""

    of: Operand
    at: tuple[int, ...]


@dataclass(eq=False)
class BlocksRead:
    """Blocks of the operands of a product, or of one of its waves.

    Attributes
    ----------
    sources, dtypes, forms, pieces
        Of A and B, as in `product_graph.ProductLayer`.
    token : str
        Keys of tasks that gather chunks have it.
    """

    plan: Plan
    wave: Wave
    sources: tuple[Source, Source]
    dtypes: tuple[np.dtype[Any] | None, ...]
    forms: tuple[Form, Form]
    pieces: tuple[bool, bool]
    token: str

    def __post_init__(self) -> None:
        # A union of chunks has many references, and many tasks read it.
        self.argument, self.arriving = cache(self._argument), cache(self._arriving)

    def of_step(self, batch: tuple[int, ...], i: int, j: int, p: int) -> tuple[Block, Block]:
        """Return the blocks that a step reads for panel p of ``C[*batch, i, j]``: a symmetric product reads A alone."""
        in_a, in_b = (operand_batch(batch, self._own(of)) for of in ("A", "B"))
        right = Block("B", (*in_b, p, j)) if self.plan.problem.symmetry is None else Block("A", (*in_a, j, p))
        return Block("A", (*in_a, i, p)), right

    def _argument(self, block: Block) -> Any:
        """Return a block as an argument: a load, one chunk, or a list of chunks or of gathered ones."""
        source = self.sources[block.of == "B"]
        if isinstance(source, Load):
            cuts = self._along(block, self.plan.blocking.cuts)[-2:]
            return source._replace(block=tuple(slices(edges)[n] for edges, n in cuts))
        if block in self._gathered:
            return List(*(TaskRef(self._key(block, rank)) for rank in self._gathered[block]))
        return List(*self._chunks(block)) if self.pieces[block.of == "B"] else next(self._chunks(block))

    def homes(self, block: Block) -> list[int]:
        """Return the ranks of all that `argument` names, in its order; none for a load."""
        if isinstance(self.sources[block.of == "B"], Load):
            return []
        return list(self._gathered.get(block) or self._ranks(block))

    def _arriving(self, block: Block) -> Any:
        """Return the shape of a block, the edges of its chunks, or how they are gathered."""
        if not self.pieces[block.of == "B"]:
            return tuple(edges[n] for edges, n in self._along(block, self.plan.blocking.cuts))
        edges, at = self._chunk_edges(block), self._gathered.get(block)
        return edges if at is None else Gathered(edges, tuple(map(tuple, at.values())))

    def tasks(self) -> Iterator[GatherTask]:
        """Yield the tasks that gather chunks."""
        for block, at in self._gathered.items():
            right, chunks = block.of == "B", list(self._chunks(block))
            shapes = list(itertools.product(*self._chunk_edges(block)))
            for rank, numbers in at.items():
                own = List(*(chunks[n] for n in numbers)), f"a block of {block.of}", [shapes[n] for n in numbers]
                yield GatherTask(self._key(block, rank), gather, *own, self.dtypes[right], self.forms[right])

    @cached_property
    def _gathered(self) -> dict[Block, dict[int, list[int]]]:
        """Blocks of which a rank reads chunks of another one: the numbers of their chunks, in C order, by rank."""
        schedule, problem = self.plan.schedule, self.plan.problem
        gathers = [of for of in schedule.gathers(problem, self.plan.cluster.device) if self.pieces[of == "B"]]
        if not gathers or (self.sources[0] == self.sources[1] and problem.symmetry is None):
            return {}
        readers: defaultdict[Block, set[int]] = defaultdict(set)
        for chain in self.plan.blocking.c_indices(self.wave):
            for rank, steps in schedule.chains(*chain):
                for p in itertools.chain(*steps):
                    for block in self.of_step(*chain, p):
                        readers[block].add(rank)
        found: dict[Block, dict[int, list[int]]] = {}
        for block, ranks in readers.items():
            at: defaultdict[int, list[int]] = defaultdict(list)
            for number, rank in enumerate(self._ranks(block)):
                at[rank].append(number)
            if block.of in gathers and len(ranks | at.keys()) > 1:
                found[block] = at
        return found

    def _key(self, block: Block, rank: int) -> tuple[Any, ...]:
        return (GATHERED + self.token, block.of, *block.at, rank)

    def _own(self, of: Operand) -> tuple[int, ...]:
        """Batch dimensions of an operand."""
        return self.plan.problem.a_batch if of == "A" else self.plan.problem.b_batch

    def _chunks(self, block: Block) -> Iterator[TaskRef]:
        """Yield the chunks of a block, in C order; the operand's only chunk if it has no more blocks than chunks."""
        right = block.of == "B"
        along_k = slice(0, 1) if right else slice(1, 2)
        ways: dict[Form, slice] = {"matrix": slice(2), "transpose": slice(None, None, -1), "vector": along_k}
        way = ways[self.forms[right]]
        ranges = self.plan.schedule.chunk_ranges(block.of, block.at, self._own(block.of))
        indices = itertools.product(*ranges) if self.pieces[right] else [block.at]
        return (TaskRef((self.sources[right], *at[:-2], *at[-2:][way])) for at in indices)

    def _ranks(self, block: Block) -> list[int]:
        """Return the ranks of the chunks of a block when the product begins, in C order."""
        return self.plan.schedule.homes(block.of, block.at, self._own(block.of), self.pieces[block.of == "B"])

    def _along(self, block: Block, cuts: Any, broadcast: Any = (1,)) -> list[tuple[Any, int]]:
        """Return the operand's cuts along each dimension, given those of C, m, k and n, each with the block's index."""
        return list(zip(along_operand(block.of, cuts, self._own(block.of), broadcast), block.at, strict=True))

    def _chunk_edges(self, block: Block) -> tuple[tuple[int, ...], ...]:
        """Return the edges of the chunks of a block along each dimension."""
        return tuple(edges[n] for edges, n in self._along(block, self.plan.schedule.chunks, ((1,),)))
