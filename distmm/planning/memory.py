"""What a blocked product takes of the memory of one worker and of one host at the peak, from sizes alone.

Counted is what the runtime holds by construction: the blocks of C of a wave and those of others that it has places for
(`distmm.scheduler.output_slots`), blocks of A and B of at most `lookahead` steps (`distmm.scheduler.lookahead`), in the
kernel's own format those of one step (`distmm.worker.gpu.Prepared`), and results that are being written or not
yet freed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from distmm.planning.cluster_spec import ClusterSpec, Residence
from distmm.planning.cost import CHAIN_SECONDS, Peak
from distmm.planning.geometry import Wave, accumulator_dtype
from distmm.planning.layout import Ints, Layout, Traffic
from distmm.planning.overlap_model import still_leaving

__all__ = ["peak"]

# Time until a block is freed after its last use. On CPU clusters 6 ms, and 25 seen where processes starve for CPU; on
# one and two H200 up to 10 ms: with products of 1.6, 5, 13 and 20 ms, 6, 3, 2 and 2 blocks of C were there too many.
RELEASE_SECONDS = {"cpu": 25e-3, "cuda": 12e-3}

# Elements of a byte in a line of the second-level cache of GPUs.
LINE = 128


def peak(
    layout: Layout,
    waves: tuple[Wave, ...],
    cluster: ClusterSpec,
    operands: tuple[Residence, Residence],
    result: Literal["workers", "host", "out"],
    lookahead: int,
) -> Peak:
    """Predict the peak of a product on `cluster`; the parameters are those of `distmm.planning.cost.cost`."""
    largest, several = max(waves, key=lambda wave: wave.c_blocks), len(waves) > 1  # the first of the largest
    item = layout.problem.dtype.itemsize
    of_operands = _of_operands(layout, largest, operands, lookahead)
    if several and result != "out":
        of_operands = np.maximum(of_operands, _of_kept_operands(layout, waves, largest, operands))
    held = _of_c(layout, largest, several, result) + of_operands
    prepared, places = 0, None
    if cluster.device == "cuda":
        step = layout.operand_bytes(largest, slice(0, 1))
        prepared = _prepared_elements(layout, step, several)
        held += math.ceil(prepared * item * cluster.prepared * _padding(layout.blocking.k))
        held += min(cluster.threads, max(1, layout.busiest)) * cluster.workspace
        if layout.steps > 1:
            held += _loaded_early(step, cluster, operands)
    if several and result == "out":
        own = layout.chains(largest)
        most = int(own.max())
        places = most + still_leaving(layout.problem, layout.blocking, cluster, result, most)
        finished = _block_bytes(layout, layout.problem.dtype)[2] * (1 + (layout.problem.symmetry == "hermitian"))
        held += (places - own) * finished
    writing = _writing(layout, cluster) * _block_bytes(layout, accumulator_dtype(layout.problem.dtype))[2]
    return Peak(int(held.max()) + writing, _on_host(layout, cluster, operands, result), places, prepared)


def _prepared_elements(layout: Layout, step: Traffic, several: bool) -> int:
    """Elements of A and B that a worker keeps in the kernel's own format: those of a step, and of one task of the next.

    Tasks of the next step begin while the last ones of a step are at work.
    """
    of_step = int((step.received + step.both + sum(step.homes)).max())
    a, b, _ = _block_bytes(layout, layout.problem.dtype)
    of_task = layout.blocking.panels * (a + b) if several or layout.steps > 1 else 0
    return (of_step + of_task) // layout.problem.dtype.itemsize


def _padding(edges: tuple[int, ...]) -> float:
    """Bytes of rows in a kernel's own format, those between rows included, for each of their own.

    They begin at multiples of 128 elements at most, and only where that takes no more than 6.2 %.
    """
    if all(edge % LINE == 0 for edge in edges):
        return 1.0
    return 1 + min((LINE - 1) / max(edges), 0.062)


def _of_c(layout: Layout, largest: Wave, several: bool, result: str) -> Ints:
    """Bytes of C by rank: the sums of the largest wave, and finished blocks of the others of `several` that stay."""
    item, accumulator = layout.problem.dtype.itemsize, accumulator_dtype(layout.problem.dtype).itemsize
    held = layout.c_bytes(largest, accumulator, layout.layers) + layout.mirror_bytes(largest, item)
    if several and result == "workers":
        held += _finished(layout, layout.blocking.whole) - _finished(layout, largest)
    return held


def _finished(layout: Layout, wave: Wave) -> Ints:
    """Bytes of the finished blocks of C of a wave, and their mirror images, by rank."""
    item = layout.problem.dtype.itemsize
    return layout.c_bytes(wave, item, 1) + layout.mirror_bytes(wave, item)


def _of_kept_operands(
    layout: Layout, waves: tuple[Wave, ...], largest: Wave, operands: tuple[Residence, Residence]
) -> Ints:
    """Bytes of A and B by rank where all waves are one graph, so that what one has loaded stays for those after it.

    Of A that is what one row of waves needs, of B all if there are several rows.
    """
    rows = {(wave.rows[0], wave.rows[-1]) for wave in waves}
    whole = layout.blocking.whole
    several = len(rows) > 1
    a, b = ("whole" if where == "streamed" else where for where in operands)
    needed = whole if whole.triangle else replace(largest, columns=whole.columns) if several else largest
    return _of_operands(layout, needed, (a, b if several else operands[1]), layout.steps)


def _of_operands(layout: Layout, largest: Wave, operands: tuple[Residence, Residence], lookahead: int) -> Ints:
    """Bytes of A and B by rank: of the window, or of the whole wave."""
    window = layout.operand_bytes(largest, slice(0, lookahead))
    wave = layout.operand_bytes(largest) if "whole" in operands else window
    held = window.received.copy()
    for where, of_window, of_wave in zip(operands, window.homes, wave.homes, strict=True):
        if where != "resident":
            held += of_window if where == "streamed" else of_wave
    return held


def _loaded_early(step: Traffic, cluster: ClusterSpec, operands: tuple[Residence, Residence]) -> Ints:
    """Bytes of A and B by rank that GPUs load before those are freed that the step before has used.

    The scheduler asks for loads when it has heard of the step's end.
    """
    loaded = sum(home for home, where in zip(step.homes, operands, strict=True) if where == "streamed")
    early: Ints = np.minimum(loaded, cluster.load * (RELEASE_SECONDS["cuda"] - CHAIN_SECONDS)).astype(np.int64)
    return early


def _writing(layout: Layout, cluster: ClusterSpec) -> int:
    """Count the blocks of C that a worker writes beside those it holds.

    The D that a task has continued is freed by way of the scheduler: meanwhile short tasks write others.
    """
    blocking = layout.blocking
    tasks = blocking.tasks(layout.grid.layers)
    seconds = layout.problem.element_flops * blocking.c_elements / cluster.rate / max(1, tasks)
    freed_late = math.ceil(RELEASE_SECONDS[cluster.device] / max(seconds, 1e-9)) if layout.steps > 1 else 0
    chains, on_gpu = max(1, layout.busiest), cluster.device == "cuda"
    # On one and two H200 one block more was there than the time explains, with products of 13 and of 44 ms; and of a
    # task with several panels the sum that it adds the last one to, until that product is queued.
    writing = min(cluster.threads + freed_late + (on_gpu and freed_late > 0), chains)
    return writing + (on_gpu and blocking.panels > 1)


def _on_host(layout: Layout, cluster: ClusterSpec, operands: tuple[Residence, Residence], result: str) -> int:
    """Bytes of host memory for each GPU: blocks on their way, and results that stay.

    On its way to or from each thread is one block, and as many of C that are being written are without a thread.
    """
    if cluster.device != "cuda":
        return 0
    a, b, c = _block_bytes(layout, layout.problem.dtype)
    travels = (operands[0] == "streamed", operands[1] == "streamed", result != "workers")
    on_the_way = max(size * does for size, does in zip((a, b, c), travels, strict=True))
    stays = int(_finished(layout, layout.blocking.whole).max()) if result == "host" else 0
    written = c if result == "out" else 0
    return (on_the_way + written) * cluster.threads + stays


def _block_bytes(layout: Layout, dtype: np.dtype) -> tuple[int, int, int]:
    """Bytes of the largest blocks of A, B and C, in one type."""
    m, k, n = layout.blocking.largest
    item = math.prod(map(max, layout.blocking.batch)) * dtype.itemsize
    return m * k * item, k * n * item, m * n * item
