"""What a blocked product takes of the memory of one worker and of one host at the peak, from sizes alone.

Counted is what the graph holds by construction (see `distmm.runtime.window`): the blocks of C of a wave, blocks of A
and B of at most `lookahead` steps, and results that are being written or not yet freed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from distmm.cluster_spec import ClusterSpec, Residence
from distmm.cost import Peak
from distmm.geometry import Wave, accumulator_dtype
from distmm.layout import Ints, Layout

__all__ = ["peak"]

# Time until a block is freed after its last use: 6 ms on an idle cluster, 25 ms seen where processes starve for CPU.
RELEASE_SECONDS = 25e-3


def peak(
    layout: Layout,
    waves: tuple[Wave, ...],
    cluster: ClusterSpec,
    operands: tuple[Residence, Residence],
    result: Literal["workers", "host", "out"],
    lookahead: int,
) -> Peak:
    """Predict the peak of a product on `cluster`; the parameters are those of `distmm.cost.cost`."""
    largest = max(waves, key=lambda wave: wave.c_blocks)  # the first of them
    of_operands = _of_operands(layout, largest, cluster, operands, lookahead)
    if len(waves) > 1 and result != "out":
        of_operands = np.maximum(of_operands, _of_kept_operands(layout, waves, largest, cluster, operands))
    held = _of_c(layout, largest, len(waves) > 1, result) + of_operands
    writing = _writing(layout, cluster) * _block_bytes(layout, accumulator_dtype(layout.problem.dtype))[2]
    return Peak(int(held.max()) + writing, _on_host(layout, cluster, operands, result))


def _of_c(layout: Layout, largest: Wave, several: bool, result: str) -> Ints:
    """Bytes of C by rank: the sums of the largest wave, and finished blocks of that one or the others of `several`."""
    item, accumulator = layout.problem.dtype.itemsize, accumulator_dtype(layout.problem.dtype).itemsize
    held = layout.c_bytes(largest, accumulator, layout.layers) + layout.mirror_bytes(largest, item)
    if several and result == "out":  # finished blocks of a wave are being written while the next one begins
        held += layout.c_bytes(largest, item, 1)
    if several and result == "workers":
        held += _finished(layout, layout.blocking.whole) - _finished(layout, largest)
    return held


def _finished(layout: Layout, wave: Wave) -> Ints:
    """Bytes of the finished blocks of C of a wave, and their mirror images, by rank."""
    item = layout.problem.dtype.itemsize
    return layout.c_bytes(wave, item, 1) + layout.mirror_bytes(wave, item)


def _of_kept_operands(
    layout: Layout, waves: tuple[Wave, ...], largest: Wave, cluster: ClusterSpec, operands: tuple[Residence, Residence]
) -> Ints:
    """Bytes of A and B by rank where all waves are one graph, so that what one has loaded stays for those after it.

    Of A that is what one row of waves needs, of B all if there are several rows.
    """
    rows = {(wave.rows[0], wave.rows[-1]) for wave in waves}
    whole = layout.blocking.whole
    several = len(rows) > 1
    a, b = ("whole" if where == "streamed" else where for where in operands)
    needed = whole if whole.triangle else replace(largest, columns=whole.columns) if several else largest
    return _of_operands(layout, needed, cluster, (a, b if several else operands[1]), layout.steps)


def _of_operands(
    layout: Layout, largest: Wave, cluster: ClusterSpec, operands: tuple[Residence, Residence], lookahead: int
) -> Ints:
    """Bytes of A and B by rank, as they are and in the kernel's own format: of the window, or of the whole wave."""
    window = layout.operand_bytes(largest, slice(0, lookahead))
    wave = layout.operand_bytes(largest) if "whole" in operands or cluster.prepared else window
    held = window.received.copy()
    both = window.both if "streamed" in operands else wave.both
    held += ((window.received + both) * cluster.prepared).astype(np.int64)
    for where, of_window, of_wave in zip(operands, window.homes, wave.homes, strict=True):
        at_home = of_window if where == "streamed" else of_wave
        if where != "resident":
            held += at_home
        held += (at_home * cluster.prepared).astype(np.int64)
    return held


def _writing(layout: Layout, cluster: ClusterSpec) -> int:
    """Count the blocks of C that a worker writes beside those it holds.

    The D that a task has continued is freed by way of the scheduler: meanwhile short tasks write others.
    """
    blocking = layout.blocking
    tasks = blocking.tasks(layout.grid.layers)
    seconds = layout.problem.element_flops * blocking.c_elements / cluster.rate / max(1, tasks)
    freed_late = math.ceil(RELEASE_SECONDS / max(seconds, 1e-9)) if layout.steps > 1 else 0
    chains, on_gpu = max(1, layout.busiest), cluster.device == "cuda"
    # On one and two H200 one block more was there than the time explains, with products of 13 and of 44 ms; and of a
    # task with several panels the sum that it adds the last one to.
    writing = min(cluster.threads + freed_late + (on_gpu and freed_late > 0), chains)
    return writing + (on_gpu and blocking.panels > 1) * min(cluster.threads, chains)


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
