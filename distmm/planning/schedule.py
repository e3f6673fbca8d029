"""The choices of a plan: how a product is cut into blocks, which worker owns which, and what is in memory at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from distmm.errors import InputError
from distmm.planning.blocks import Blocking, Wave, cut
from distmm.planning.grid import Grid
from distmm.planning.problem import Problem

__all__ = ["EXAMPLE", "LOOKAHEAD", "Schedule", "parse"]

# Steps whose blocks of A and B may be in memory at once: while one step computes, blocks of the next are transferred.
LOOKAHEAD = 2

# Text of a schedule, for messages.
EXAMPLE = "g2x1x1 b8192x8192x8192 p1 w1 l2"


@dataclass(frozen=True)
class Schedule:
    """How a product is computed. `str` writes it as one line, ``g2x1x1 b8192x8192x8192 p1 w1 l2``; `parse` reads it.

    Attributes
    ----------
    blocking : Blocking
        Edges of the blocks, and panels a task.
    grid : Grid
        Owners of the blocks, and the layers into which k is split.
    wave_cuts : tuple of int
        Most waves along the batch blocks, block rows and block columns of C.
    lookahead : int
        Steps whose blocks of A and B may be in memory at once.
    """

    blocking: Blocking
    grid: Grid
    wave_cuts: tuple[int, int, int] = (1, 1, 1)
    lookahead: int = LOOKAHEAD

    @cached_property
    def waves(self) -> tuple[Wave, ...]:
        """Waves in the order in which they are computed. All C blocks of one wave fit into the workers' memory."""
        return self.blocking.waves(self.wave_cuts, (self.grid.rows, self.grid.columns))

    @cached_property
    def kinds_of_waves(self) -> tuple[tuple[Wave, int], ...]:
        """One wave of each kind, and how many waves are of that kind: their blocks have the same edges."""
        kinds: dict[object, list[Wave]] = {}
        for wave in self.waves:
            blocks = *self.blocking.wave_batches(wave)[:1], wave.rows, wave.columns
            cuts = *self.blocking.batch[:1], self.blocking.m, self.blocking.n
            edges = tuple(cut[at.start : at.stop] for cut, at in zip(cuts, blocks, strict=True))
            kinds.setdefault((wave.triangle, edges), []).append(wave)
        return tuple((same[0], len(same)) for same in kinds.values())

    @property
    def wave_count(self) -> int:
        """Number of waves, without making them."""
        return self.blocking.count_waves(self.wave_cuts, (self.grid.rows, self.grid.columns))

    @property
    def steps(self) -> int:
        """Steps of the longest chain."""
        return self.blocking.chain_steps(self.grid.layers)

    @property
    def wave_orders(self) -> int:
        """Steps of a wave: those of its longest chain, and the levels of the tree that adds the layers."""
        parts = self.blocking.parts(self.grid.layers)
        return max(map(len, parts)) + (len(parts) - 1).bit_length()

    @property
    def tasks(self) -> int:
        """Product tasks of all chains; without the mirror images of a symmetric product."""
        return self.blocking.tasks(self.grid.layers)

    def __str__(self) -> str:
        grid, blocking = self.grid, self.blocking
        edges = [max(e) for e in (*blocking.batch, blocking.m, blocking.k, blocking.n)]
        waves = self.wave_cuts[self.wave_cuts[0] == 1 :] if max(self.wave_cuts) > 1 else (1,)
        lists = ([grid.rows, grid.columns, grid.layers], edges, [blocking.panels], waves, [self.lookahead])
        return " ".join(name + "x".join(map(str, values)) for name, values in zip("gbpwl", lists, strict=True))


def parse(text: str, problem: Problem) -> Schedule:
    """Read what `Schedule.__str__` wrote: ``g2x1x1 b8192x8192x8192 p1 w1 l2``, for any problem of as many dimensions.

    g: rows, columns and layers of the grid; b: edges of the blocks along batch dimensions, m, k and n; p: panels a
    task; w: waves down and across (before them along the batch); l: lookahead.

    Raises
    ------
    InputError
        For any other text.
    """
    fields = re.fullmatch(r"g(\d+x\d+x\d+) b(\d+(?:x\d+)*) p(\d+) w(\d+(?:x\d+){0,2}) l(\d+)", text.strip())
    lists = [[int(x) for x in group.split("x")] for group in fields.groups()] if fields else [[]]
    grid, edges, panels, waves, lookahead = lists if fields else ([], [], [], [], [])
    if len(edges) != 3 + len(problem.batch) or min(map(min, lists)) < 1:
        raise InputError(
            f"plan {text!r} does not fit a product of shape {problem.shape}; a plan reads like {EXAMPLE}: grid, block "
            f"edges ({', '.join(['batch'] * len(problem.batch) + ['m', 'k', 'n'])}), panels a task, waves, lookahead; "
            "all at least 1"
        )
    cuts = {1: (1, *(waves * 2)), 2: (1, *waves), 3: tuple(waves)}[len(waves)]
    if problem.symmetry is not None and cuts[1] != cuts[2]:
        raise InputError(
            f"plan {text!r}: a symmetric product has as many waves down as across, not w{cuts[1]}x{cuts[2]}"
        )
    return Schedule(cut(problem, edges, panels[0]), Grid(*grid), (cuts[0], cuts[1], cuts[2]), lookahead[0])
