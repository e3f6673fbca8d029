"""Totals of one worker for a product: steps, operations, bytes received, and memory over time. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from distmm.telemetry.events import Access, Device, Sample

__all__ = ["MOST_SAMPLES", "Lane"]

# A worker's present rate covers so many seconds, or three times its longest run, and at most so many of its last runs.
RECENT_SECONDS, RECENT_RUNS = 10.0, 64

# Most memory samples of a worker. When there are more, every second one is dropped. 256 workers fill 4 MB.
MOST_SAMPLES = 512


@dataclass
class Lane:
    """Totals of one worker, and its memory samples over time. Times are seconds since the epoch."""

    flops: float = 0.0
    seconds: float = 0.0  # time with at least one step running; steps overlap where products are queued ahead
    until: float = 0.0  # end of the last step
    reading: float = 0.0  # seconds of tasks that read or made blocks of A and B, summed over threads
    writing: float = 0.0  # seconds of tasks that checked, reduced and wrote blocks of C, summed over threads
    steps: int = 0
    received: int = 0
    left: float | None = None  # when the worker left; None while it, or a restarted process of its name, computes
    lost: float | None = None  # when the worker left for the first time
    device: Device | None = None
    peak_blocks: int = 0
    recent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=RECENT_RUNS))
    samples: list[tuple[float, int, int]] = field(default_factory=list)  # time, bytes: blocks, process or GPU
    stride: int = 1  # every n-th sample is kept
    skipped: int = 0  # samples since the last one that was kept

    def rate(self, now: float) -> float:
        """Return the FLOP/s over the last runs until `now`, idle time included."""
        longest = max((stop - start for start, stop, _ in self.recent), default=0.0)
        since = now - max(RECENT_SECONDS, 3 * longest)
        runs = [run for run in self.recent if run[1] > since]
        if not runs:
            return 0.0
        return sum(flops for *_, flops in runs) / max(1e-9, now - min(start for start, *_ in runs))

    @property
    def busy_rate(self) -> float:
        """FLOP/s in the time with at least one step running."""
        return self.flops / self.seconds if self.seconds else 0.0

    def access(self, access: Access) -> None:
        """Add the time of a read or write."""
        if access.writes:
            self.writing += access.stop - access.start
        else:
            self.reading += access.stop - access.start

    def sample(self, sample: Sample) -> None:
        """Keep a sample; when there are too many, drop every second one."""
        self.device = sample.device or self.device
        self.peak_blocks = max(self.peak_blocks, sample.blocks)
        self.skipped += 1
        if self.skipped < self.stride:
            return
        self.skipped = 0
        device = sample.device.used if sample.device else sample.process
        self.samples.append((sample.time, sample.blocks, device))
        if len(self.samples) > MOST_SAMPLES:
            self.samples = self.samples[::2]
            self.stride *= 2
