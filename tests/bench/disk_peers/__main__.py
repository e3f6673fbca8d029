"""The process that a peer runs in: ``python -m disk_peers``; see `experiment.measuring_process`."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from experiment.measuring_process import Say, serve

from distmm.storage import fsync

from .task import Task


def work(line: str, say: Say) -> None:
    """Multiply once. The last byte of C is on the disk when the clock stops, as it is for a job."""
    task = Task.read(line)
    module = importlib.import_module(f".{task.program}", __package__)
    with module.program(task) as multiply:
        say({"ready": True})
        start = time.perf_counter()
        multiply()
        for file in Path(task.c).rglob("*"):
            fsync(str(file))
        say({"row": {"seconds": time.perf_counter() - start}})


if __name__ == "__main__":
    sys.exit(serve(work))
