"""What a plan says of itself: a table, and for notebooks a picture beside it.

The picture is drawn in light and dark: A on the left, B above, C where they meet; colours are owners.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from distmm.planning.owners import Owners
from distmm.planning.schedule import Schedule
from distmm.templates import filled
from distmm.units import count, scaled, size

if TYPE_CHECKING:
    from distmm.planning.plan import Plan

Home = Callable[[int, int], int]  # the rank where a block is


def rows(plan: Plan) -> list[tuple[str, str]]:
    """Return label and value of each row."""
    p, b, c, grid = plan.problem, plan.blocking, plan.cost, plan.grid
    m, k, n = b.largest
    what = "GPUs" if plan.cluster.device == "cuda" else "CPU workers"
    batch = f" x {math.prod(p.batch)} (batch {p.batch})" if p.batch else ""
    if isinstance(grid, Owners):
        workers = f"{grid.size} {what}: {grid.title}"
        bound = "2-D bound" if grid.fewest is None else "the fewest from where A and B are:"
    else:
        layers = f" x {grid.layers} (k is split)" if grid.layers > 1 else ""
        workers, bound = f"{grid.rows} x {grid.columns}{layers} {what}", "2-D bound"
    steps, panels = plan.schedule.steps, min(b.panels, plan.schedule.longest)
    chained = count(steps, "step")
    if panels > 1:
        chained += f" of {'up to ' * (len(b.k) % panels > 0)}{panels} panels{' each' * (steps > 1)}"
    waves = f", in {plan.schedule.wave_count} waves of" if plan.schedule.wave_count > 1 else ","
    what_by_what = f"{p.m} x {p.k} times {p.k} x {p.n}"
    blocks = count(b.c_blocks, "block of C")
    if p.symmetry is not None:
        what_by_what = f"{p.m} x {p.k} times its {'conjugate ' * (p.symmetry == 'hermitian')}transpose"
        blocks = f"{b.whole.c_blocks} of {blocks} (its lower triangle)"
    bits = "as if C were one block"
    if not plan.cluster.promises_bits:
        bits = "not promised: the kernel adds in an order of its own"
        bits += " (reproducible takes one that promises them)" if plan.cluster.device == "cuda" else ""
    elif not plan.keeps_bits:
        bits = f"differ with the cuts along k (multiples of {plan.cluster.granule} keep them the same)"
    fits = "yes" if plan.fits else "if C is read block by block"
    if plan.shortfall:
        fits = f"no: short by {size(plan.shortfall)} on each worker"
    idle = streamed = disk = early = ""
    if plan.idle_workers:
        idle = f"{plan.idle_workers} of {plan.cluster.workers} have no block of C: smaller blocks would use them"
    if plan.streamed and (slots := plan.peak.output_slots) is not None:
        streamed = f"does not fit: at most {slots} blocks a worker, which leave when they have been read"
    if plan.on_disk:
        rate = scaled(plan.cluster.load * plan.cluster.workers, "B/s")
        disk = f", with files read at {rate}, and without the time in which a disk writes C"
    if plan.run_seconds is not None:
        early = f"loses the work of about {plan.wave_seconds:.2g} s at most: a wave"
    table = [
        ("product", f"{what_by_what}{batch}, {p.dtype}, {p.flops:.3g} operations"),
        ("kernel", f"{plan.kernel or plan.cluster.kernel or 'automatic'}, precision {plan.precision}"),
        ("workers", workers),
        ("blocks", f"{m} x {k} x {n} (m x k x n), {blocks}{waves} {chained}"),
        ("tasks", f"{plan.schedule.tasks}"),
        ("memory", f"{size(plan.peak.worker)} a worker at most, {size(plan.cluster.memory)} are free"),
        ("lookahead", f"blocks of A and B of {plan.lookahead} steps in memory"),
        ("host memory", f"{size(plan.peak.host)} for each GPU" if plan.peak.host else ""),
        ("without work", idle),
        ("fits", fits),
        ("would do", "" if plan.fewest is None else _at_least(plan.fewest, what)),
        ("C", streamed),
        ("moved", f"{size(c.bytes_moved)} between workers ({bound} {size(c.bytes_bound)})"),
        ("bits", bits),
        ("time", f"about {c.seconds:.2g} s, limited by {c.bound_by}{disk}"),
        ("a stop", early),
        ("plan", str(plan)),
    ]
    return [(label, value) for label, value in table if value]


def _at_least(fewest: float, what: str) -> str:
    if fewest == math.inf:
        return f"no number of these {what}"
    return f"{fewest} {what if fewest > 1 else what[:-1]} and more"


# Lengths in pixels: the longest edge of C, and the gap between matrices.
SIZE, GAP = 240, 20

# Blocks along one edge that are drawn; more would be smaller than the border between them.
MOST = 64


class _Block(NamedTuple):
    """A rectangle of the picture. A mirror image in a symmetric product is pale, in the colour of its source."""

    x: float
    y: float
    width: float
    height: float
    rank: int
    colour: str
    image: bool
    title: str


def html(rows: list[tuple[str, str]], schedule: Schedule) -> str:
    """Return the table of a plan with its picture beside it.

    The picture has the blocks of the first batch block, with the names of the matrices and the ranks where the blocks
    are. Text and borders take the page's colour, which a dark notebook sets to a light one.
    """
    blocking, batch = schedule.blocking, (0,) * len(schedule.blocking.batch)

    def home(operand: Literal["A", "B"], *at: int) -> int:
        if operand == "B" and blocking.triangle:
            operand, at = "A", at[::-1]
        (rank,) = schedule.homes(operand, (*batch, *at), pieces=False)
        return rank

    def of(name: str, down: tuple[int, ...], across: tuple[int, ...], x: float, y: float, at: Home) -> Iterator[_Block]:
        rows, columns = ([edge * scale for edge in _drawn(edges)] for edges in (down, across))
        for i, j in itertools.product(range(len(rows)), range(len(columns))):
            block = i * len(down) // len(rows), j * len(across) // len(columns)
            image = name == "C" and blocking.triangle and i < j
            source = block[::-1] if image else block
            rank = at(*source)
            title = f"{name}{list(block)}: " + (f"C{list(source)} transposed, " if image else "") + f"worker {rank}"
            place = x + sum(columns[:j]), y + sum(rows[:i]), columns[j], rows[i]
            yield _Block(*place, rank, _colour(rank, schedule.grid.size), image, title)

    m, k, n = sum(blocking.m), sum(blocking.k), sum(blocking.n)
    scale = SIZE / max(m, k, n, 1)
    corner = k * scale + GAP  # of C: A is on its left, and B above it
    return filled(
        Path(__file__).with_name("plan.html"),
        rows=rows,
        blocks=[
            *of("A", blocking.m, blocking.k, 0, corner, partial(home, "A")),
            *of("B", blocking.k, blocking.n, corner, 0, partial(home, "B")),
            *of("C", blocking.m, blocking.n, corner, corner, lambda i, j: schedule.chains(batch, i, j)[0][0]),
        ],
        names=[("A", k * scale / 2, corner - 5), ("B", corner - 7, k * scale / 2 + 5), ("C", corner - 7, corner - 5)],
        size=(corner + n * scale + 2, corner + m * scale + 2),
    )


def _drawn(edges: tuple[int, ...]) -> tuple[float, ...]:
    """Edges to draw: all of them, or the largest number of equal ones that can be told apart."""
    return edges if len(edges) <= MOST else (sum(edges) / MOST,) * MOST


def _colour(rank: int, workers: int) -> str:
    """Return hues that are far apart for neighbours, and of a lightness that shows on white and on black."""
    golden = (math.sqrt(5) - 1) / 2
    hue = 360 * (rank / workers if workers <= 8 else rank * golden % 1)
    return f"hsl({hue:.0f} 65% 55%)"
