"""What a plan says of bytes, tasks and memory, counted block by block, rank by rank and step by step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from distmm.planning.blocks import Wave
from distmm.planning.owners import Grid
from distmm.planning.plan import Plan
from distmm.planning.problem import operand_batch

Block = tuple[str, tuple[int, ...], int, int]  # matrix, its batch block, row, column


@dataclass(frozen=True)
class Task:
    """A step of a chain of C: where it runs, the blocks of A and B that it reads with homes, and the size of its D."""

    rank: int
    layer: int
    step: int
    reads: dict[Block, int]
    area: int
    c: tuple[int, ...]


@dataclass(frozen=True)
class BruteForce:
    """The tasks of a plan, and what they move and hold."""

    plan: Plan

    @cached_property
    def waves(self) -> list[list[Task]]:
        """Tasks of each wave."""
        return [list(self._tasks(wave)) for wave in self.plan.waves]

    def _tasks(self, wave: Wave) -> Iterator[Task]:
        problem, blocking = self.plan.problem, self.plan.blocking
        for batch, i, j in blocking.c_indices(wave):
            edges = [cut[x] for cut, x in zip(blocking.batch, batch, strict=True)]
            area = math.prod(edges) * blocking.m[i] * blocking.n[j]
            a, b = operand_batch(batch, problem.a_batch), operand_batch(batch, problem.b_batch)
            for layer, (rank, steps) in enumerate(self._chains(batch, i, j)):
                for s, panels in enumerate(steps):
                    reads = {}
                    for p in panels:
                        other: Block = ("B", b, p, j) if problem.symmetry is None else ("A", a, j, p)
                        for block in (("A", a, i, p), other):
                            reads |= self._chunks(block, layer)
                    yield Task(rank, layer, s, reads, area, (*batch, i, j))

    def _chains(self, batch: tuple[int, ...], i: int, j: int) -> list[tuple[int, list[list[int]]]]:
        """Ranks that multiply for a block of C, with the panels of each of their steps; the first one makes it."""
        blocking, grid, length = self.plan.blocking, self.plan.grid, self.plan.blocking.panels
        if isinstance(grid, Grid):
            parts = blocking.parts(grid.layers)
            return [(grid.owner(i, j, batch, x), [list(p) for p in steps]) for x, steps in enumerate(parts)]
        ranks = [grid.rank(i, p, j) for p in range(len(blocking.k))]
        mine = {rank: [p for p, at in enumerate(ranks) if at == rank] for rank in sorted(set(ranks))}
        cut = [(r, [panels[x : x + length] for x in range(0, len(panels), length)]) for r, panels in mine.items()]
        turn = (i + j) % len(cut)
        return cut[turn:] + cut[:turn]

    def _chunks(self, block: Block, layer: int) -> dict[Block, int]:
        """Homes of the chunks that a block is made of: of the block itself, if it is no union of chunks."""
        of, batch, row, column = block
        grid = self.plan.grid
        down, across = (-3, -2) if of == "A" else (-2, -1)
        rows, columns = self._indices(down, row), self._indices(across, column)
        if isinstance(grid, Grid):
            home, own = grid.owner(row, column, batch, layer), self._own(of)
            along = range(-3 - len(own), -3)
            stacks = (range(1) if n == 1 else self._indices(d, at) for d, n, at in zip(along, own, batch, strict=True))
            return {(of, chunk, i, j): home for chunk in product(*stacks) for i in rows for j in columns}
        homes, blocking = grid.homes[of == "B"], self.plan.blocking
        name, turned = "A" if grid.homes.alike else of, grid.homes.alike == "transposed" and of == "B"
        found = {}
        for i in rows:
            for j in columns:
                if of == "A":
                    lines = row + 1 if blocking.triangle else len(grid.table[0][0])
                    reader = grid.rank(row, column, (i + j) % lines)
                else:
                    reader = grid.rank((i + j) % len(grid.table), row, column)
                at = (j, i) if turned else (i, j)
                found[(name, batch, *at)] = reader if homes is None or homes[i][j] < 0 else homes[i][j]
        return found

    def _own(self, operand: str) -> tuple[int, ...]:
        return self.plan.problem.a_batch if operand == "A" else self.plan.problem.b_batch

    def _indices(self, dimension: int, block: int) -> range:
        chunks = self.plan.schedule.chunks
        if chunks is None:
            return range(block, block + 1)
        first = sum(len(each) for each in chunks[dimension][:block])
        return range(first, first + len(chunks[dimension][block]))

    def size(self, block: Block) -> int:
        """Bytes of a block of A or B."""
        name, batch, row, column = block
        own, (*stacks, m, k, n) = self._own(name), self.plan.schedule.cuts
        cuts = stacks[len(stacks) - len(own) :]
        matrices = math.prod(1 if n == 1 else cut[x] for n, cut, x in zip(own, cuts, batch, strict=True))
        down, across = (m, k) if name == "A" else (k, n)
        return matrices * down[row] * across[column] * self.plan.problem.dtype.itemsize

    @property
    def moved(self) -> int:
        """Bytes between workers: each block once in a wave to each rank that needs it, and the sums of layers."""
        total = 0
        for tasks in self.waves:
            copies = {(t.rank, block) for t in tasks for block, home in t.reads.items() if home != t.rank}
            total += sum(self.size(block) for _, block in copies)
        areas = sum(t.area for tasks in self.waves for t in tasks if t.step == 0 < t.layer)
        return total + areas * self.plan.problem.accumulator_bytes

    @property
    def tasks(self) -> int:
        """Steps of all chains, and the sums of the layers' parts."""
        return sum(1 + (t.step == 0 < t.layer) for tasks in self.waves for t in tasks)

    @property
    def held(self) -> int:
        """Bytes on the fullest worker at any time, if all chains are at the same step.

        That worker has the sums of its blocks of C, or the blocks themselves if one task makes each; of A and B the
        copies that it needs for `lookahead` steps, and what it has loaded; a new D for each thread and the one that is
        freed late; and what is finished and stays. With split k it then has the sums that it receives, beside the last
        `lookahead` - 1 steps.
        """
        plan = self.plan
        item, steps, most = plan.problem.dtype.itemsize, plan.schedule.steps, 0
        accumulator = plan.problem.accumulator_bytes
        finished: Counter[int] = Counter()
        loaded: dict[Block, int] = {}  # that stay for waves to come
        split = any(t.layer for tasks in self.waves for t in tasks)
        for tasks in self.waves:
            areas: dict[int, list[int]] = {}
            for t in tasks:
                if t.step == 0:
                    areas.setdefault(t.rank, []).append(t.area)
            received = self._received(tasks)
            homes = {block: home for t in tasks for block, home in t.reads.items()}
            for s in range(steps + split):
                first = s if s < steps else steps + 1 - plan.lookahead
                now = [t for t in tasks if first <= t.step < first + plan.lookahead]
                copies = {(t.rank, block) for t in now for block, home in t.reads.items() if home != t.rank}
                window = {block: home for t in now for block, home in t.reads.items()}
                held = Counter(finished)
                for rank, block in copies:
                    held[rank] += self.size(block)
                for block, home in (homes | loaded).items():
                    where = plan.operands[block[0] == "B"]
                    here = where == "whole" or (where != "resident" and (block in window or block in loaded))
                    held[home] += self.size(block) * here
                for rank, own in areas.items():
                    writing = min(plan.cluster.threads + (steps > 1), len(own))
                    held[rank] += sum(own) * (item if steps == 1 and not split else accumulator)
                    held[rank] += received[rank] * (s == steps) * accumulator
                    held[rank] += writing * min(own) * accumulator
                most = max(most, *held.values())
            if plan.result != "out":
                stay = [x for x, at in zip("AB", plan.operands, strict=True) if at == "kept" or not plan.streamed]
                loaded = {
                    block: home
                    for block, home in (loaded | homes).items()
                    if block[0] in stay and self._is_read_later(block, tasks)
                }
            if plan.result == "workers" and not plan.streamed:
                for t in tasks:  # the tree of sums ends on layer 0
                    finished[t.rank] += t.area * item * (t.step == t.layer == 0)
        return most

    def _received(self, tasks: list[Task]) -> Counter[int]:
        """Elements of the sums of others that ranks hold at a time."""
        received: Counter[int] = Counter()
        chains: dict[tuple[int, ...], list[Task]] = {}
        for t in tasks:
            if t.step == 0:
                chains.setdefault(t.c, []).append(t)
        for each in chains.values():
            if isinstance(self.plan.grid, Grid):
                received.update({t.rank: t.area for t in each})
                continue
            adding: dict[int, int] = {}  # one sum at a time of those that the tree of a block brings
            while len(each) > 1:
                adding |= {t.rank: t.area for t in each[: len(each) // 2 * 2 : 2]}
                each = each[::2]
            received.update(adding)
        return received

    def _is_read_later(self, block: Block, tasks: list[Task]) -> bool:
        later = self.waves[self.waves.index(tasks) + 1 :]
        return any(block in t.reads for wave in later for t in wave)
