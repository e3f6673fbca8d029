"""Totals of one worker for a product: time by kind of activity, bytes received, memory over time, silences. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from distmm.telemetry.activity import Device, Kind, Load, Sample

# Most memory samples of a worker. When there are more, every second one is dropped. 256 workers fill 4 MB.
MOST_SAMPLES = 512


@dataclass
class Lane:
    """Totals of one worker, and its memory samples over time. Times are seconds since the epoch."""

    host: str = ""
    flops: float = 0.0
    steps: int = 0
    # Seconds of each kind. "multiply" is the time with at least one step running. Other kinds are sums over threads.
    seconds: defaultdict[Kind, float] = field(default_factory=lambda: defaultdict(float))
    until: float = 0.0  # end of the last step
    measured: tuple[float, float] = (0.0, 0.0)  # operations and seconds of the steps that no silence interrupted
    silences: list[tuple[float, float]] = field(default_factory=list)  # from when to when; the end is infinite at first
    received: int = 0
    receiving: float = 0.0  # seconds that the bytes received took
    lost: float | None = None  # when the worker left for the first time
    device: Device | None = None
    loads: tuple[tuple[float, Load], ...] = ()  # the first and the last CPU times, each with its time
    peak_blocks: int = 0
    peak_process: int = 0  # of the GPU, where there is one
    others: int = 0  # bytes of blocks that are not the product's
    samples: list[tuple[float, int]] = field(default_factory=list)  # time, bytes of blocks
    stride: int = 1  # every n-th sample is kept
    skipped: int = 0  # samples since the last one that was kept

    @property
    def silent_since(self) -> float | None:
        """Time of the last heartbeat of a worker that is silent now; None if it is not."""
        return self.silences[-1][0] if self.silences and self.silences[-1][1] == math.inf else None

    @property
    def busy_rate(self) -> float:
        """FLOP/s in the time with at least one step running."""
        flops, seconds = self.measured
        return flops / seconds if seconds else 0.0

    def asleep(self, start: float, stop: float) -> float:
        """Return for how many seconds of an interval the worker was silent."""
        return sum(max(0.0, min(stop, end) - max(start, begin)) for begin, end in self.silences)

    def step(self, start: float, stop: float, flops: float) -> None:
        """Add a step of a chain; steps overlap where products are queued ahead."""
        start = min(stop, max(start, self.until))
        asleep, self.until = self.asleep(start, stop), max(self.until, stop)
        self.flops += flops
        self.steps += 1
        self.seconds["multiply"] += stop - start - asleep
        if not asleep:
            self.measured = self.measured[0] + flops, self.measured[1] + stop - start

    def sample(self, sample: Sample) -> None:
        """Add a sample; of the bytes over time, every second one is dropped when there are too many."""
        self.host = sample.host or self.host
        self.device = sample.device or self.device
        self.received += sample.received
        self.receiving += sample.receiving
        self.others = sample.others
        if sample.load is not None:
            restarted = bool(self.loads) and sample.load.process < self.loads[-1][1].process
            self.loads = (*(() if restarted else self.loads[:1]), (sample.time, sample.load))
        self.peak_blocks = max(self.peak_blocks, sample.blocks)
        self.peak_process = max(self.peak_process, sample.device.used if sample.device else sample.process)
        self.skipped += 1
        if self.skipped < self.stride:
            return
        self.skipped = 0
        self.samples.append((sample.time, sample.blocks))
        if len(self.samples) > MOST_SAMPLES:
            self.samples = self.samples[::2]
            self.stride *= 2
