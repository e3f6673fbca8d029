"""What one worker has done for a product: steps, bytes received, and its memory over time. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from distmm.telemetry.events import Access, Device, Sample

__all__ = ["MOST_SAMPLES", "Lane"]

# Seconds, and runs, over which a worker's present rate is taken.
RECENT_SECONDS, RECENT_RUNS = 10.0, 64

# Samples of memory for each worker. Beyond this number every second one is dropped. 256 workers fill 4 MB.
MOST_SAMPLES = 512


@dataclass
class Lane:
    """Totals of one worker, and its samples over time."""

    flops: float = 0.0
    seconds: float = 0.0  # with a step running; several run at once where products are queued ahead
    until: float = 0.0  # end of the last of them
    reading: float = 0.0  # seconds of tasks that read or made blocks of A and B, in all threads
    writing: float = 0.0  # seconds of tasks that judged, reduced and wrote blocks of C, in all threads
    steps: int = 0
    received: int = 0
    left: float | None = None  # when it left, while no process has come in its place
    lost: float | None = None  # when it left for the first time
    device: Device | None = None
    peak_blocks: int = 0
    recent: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=RECENT_RUNS))
    samples: list[tuple[float, int, int]] = field(default_factory=list)  # time, bytes in blocks, in process or GPU
    stride: int = 1
    unseen: int = 0

    def rate(self, now: float) -> float:
        """FLOP/s over the last runs, idle time included."""
        longest = max((stop - start for start, stop, _ in self.recent), default=0.0)
        since = now - max(RECENT_SECONDS, 3 * longest)
        runs = [run for run in self.recent if run[1] > since]
        if not runs:
            return 0.0
        return sum(flops for *_, flops in runs) / max(1e-9, now - min(start for start, *_ in runs))

    @property
    def busy_rate(self) -> float:
        """FLOP/s while a step ran."""
        return self.flops / self.seconds if self.seconds else 0.0

    def access(self, access: Access) -> None:
        """Count a read or a write."""
        if access.writes:
            self.writing += access.stop - access.start
        else:
            self.reading += access.stop - access.start

    def sample(self, sample: Sample) -> None:
        """Keep a sample, and thin them out when there are many."""
        self.device = sample.device or self.device
        self.peak_blocks = max(self.peak_blocks, sample.blocks)
        self.unseen += 1
        if self.unseen < self.stride:
            return
        self.unseen = 0
        device = sample.device.used if sample.device else sample.process
        self.samples.append((sample.time, sample.blocks, device))
        if len(self.samples) > MOST_SAMPLES:
            self.samples = self.samples[::2]
            self.stride *= 2
