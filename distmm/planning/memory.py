"""Memory that a product needs on one worker, and on one host, at the peak.

An upper bound of what the runtime holds by construction:

- the blocks of C of a wave, and finished blocks of other waves: all of them, or those that still have a slot
  (`distmm.scheduler.output_slots`);
- blocks of A and B of at most `lookahead` steps (`distmm.scheduler.lookahead`), and those of one step in the kernel's
  own format (`distmm.worker.prepared_operands`);
- on CPU clusters, copies of small chunks for other workers (`Schedule.gathers`), and the blocks that tasks join;
- with split k, sums that come from other layers of the grid. A worker fetches them for all its chains at once;
- results that are being written, or that the scheduler has not freed yet.

It does not count what other tasks hold. If a task of the user's graph runs on a worker that does not own the block of C
that it reads, that worker holds a copy of the block until the block is released.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from distmm.planning.blocks import Wave, are_even
from distmm.planning.cluster_spec import ClusterSpec, Residence, Result
from distmm.planning.grid_layout import GridLayout
from distmm.planning.layout import Ints, Traffic
from distmm.planning.table_layout import TableLayout
from distmm.planning.time_model import TimeModel

# Time until a block is freed after its last use. On CPU clusters it is 6 ms, and 25 ms if the cores are overloaded. On
# one and two H200 it is up to 10 ms: products of 1.6, 5, 13 and 20 ms left 6, 3, 2 and 2 blocks of C not yet freed.
RELEASE_SECONDS = {"cpu": 25e-3, "cuda": 12e-3}

# Time in which GPUs already load blocks of the next step while those of the last step are not freed yet: freeing takes
# 12 ms, and the loads begin 6 ms after the end of the step, when the scheduler has been told of it.
LOADS_BEFORE_RELEASE_SECONDS = 6e-3

# Operands whose blocks are loaded or made step by step.
BY_STEP = ("loaded", "made", "kept")

# Most panels of one launch: that of `distmm_kernels.tiles.hopper_tiles`, which the client does not import.
MOST_PANELS = 8

# Number of one-byte elements in a line of the second-level cache of GPUs.
LINE = 128


class Peak(NamedTuple):
    """Bytes at the peak, and the limits by which the workers stay below them.

    Attributes
    ----------
    worker : int
        Largest sum of blocks on one worker: its blocks of C, blocks that are being written or not yet freed, its own
        blocks of A and B that are in memory, and copies from other workers for as many steps as the lookahead.
    host : int
        On GPU clusters: host memory per GPU, for blocks that are copied to or from it and for results that stay.
    output_slots : int or None
        Blocks of C that a worker may hold at a time, from their first step until they leave the worker
        (`distmm.scheduler.output_slots`); None if they stay, or if C is one wave.
    slot : int
        Bytes of such a block, and of its mirror image.
    most_prepared : int
        Elements of A and B that a GPU worker keeps in the kernel's own format (`distmm.worker.prepared_operands`).
    """

    worker: int
    host: int
    output_slots: int | None
    slot: int
    most_prepared: int


def staying(operands: tuple[Residence, Residence], result: Result, streamed: bool) -> tuple[bool, bool]:
    """Return whether blocks of A, and of B, that one wave has loaded stay in the workers' memory for the next ones."""
    kept = set() if result == "out" else {"kept"} if streamed else {*BY_STEP}
    return operands[0] in kept, operands[1] in kept


@dataclass(frozen=True)
class MemoryModel:
    """Predicts memory, for a schedule on `cluster` with A and B where `operands` says and C where `result` says.

    If `streamed`, blocks of C leave when the tasks that read them are done. `least` asks for a lower bound of the peak:
    of one kind of waves, and one range of steps.
    """

    layout: GridLayout | TableLayout
    cluster: ClusterSpec
    operands: tuple[Residence, Residence]
    result: Result
    streamed: bool = False
    least: bool = False

    def peak(self) -> Peak:
        """Return the peak of one worker and of one host, and the limits that keep to it."""
        blocking, schedule = self.layout.blocking, self.layout.schedule
        kinds = [wave for wave, _ in schedule.kinds_of_waves]
        # With uneven chunks the wave with the most blocks may not be the largest. In a symmetric product a rectangle
        # needs more of A than a triangle. So each kind of wave counts there.
        even = self.layout.problem.symmetry is None and all(map(are_even, (blocking.m, blocking.n, *blocking.batch)))
        if even or self.least:
            kinds = [max(kinds, key=lambda wave: wave.c_blocks)]
        peaks = [self._peak_of(wave) for wave in kinds]
        slots = max((each.output_slots for each in peaks if each.output_slots is not None), default=None)
        worker, prepared = max(each.worker for each in peaks), max(each.most_prepared for each in peaks)
        slot = peaks[0].slot
        staying = 0
        if self.result == "host":
            staying = int(self._finished(blocking.whole).max()) if slots is None else slots * slot
        return Peak(worker, self._on_host() + staying, slots, slot, prepared)

    def _peak_of(self, largest: Wave) -> Peak:
        """Predict the peak while one wave is computed; without host memory."""
        layout, cluster, result, streamed = self.layout, self.cluster, self.result, self.streamed
        problem, schedule = layout.problem, layout.schedule
        several, item = schedule.wave_count > 1, problem.dtype.itemsize
        of_operands = self._of_needed_operands(largest, schedule.lookahead)
        if layout.layers > 1:  # while layers are added, operands of one step fewer are open
            while_adding = self._of_needed_operands(largest, schedule.lookahead - 1)
            of_operands = np.maximum(of_operands, while_adding + self._of_received_sums(largest))
        # If each block of C is made by one task, sums of accumulators exist only while a task runs.
        of_sums = item if self._each_by_one_task() else problem.accumulator_bytes
        held = layout.c_bytes(largest, of_sums, layout.layers) + layout.mirror_bytes(largest, item)
        if several and result == "workers" and not streamed:
            held += self._finished(layout.blocking.whole) - self._finished(largest)
        held += of_operands
        prepared, slots = 0, None
        if schedule.chunks is not None and cluster.device == "cpu":  # a running task joins chunks into blocks
            a, b, _ = self._block_bytes(item)
            held += cluster.threads * min(layout.blocking.panels, len(layout.blocking.k)) * (a + b)
            held += layout.gathered_bytes(largest)
        if cluster.device == "cuda":
            steps = (layout.operand_bytes(largest, at) for at in self._windows(1, self.operands))
            step = max(steps, key=lambda each: int((each.received + each.both + sum(each.homes)).max()))
            prepared = self._prepared_elements(step)
            edges = layout.blocking.m, layout.blocking.k, layout.blocking.n
            held += math.ceil(prepared * item * cluster.prepared * max(map(_padding, edges)))
            if schedule.chunks is not None:  # joined chunks, which stay as long as what is prepared of them
                held += prepared * item
            # A running task copies one block at a time.
            copied = math.ceil(cluster.copied * max(self._block_bytes(item)[:2]))
            held += min(cluster.threads, max(1, layout.busiest)) * (cluster.workspace + copied)
            if schedule.steps > 1:
                held += self._loaded_early(step)
        slot = self._block_bytes(item)[2] * (1 + (problem.symmetry == "hermitian"))
        if several and (result in ("out", "reduced") or streamed):
            own = layout.chains(largest)
            most = int(own.max())
            # A block that is reduced leaves when it is finished.
            slots = most + (0 if result == "reduced" else self._blocks_leaving_late(most))
            held += (slots - own) * slot
        writing = self._blocks_written() * self._block_bytes(problem.accumulator_bytes)[2]
        return Peak(int(held.max()) + writing, 0, slots, slot, prepared)

    def _prepared_elements(self, step: Traffic) -> int:
        """Elements of A and B that a worker keeps in the kernel's own format: of one step, and of one task of the next.

        Tasks of the next step begin while the last ones of a step run.
        """
        schedule, item = self.layout.schedule, self.layout.problem.dtype.itemsize
        of_step = int((step.received + step.both + sum(step.homes)).max())
        a, b, _ = self._block_bytes(item)
        of_task = schedule.blocking.panels * (a + b) if schedule.wave_count > 1 or schedule.steps > 1 else 0
        return (of_step + of_task) // item

    def _blocks_leaving_late(self, chains: int) -> int:
        """Count the finished blocks that need a slot in addition to the blocks of the next wave, at most `chains`.

        Extra slots let the next wave start without waiting for copies of C. The first block leaves when one product is
        done, and the last chain of the next wave begins ``2 * chains - 2`` products after that. One more block is being
        copied.
        """
        product, block = TimeModel(self.layout, self.cluster, self.operands, "out").paces()
        left = math.floor((2 * chains - 2) * product / block) if block else chains
        return min(chains, 1 + max(0, chains - left))

    def _finished(self, wave: Wave) -> Ints:
        """Bytes of the finished blocks of C of a wave, and their mirror images, by rank."""
        item = self.layout.problem.dtype.itemsize
        return self.layout.c_bytes(wave, item, 1) + self.layout.mirror_bytes(wave, item)

    def _of_needed_operands(self, largest: Wave, lookahead: int) -> Ints:
        """Bytes of A and B by rank, while `lookahead` steps of a wave are open."""
        of_operands = self._of_operands(largest, self.operands, lookahead)
        if self.layout.schedule.wave_count > 1 and any(staying(self.operands, self.result, self.streamed)):
            of_operands = np.maximum(of_operands, self._of_kept_operands(largest, lookahead))
        return of_operands

    def _of_received_sums(self, largest: Wave) -> Ints:
        """Bytes of the sums by rank that come from other ranks, in the waves that add sums at the same time.

        The last addition of a wave and the first one of the next wave are `steps` + 1 orders apart. A long lookahead
        opens both.
        """
        layout, schedule = self.layout, self.layout.schedule
        waves = min(schedule.wave_count, 1 + (schedule.lookahead - 1) // (schedule.steps + 1))
        return waves * layout.sums_at_once(largest)

    def _of_kept_operands(self, largest: Wave, lookahead: int) -> Ints:
        """Bytes of A and B by rank if waves read what earlier waves have loaded: of all of it, or of what is kept.

        All waves of a row read the same rows of A. Each row of waves reads all of B.
        """
        schedule, whole = self.layout.schedule, self.layout.blocking.whole
        rows, columns = largest.rows != whole.rows, largest.columns != whole.columns
        again = (True, True) if whole.triangle else (columns, rows)
        stay = staying(self.operands, self.result, self.streamed)
        a, b = ("whole" if all(kept) else at for at, *kept in zip(self.operands, stay, again, strict=True))
        read = whole if whole.triangle else replace(largest, columns=whole.columns) if rows else largest
        if not self.streamed:
            return self._of_operands(read, (a, b), schedule.steps)
        return self._of_operands(largest, (a, b), lookahead, read)

    def _of_operands(
        self, largest: Wave, operands: tuple[Residence, Residence], lookahead: int, read: Wave | None = None
    ) -> Ints:
        """Bytes of A and B by rank: of `lookahead` steps of a wave, and of all that `read` needs of whole operands."""
        held, kept = [], np.zeros(self.layout.grid.size, np.int64)
        for steps in self._windows(lookahead, operands):
            window = self.layout.operand_bytes(largest, steps)
            held.append(window.received + sum(x for x, at in zip(window.homes, operands, strict=True) if at in BY_STEP))
        if "whole" in operands:
            homes = self.layout.operand_bytes(read or largest).homes
            kept += sum(x for x, at in zip(homes, operands, strict=True) if at == "whole")
        return np.max(held, axis=0) + kept

    def _windows(self, length: int, operands: tuple[Residence, Residence]) -> Iterator[slice]:
        """Ranges of `length` steps that may need the most memory."""
        return islice(self.layout.windows(length, not set(operands) <= set(BY_STEP)), 1 if self.least else None)

    def _loaded_early(self, step: Traffic) -> Ints:
        """Bytes of A and B by rank that GPUs load before the blocks of the previous step are freed."""
        loaded = sum(home for home, where in zip(step.homes, self.operands, strict=True) if where in BY_STEP)
        return np.minimum(loaded, self.cluster.load * LOADS_BEFORE_RELEASE_SECONDS).astype(np.int64)

    def _blocks_written(self) -> int:
        """Count the blocks of C that a worker writes in addition to those that it holds.

        A task continues the sum D of the task before. The scheduler frees that D some time later; meanwhile short tasks
        write more of them.
        """
        layout, schedule, cluster = self.layout, self.layout.schedule, self.cluster
        chains, on_gpu, panels = max(1, layout.busiest), cluster.device == "cuda", layout.blocking.panels
        if on_gpu and self._each_by_one_task():
            # Beside its block of C, a task holds the sum of its panels but the last, and the sum that is converted to
            # the type of C or multiplied by alpha.
            converts = layout.problem.dtype.itemsize != layout.problem.accumulator_bytes
            sums = 0 if self._in_one_launch() else max(1, (panels > 1) + converts)
            return min(cluster.threads, chains) * sums
        flops = layout.problem.element_flops * layout.blocking.c_elements
        seconds = flops / cluster.rate / max(1, schedule.tasks)
        freed_late = math.ceil(RELEASE_SECONDS[cluster.device] / max(seconds, 1e-9)) if schedule.steps > 1 else 0
        # On one and two H200 there was one block more than this time explains, with products of 13 and of 44 ms. A task
        # with several panels also holds the sum of all panels but the last, until the last product is queued.
        writing = min(cluster.threads + freed_late + (on_gpu and freed_late > 0), chains)
        return writing + (on_gpu and panels > 1)

    def _each_by_one_task(self) -> bool:
        """Whether each block of C is made by one task."""
        return self.layout.schedule.steps == self.layout.layers == 1

    def _in_one_launch(self) -> bool:
        """Whether a task is one launch. Kernels join panels of one length, except for the last, of single matrices."""
        blocking = self.layout.blocking
        joined = blocking.panels <= MOST_PANELS and are_even(blocking.k) and not blocking.batch
        return self.cluster.one_launch and (blocking.panels == 1 or joined)

    def _on_host(self) -> int:
        """Bytes of host memory per GPU: one block in transfer for each thread, and one that is being written."""
        if self.cluster.device != "cuda":
            return 0
        a, b, c = self._block_bytes(self.layout.problem.dtype.itemsize)
        travels = (*(where in BY_STEP for where in self.operands), self.result not in ("workers", "reduced"))
        on_the_way = max(size * does for size, does in zip((a, b, c), travels, strict=True))
        written = c if self.result == "out" else 0
        return (on_the_way + written) * self.cluster.threads

    def _block_bytes(self, itemsize: int) -> tuple[int, int, int]:
        """Bytes of the largest blocks of A, B and C, for elements of `itemsize` bytes."""
        m, k, n = self.layout.blocking.largest
        item = math.prod(map(max, self.layout.blocking.batch)) * itemsize
        return m * k * item, k * n * item, m * n * item


def _padding(edges: tuple[int, ...]) -> float:
    """Ratio of the bytes of lines in a kernel's own format, with the gaps between them, to those of the lines alone.

    Lines have the lengths `edges`. They lie along k, or along the rows of A or the columns of B, as the kernel wants
    them. They begin at multiples of 128 elements at most, and only if the gaps take no more than 6.2 %.
    """
    if all(edge % LINE == 0 for edge in edges):
        return 1.0
    return 1 + min((LINE - 1) / max(edges), 0.062)
