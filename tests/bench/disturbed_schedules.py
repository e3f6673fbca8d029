"""Disturb Dask's own scheduler with distmm's plugin: seeded schedules in virtual time, with everything that goes wrong.

What is real: the scheduler, its plugins, the workers' state machines, the graphs of products of all kinds. What goes
wrong, and what must hold nevertheless, says `tests/distmm/scheduler/disturbed_cluster.py`.

    python tests/bench/disturbed_schedules.py                          # 1000 schedules on all cores
    python tests/bench/disturbed_schedules.py --first 17 --count 1     # the 17th again, with what happens in it

A seed makes the same schedule each time: the program runs with PYTHONHASHSEED=0, for Dask keeps tasks in sets.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import dask
from rich.console import Console

from distmm.clusters.local_cluster import SCHEDULER_CONFIG
from tests.distmm.scheduler.disturbed_cluster import DisturbedCluster

COMMAND = "python tests/bench/disturbed_schedules.py --count 1 --first"


def schedule(seed: int, log: Callable[[str], None] = lambda _: None) -> str | None:
    """Play one schedule; return what is wrong, and how to see it again."""
    try:
        play(lambda: DisturbedCluster(seed, log))
    except Exception as error:
        if not isinstance(error, AssertionError):
            logging.getLogger(__name__).exception("seed %s", seed)
        return f"seed {seed}: {type(error).__name__}: {error}\n    again: {COMMAND} {seed}"
    return None


def play(make: Callable[[], DisturbedCluster]) -> DisturbedCluster:
    """Play the schedule of a cluster, and return it; raise AssertionError if something is wrong."""
    heard: list[str] = []
    handler = Heard(heard)
    loggers = [logging.getLogger("distributed"), logging.getLogger("distmm")]

    async def run() -> DisturbedCluster:
        cluster = make()
        try:
            cluster.log(f"{cluster.size} workers, validate {cluster.scheduler.validate}, faults: {cluster.faults}")
            await cluster.run()
            return cluster
        finally:
            cluster.close()

    # The memory manager reads the workers' real memory, of which there is none.
    config = {**SCHEDULER_CONFIG, "distributed.scheduler.active-memory-manager.start": False}
    for each in loggers:
        each.addHandler(handler)
    try:
        with dask.config.set(config):
            played = asyncio.run(run())
    finally:
        for each in loggers:
            each.removeHandler(handler)
    assert not heard, f"an exception was logged: {heard[0]}"
    return played


class Heard(logging.Handler):
    """Notes exceptions that Dask or distmm log, and go on."""

    def __init__(self, heard: list[str]) -> None:
        super().__init__(logging.ERROR)
        self.heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.heard.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


def main() -> None:
    """Play schedules on all cores."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1000, help="schedules")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    if options.count == 1:
        sys.exit(schedule(options.first, partial(console.print, markup=False)))
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    started, wrong = time.perf_counter(), 0
    with ProcessPoolExecutor(options.processes) as pool:
        for one in pool.map(schedule, range(options.first, options.first + options.count), chunksize=10):
            if one is not None:
                console.print(one, markup=False)
                wrong += 1
    console.print(f"{options.count} schedules, {wrong} wrong, {time.perf_counter() - started:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
