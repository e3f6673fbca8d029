"""What a process and all that it has started take of memory and write to disk, also when they are killed."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Self

import psutil

# Seconds between two looks: one costs some milliseconds of a core.
INTERVAL = 0.3


class Usage:
    """Watches a process and its descendants during a ``with`` block: this one from there on, another from its start.

    Attributes
    ----------
    peak : int
        Most bytes in memory at once: the sum of their RSS, to which memory that two of them share counts twice.
    written : int
        Bytes that they have given to file systems with a disk. Those of a process that has ended count with its
        parent, which has waited for it, so that the sum grows but for the moment between: its maximum is the total.
    """

    def __init__(self, pid: int) -> None:
        self.process = psutil.Process(pid)
        self.peak = self.written = 0
        self._before = 0
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.peak, written = self._look()
        self._before = written if self.process.pid == os.getpid() else 0
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        over = False
        while not over:
            over = self._over.wait(INTERVAL)  # and a last look at the end
            rss, written = self._look()
            self.peak = max(self.peak, rss)
            self.written = max(self.written, written - self._before)

    def _look(self) -> tuple[int, int]:
        rss = written = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in (self.process, *self.process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    written += each.io_counters().write_bytes
                    rss += each.memory_info().rss
        return rss, written
