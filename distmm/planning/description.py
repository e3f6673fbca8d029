"""What a plan says of itself, as a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from distmm.planning.owners import Owners
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
