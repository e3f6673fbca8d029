"""The choices of a plan: how a product is cut into blocks, which worker owns which, and what is in memory at a time."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, product
from typing import Literal

import numpy as np

from distmm.errors import InputError
from distmm.planning.blocks import Blocking, Wave, cut, even_edges
from distmm.planning.families import of_family, of_grid
from distmm.planning.owners import FAMILIES, NOWHERE, Chunks, Grid, Owners, Places
from distmm.planning.problem import Problem, along_operand, operand_cuts

# Steps whose blocks of A and B may be in memory at once: while one step computes, blocks of the next are transferred.
LOOKAHEAD = 2

# Most workers of a plan, which has arrays with an element for each: a plan for more would take minutes, and memory.
MOST_WORKERS = 100_000

# Most blocks along a dimension, for the same reason: a plan lists the edge of each.
MOST_BLOCKS = 1 << 20

# Fewest chunks of a block that a worker joins before others read them, and most bytes of each: a worker takes 0.4 ms
# for each chunk that another one sends, and copies 1 MB in less.
FEWEST_GATHERED = 8
MOST_GATHERED = 1 << 20

# Text of a schedule, for messages.
EXAMPLE = "g2x1x1 b8192x8192x8192 p1 w1 l2"


@dataclass(frozen=True)
class Schedule:
    """How a product is computed. `str` writes it as one line, ``g2x1x1 b8192x8192x8192 p1 w1 l2``; `parse` reads it.

    Attributes
    ----------
    blocking : Blocking
        Edges of the blocks, and panels a task.
    grid : Grid or Owners
        Owners of the blocks: a grid with layers into which k is split, or a table for operands that are in memory.
    wave_cuts : tuple of int
        Most waves along the batch blocks, block rows and block columns of C.
    lookahead : int
        Steps whose blocks of A and B may be in memory at once.
    """

    blocking: Blocking
    grid: Grid | Owners
    wave_cuts: tuple[int, int, int] = (1, 1, 1)
    lookahead: int = LOOKAHEAD

    @cached_property
    def waves(self) -> tuple[Wave, ...]:
        """Waves in the order in which they are computed. All C blocks of one wave fit into the workers' memory."""
        return self.blocking.waves(self.wave_cuts, (self.grid.rows, self.grid.columns))

    @cached_property
    def kinds_of_waves(self) -> tuple[tuple[Wave, int], ...]:
        """One wave of each kind, and how many waves are of that kind (`Blocking.kinds_of_waves`)."""
        return self.blocking.kinds_of_waves(self.wave_cuts, (self.grid.rows, self.grid.columns))

    @property
    def wave_count(self) -> int:
        """Number of waves."""
        return sum(count for _, count in self.kinds_of_waves)

    @property
    def steps(self) -> int:
        """Steps of the longest chain."""
        return -(-self.longest // self.blocking.panels)

    @property
    def longest(self) -> int:
        """Panels of the longest chain."""
        return max(max(chains) for chains, _ in self.grid.lines(self.blocking))

    @property
    def wave_orders(self) -> int:
        """Steps of a wave: those of its longest chain, and the levels of the tree that adds the layers."""
        chains = max(len(chains) for chains, _ in self.grid.lines(self.blocking))
        return self.steps + (chains - 1).bit_length()

    @property
    def tasks(self) -> int:
        """Product tasks of all chains; without the mirror images of a symmetric product."""
        steps = 0
        for chains, blocks in self.grid.lines(self.blocking):
            steps += blocks * (sum(-(-panels // self.blocking.panels) for panels in chains) + len(chains) - 1)
        return steps

    def chains(self, batch: tuple[int, ...], i: int, j: int) -> list[tuple[int, Sequence[Sequence[int]]]]:
        """Return the chains that make ``C[*batch, i, j]``: the rank of each, and the panels of each of its steps.

        A tree adds the results of several chains. The rank of the first one gets the sum.
        """
        if isinstance(self.grid, Grid):
            return [(self.grid.owner(i, j, batch, layer), steps) for layer, steps in enumerate(self._parts)]
        length = self.blocking.panels
        return [
            (rank, [panels[at : at + length] for at in range(0, len(panels), length)])
            for rank, panels in self.grid.chains(i, j, len(self.blocking.k))
        ]

    def depths(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the elements along k of each step, and how many steps each block of C has.

        Their shapes are ``(blocks, steps)`` and ``(blocks,)``, or with 1 in place of `blocks` if all blocks are alike.
        The sums of partial blocks of C are steps too. Their few operations are not counted. All blocks of C have the
        same steps, unless a table says who multiplies what.
        """
        blocking = self.blocking
        blocks = [(i, j) for i in range(len(blocking.m)) for j in range(len(blocking.n))]
        if isinstance(self.grid, Grid):
            blocks = blocks[:1]
        chains = [self.chains((0,) * len(blocking.batch), i, j) for i, j in blocks]
        products = [[sum(blocking.k[p] for p in panels) for _, steps in made for panels in steps] for made in chains]
        tasks = np.array([len(steps) + len(made) - 1 for steps, made in zip(products, chains, strict=True)])
        depths = np.zeros((len(blocks), int(tasks.max())))
        for row, steps in zip(depths, products, strict=True):
            row[: len(steps)] = steps
        return depths, tasks

    def homes(
        self, operand: Literal["A", "B"], index: tuple[int, ...], own: tuple[int, ...] = (), pieces: bool = True
    ) -> list[int]:
        """Return the ranks at which the chunks of a block of A or B are when the product begins, in C order.

        Without `pieces`, only that of the first one. `own` are the operand's batch dimensions.
        """
        chunks = self.chunk_ranges(operand, index, own) if pieces or isinstance(self.grid, Owners) else ()
        if isinstance(self.grid, Owners):
            homes = self._homes[operand == "B"]
            return [homes[i][j] for i, j in islice(product(*chunks), None if pieces else 1)]
        *batch, row, column = index
        layer = (column if operand == "A" else row) // self.blocking.part_panels(self.grid.layers)
        return [self.grid.owner(row, column, tuple(batch), layer)] * math.prod(map(len, chunks))

    @property
    def chunks(self) -> tuple[Chunks, ...] | None:
        """Edges of the user's chunks in each block along (batch), m, k and n; None if each block is one chunk."""
        return self.grid.chunks

    def chunk_ranges(
        self, operand: Literal["A", "B"], index: tuple[int, ...], own: tuple[int, ...] = ()
    ) -> tuple[range, ...]:
        """Return which chunks make a block of A or B, along its batch dimensions, of lengths `own`, and its two."""
        if self.chunks is None:
            return tuple(range(at, at + 1) for at in index)
        firsts = along_operand(operand, self._first_chunks, own, [0, 1])
        return tuple(range(first[at], first[at + 1]) for first, at in zip(firsts, index, strict=True))

    def gathers(self, problem: Problem, device: Literal["cpu", "cuda"]) -> list[Literal["A", "B"]]:
        """Return the operands whose chunks CPU workers join before others read them: those of many small chunks."""
        if self.chunks is None or self.grid.size == 1 or device == "cuda":
            return []
        if isinstance(self.grid, Owners) and self.grid.homes.alike:
            return []  # chunks of an operand that is both A and B travel once, in whatever blocks they are

        def many_small(operand: Literal["A", "B"]) -> bool:
            own = problem.a_batch if operand == "A" else problem.b_batch
            edges, blocks = (operand_cuts(operand, cuts, own) for cuts in (self.cuts, self.blocking.cuts))
            chunks, arrays = math.prod(map(len, edges)), math.prod(map(len, blocks)) * self.grid.size
            small = math.prod(map(sum, edges)) * problem.dtype.itemsize <= chunks * MOST_GATHERED
            return small and chunks >= arrays * FEWEST_GATHERED

        operands: tuple[Literal["A", "B"], ...] = ("A",) if problem.symmetry else ("A", "B")
        return [of for of in operands if many_small(of)]

    @cached_property
    def _first_chunks(self) -> list[list[int]]:
        """Index of the first chunk of each block along (batch), m, k and n, and their number."""
        return [list(accumulate(map(len, blocks), initial=0)) for blocks in self.chunks or ()]

    @cached_property
    def cuts(self) -> Chunks:
        """Edges of the chunks of A, B and C along (batch), m, k and n: of the blocks, or of those that blocks unite."""
        if self.chunks is None:
            return self.blocking.cuts
        return tuple(tuple(edge for block in blocks for edge in block) for blocks in self.chunks)

    @cached_property
    def _homes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Rank of each chunk of A, and of B."""
        assert isinstance(self.grid, Owners)
        blocks = self.blocking
        a, b = self.grid.homes_of_chunks(len(blocks.m), len(blocks.k), len(blocks.n), blocks.triangle)
        return a.tolist(), b.tolist()

    @cached_property
    def _parts(self) -> tuple[tuple[range, ...], ...]:
        """Panels of each step, by layer."""
        assert isinstance(self.grid, Grid)
        return self.blocking.parts(self.grid.layers)

    def __str__(self) -> str:
        grid, blocking = self.grid, self.blocking
        edges = [max(e) for e in blocking.cuts]
        waves = self.wave_cuts[self.wave_cuts[0] == 1 :] if max(self.wave_cuts) > 1 else (1,)
        lists = (edges, [blocking.panels], waves, [self.lookahead])
        others = (name + "x".join(map(str, values)) for name, values in zip("bpwl", lists, strict=True))
        chunks = "" if self.chunks is None else " c" + "x".join(str(max(edges)) for edges in self.cuts)
        return " ".join((f"g{grid.text}", *others)) + chunks


def least_edge(size: int) -> int:
    """Return the least edge of blocks along a dimension. It is 0 for a dimension without elements."""
    return -(-size // MOST_BLOCKS)


def parse(text: str, problem: Problem, homes: Places = NOWHERE) -> Schedule:
    """Read what `Schedule.__str__` wrote: ``g2x1x1 b8192x8192x8192 p1 w1 l2``, for any problem of as many dimensions.

    g: rows, columns and layers of the grid, or what stays and the number of workers (``gk4``: see
    `distmm.planning.owners`); b: edges of the blocks along batch dimensions, m, k and n; p: panels a
    task; w: waves down and across (before them along the batch); l: lookahead; c, where blocks are unions of chunks:
    edges of the chunks in the same order. `homes` are those of the text's blocks, or chunks.

    Raises
    ------
    InputError
        For any other text.
    """
    fields = re.fullmatch(
        r"g(\d+x\d+x\d+|[rcabkRCABK]\d+) b(\d+(?:x\d+)*) p(\d+) w(\d+(?:x\d+){0,2}) l(\d+)(?: c(\d+(?:x\d+)*))?",
        text.strip(),
    )
    groups = fields.groups(default="") if fields else [""] * 6
    lists = [[int(x) for x in group.lstrip("rcabkRCABK").split("x") if x] for group in groups]
    grid, edges, panels, waves, lookahead, united = lists
    sizes = (*problem.batch, problem.m, problem.k, problem.n)
    sound = len(edges) == len(sizes) and min(map(min, (grid, panels, waves, lookahead))) >= 1
    sound = sound and math.prod(grid) <= MOST_WORKERS
    if united:
        sound = sound and len(united) == len(edges) and max(waves) == 1 and grid[2:] in ([], [1])
    if not sound or any(map(operator.lt, (*edges, *united), map(least_edge, (*sizes, *sizes)))):
        raise InputError(
            f"plan {text!r} does not fit a product of shape {problem.shape}; a plan reads like {EXAMPLE}: grid, block "
            f"edges ({', '.join(['batch'] * len(problem.batch) + ['m', 'k', 'n'])}), panels a task, waves, lookahead; "
            f"all at least 1, at most {MOST_WORKERS} workers, and at most {MOST_BLOCKS} blocks along a dimension"
        )
    cuts = {1: (1, *(waves * 2)), 2: (1, *waves), 3: tuple(waves)}[len(waves)]
    if problem.symmetry is not None and cuts[1] != cuts[2]:
        raise InputError(
            f"plan {text!r}: a symmetric product has as many waves down as across, not w{cuts[1]}x{cuts[2]}"
        )
    blocking = cut(problem, edges, panels[0])
    chunks = None
    if united:
        chunks = tuple(
            tuple(even_edges(block, edge) for block in blocks)
            for blocks, edge in zip(blocking.cuts, united, strict=True)
        )
    owners = _owners(text, grid, blocking, homes, max(cuts), chunks)
    return Schedule(blocking, owners, (cuts[0], cuts[1], cuts[2]), *lookahead)


def _owners(
    text: str,
    grid: list[int],
    blocking: Blocking,
    homes: Places,
    waves: int,
    chunks: tuple[Chunks, ...] | None,
) -> Grid | Owners:
    """Return the owners that a plan's text names."""
    family = text.strip()[1]
    if family not in FAMILIES:
        rows, columns, layers = grid
        whole = waves == layers == 1 and not blocking.batch and (homes.known or chunks is not None)
        if whole:
            return of_grid(Grid(rows, columns), blocking, homes, chunks)
        return Grid(rows, columns, layers, chunks=chunks)
    if blocking.batch or waves > 1 or (blocking.triangle and family in "abcABC"):
        raise InputError(
            f"plan {text!r}: owners by {family!r} are for one wave of one matrix"
            + (", and symmetric products have owners by 'k' or 'r'" if blocking.triangle else "")
            + f"; give a grid, as in {EXAMPLE}"
        )
    return of_family(family, blocking, homes, grid[0], chunks)
