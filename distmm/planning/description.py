"""What a plan says of itself: a table, and for notebooks a picture beside it.

The picture is drawn in light and dark: A on the left, B above, C where they meet; colours are owners.
"""

from __future__ import annotations

import html as escape
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from distmm.planning.owners import Owners
from distmm.planning.schedule import Schedule
from distmm.units import count, scaled, size

if TYPE_CHECKING:
    from distmm.planning.plan import Plan


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
    waves = f", in {len(plan.waves)} waves of" if len(plan.waves) > 1 else ","
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
        ("tasks", f"{c.tasks}"),
        ("memory", f"{size(c.peak_bytes)} a worker at most, {size(plan.cluster.memory)} are free"),
        ("lookahead", f"blocks of A and B of {plan.lookahead} steps in memory"),
        ("host memory", f"{size(c.peak_host_bytes)} for each GPU" if c.peak_host_bytes else ""),
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


# Lengths in pixels: the longest edge of C, the gap between matrices, and the smallest block that still gets a border.
SIZE, GAP, SMALLEST = 240, 20, 4

# Blocks along one edge that are drawn; more would be smaller than the border between them.
MOST = 64


def html(rows: list[tuple[str, str]], schedule: Schedule) -> str:
    """Return the table of a plan with its picture beside it."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape.escape(label)}</th>"
        f"<td style='text-align:left'>{escape.escape(value)}</td></tr>"
        for label, value in rows
    )
    return f"<div style='display:flex;gap:2em;align-items:center'><table>{cells}</table>{svg(schedule)}</div>"


def svg(schedule: Schedule) -> str:
    """Draw the blocks of the first batch block, with the names of the matrices and the ranks where the blocks are.

    Text and borders take the page's colour, which a dark notebook sets to a light one.
    """
    blocking, batch = schedule.blocking, (0,) * len(schedule.blocking.batch)

    def home_of_a(i: int, p: int) -> int:
        return schedule.homes("A", batch, i, [p])[0]

    def home_of_b(p: int, j: int) -> int:
        return schedule.homes("A", batch, j, [p])[0] if blocking.triangle else schedule.homes("B", batch, j, [p])[0]

    def owner(i: int, j: int) -> int:
        return schedule.chains(batch, i, j)[0][0]

    workers = schedule.grid.size
    m, k, n = sum(blocking.m), sum(blocking.k), sum(blocking.n)
    scale = SIZE / max(m, k, n, 1)
    left, top = k * scale + GAP, k * scale + GAP
    parts = [
        _matrix("A", blocking.m, blocking.k, (0, top), scale, home_of_a, workers),
        _matrix("B", blocking.k, blocking.n, (left, 0), scale, home_of_b, workers),
        _matrix("C", blocking.m, blocking.n, (left, top), scale, owner, workers, blocking.triangle),
    ]
    places = (("A", k * scale / 2, top - 5), ("B", left - 7, k * scale / 2 + 5), ("C", left - 7, top - 5))
    parts += [
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='14' font-weight='bold' text-anchor='middle' fill='currentColor'>"
        f"{name}</text>"
        for name, x, y in places
    ]
    width, height = left + n * scale + 2, top + m * scale + 2
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='-1 -1 {width:.0f} {height:.0f}' width='{width:.0f}' "
        f"height='{height:.0f}' role='img' style='color:inherit'><title>Blocks of A, B and C by owner</title>"
        f"{''.join(parts)}</svg>"
    )


def _matrix(
    name: str,
    down: tuple[int, ...],
    across: tuple[int, ...],
    at: tuple[float, float],
    scale: float,
    owner: Callable[[int, int], int],
    workers: int,
    triangle: bool = False,
) -> str:
    """Draw one matrix: each block in its owner's colour, with the owner's rank where there is room.

    In a `triangle`, mirror images are pale, in the colour of the worker that holds them and their source.
    """
    shapes = []
    rows, columns = _drawn(down), _drawn(across)
    y = at[1]
    for i, height in enumerate(rows):
        x = at[0]
        for j, width in enumerate(columns):
            image = triangle and i < j
            block = i * len(down) // len(rows), j * len(across) // len(columns)
            source = block[::-1] if image else block
            rank, w, h = owner(*source), width * scale, height * scale
            title = f"{name}{list(block)}: " + (f"C{list(source)} transposed, " if image else "") + f"worker {rank}"
            border = " stroke='currentColor' stroke-opacity='.45'" if min(w, h) >= SMALLEST else ""
            shapes.append(
                f"<rect x='{x:.1f}' y='{y:.1f}' width='{w:.1f}' height='{h:.1f}' fill='{_colour(rank, workers)}' "
                f"fill-opacity='{'.12' if image else '.55'}'{border}><title>{title}</title></rect>"
            )
            if min(w, h) >= 5 * SMALLEST and not image:
                shapes.append(
                    f"<text x='{x + w / 2:.1f}' y='{y + h / 2 + 4:.1f}' font-size='11' text-anchor='middle' "
                    f"fill='currentColor'>{rank}</text>"
                )
            x += w
        y += height * scale
    return "".join(shapes)


def _drawn(edges: tuple[int, ...]) -> tuple[float, ...]:
    """Edges to draw: all of them, or the largest number of equal ones that can be told apart."""
    return edges if len(edges) <= MOST else (sum(edges) / MOST,) * MOST


def _colour(rank: int, workers: int) -> str:
    """Return hues that are far apart for neighbours, and of a lightness that shows on white and on black."""
    golden = (math.sqrt(5) - 1) / 2
    hue = 360 * (rank / workers if workers <= 8 else rank * golden % 1)
    return f"hsl({hue:.0f} 65% 55%)"
