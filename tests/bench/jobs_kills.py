"""Kill a job at seeded random moments, again and again: ``python tests/bench/jobs_kills.py --kills 100``.

Client, scheduler and two workers are processes of their own, each killed by SIGKILL: one of them, some, or all at once.
What was killed is started again (a job whose scheduler is lost stops with exit code 75) and the job goes on until C has
its name. Then C must equal, to the bit, the C of a job that nobody disturbed; blocks that were marked before a kill
must not have been written again; and nothing but C and its certificate may be left. Prints one line a round and a
summary; the exit code is 1 if anything was wrong, or took too long.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

STOPPED = 75
TIMEOUT = 900.0
KINDS = ("client", "scheduler", "worker-0", "worker-1")
SIZE, BLOCKS = 480, (96, 60, 96)

# Children start from a process that has imported everything: tens of milliseconds instead of seconds.
SPAWN = multiprocessing.get_context("forkserver")
PRELOAD = ["distmm", "distmm.job", "distmm_kernels.select", "distributed", "zarr", "h5py"]


say = Console(highlight=False, soft_wrap=True).print


def quiet() -> None:
    """Dask's processes tell much when others are killed."""
    logging.getLogger("distributed").setLevel(logging.CRITICAL + 1)
    warnings.simplefilter("ignore")


def run_scheduler(file: str) -> None:
    from distributed import Scheduler

    quiet()

    async def serve() -> None:
        async with Scheduler(port=0, dashboard=False, scheduler_file=file) as scheduler:
            await scheduler.finished()

    asyncio.run(serve())


def run_worker(file: str, name: str) -> None:
    from distributed import Worker

    quiet()

    async def serve() -> None:
        async with Worker(scheduler_file=file, name=name, nthreads=1, death_timeout=60, dashboard=False) as worker:
            await worker.finished()

    asyncio.run(serve())


def run_client(file: str, folder: str, out: str) -> None:
    from distributed import Client

    from distmm import job
    from distmm.errors import Stopped
    from distmm.planning.plan import Plan

    quiet()
    planning: Any = importlib.import_module("distmm.job.planning")
    plan_for = planning.plan_for

    def in_rows(*arguments: Any) -> Plan:
        plan: Plan = plan_for(*arguments)
        return replace(plan, schedule=replace(plan.schedule, wave_cuts=(1, 5, 1)))

    planning.plan_for = in_rows  # a wave is a row of blocks
    try:
        client = Client(scheduler_file=file, timeout=10)
        client.wait_for_workers(2, timeout=60)
    except (OSError, TimeoutError):  # the scheduler was killed before the job began
        os._exit(STOPPED)
    with client:
        try:
            job.multiply(f"{folder}/A.npy", f"{folder}/B.zarr", f"{folder}/{out}", client=client, blocks=BLOCKS, seed=1)
        except Stopped:
            os._exit(STOPPED)
    os._exit(0)


@dataclass
class Site:
    """The processes of one round."""

    folder: Path
    out: str
    running: dict[str, BaseProcess] = field(default_factory=dict)
    files: int = 0

    def start(self) -> None:
        """Start what is not running; without its scheduler nothing else is of use."""
        if not self._alive("scheduler"):
            self.stop(*KINDS)
            self.files += 1
            self._launch("scheduler", run_scheduler)
        for name in ("worker-0", "worker-1"):
            if not self._alive(name):
                self._launch(name, run_worker, name)
        if not self._alive("client"):
            self._launch("client", run_client, str(self.folder), self.out)

    def _alive(self, name: str) -> bool:
        return name in self.running and self.running[name].is_alive()

    def _launch(self, name: str, target: Any, *arguments: str) -> None:
        file = str(self.folder / f"scheduler-{self.files}.json")
        if name == "scheduler":  # the file of a round before has an address where nobody listens
            Path(file).unlink(missing_ok=True)
        process = SPAWN.Process(target=target, args=(file, *arguments), name=name)
        process.start()
        self.running[name] = process
        deadline = time.monotonic() + TIMEOUT
        while name == "scheduler" and not os.path.exists(file) and time.monotonic() < deadline:
            time.sleep(0.02)

    def stop(self, *names: str) -> None:
        """SIGKILL, all before any is waited for."""
        there = [self.running.pop(name) for name in names if name in self.running]
        for process in there:
            process.kill()
        for process in there:
            process.join()

    def finished(self) -> int | None:
        """Exit code of the client; None while it runs, or was killed."""
        client = self.running.get("client")
        return None if client is None else client.exitcode


def operands(folder: Path) -> None:
    """Write A and B."""
    import zarr

    rng = np.random.default_rng(0)  # whole numbers: every BLAS gives the same bits, with any number of threads
    a, b = (rng.integers(-8, 9, (SIZE, SIZE)).astype("f4") for _ in "AB")
    np.save(folder / "A.npy", a)
    zarr.create_array(folder / "B.zarr", data=b, chunks=(64, 64))


def markers(folder: Path, out: str) -> dict[str, int]:
    """Markers of finished blocks, and when each was written."""
    found = {}
    with suppress(FileNotFoundError):  # the job is complete, and removes its folder
        for path in (folder / f"{out}.job").glob("*/*/done/*.json"):
            found[path.name] = path.stat().st_mtime_ns
    return found


def undisturbed(folder: Path) -> tuple[bytes, float]:
    """C of a job that nobody kills, and the seconds it took."""
    site = Site(folder, "C.npy")
    start = time.monotonic()
    while site.finished() != 0:
        site.start()
        time.sleep(0.05)
        if time.monotonic() - start > TIMEOUT:
            raise TimeoutError("the undisturbed job did not finish")
    seconds = time.monotonic() - start
    site.stop(*KINDS)
    return clean(folder, "C.npy"), seconds


def clean(folder: Path, out: str) -> bytes:
    """Take C's bytes and remove all that a job has left, which must be no more than C, its certificate and report."""
    (folder / f"{out}.report.html").unlink(missing_ok=True)  # a run that only had to name C leaves none
    left = sorted(name for name in os.listdir(folder) if not name.startswith(("A.", "B.", "scheduler-")))
    assert left == [out, f"{out}.certificate.json"], left
    content = (folder / out).read_bytes()
    done = json.loads((folder / f"{out}.certificate.json").read_text())["done"]
    assert len(done) == 25, len(done)
    for name in left:
        (folder / name).unlink()
    return content


def one_round(folder: Path, seed: int, expected: bytes, seconds: float, kills: int = 8) -> Counter[str]:
    """Run one job with some kills at random moments; return what was killed.

    Raises
    ------
    AssertionError, TimeoutError
        If C is wrong, work was repeated, something is left over, or the job hangs.
    """
    rng, killed, site = random.Random(seed), Counter[str](), Site(folder, "C.npy")
    started, left = time.monotonic(), kills
    try:
        while True:
            site.start()
            moment = time.monotonic() + rng.uniform(0, 0.6 * seconds)
            victims = rng.choice([(kind,) for kind in KINDS] + [KINDS, KINDS[:2], KINDS[1:]])
            while site.finished() is None and (not left or time.monotonic() < moment):
                if time.monotonic() - started > TIMEOUT:
                    raise TimeoutError(
                        f"seed {seed}: not finished after {TIMEOUT:.0f} s; killed so far: {dict(killed)}"
                    )
                time.sleep(0.01)
            if site.finished() == 0:
                break
            if site.finished() is not None:
                assert site.finished() == STOPPED, f"seed {seed}: the client ended with {site.finished()}"
                continue
            before = markers(folder, site.out)
            site.stop(*victims)
            after = markers(folder, site.out)
            again = [name for name, when in before.items() if after.get(name, when) != when]
            assert not again, f"seed {seed}: written again: {again}"
            killed.update(victims)
            killed["kills"] += 1
            left -= 1
    finally:
        site.stop(*KINDS)
    assert clean(folder, site.out) == expected, f"seed {seed}: C differs"
    return killed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    SPAWN.set_forkserver_preload(PRELOAD)
    folder = Path(tempfile.mkdtemp(prefix="distmm-kills-"))
    total, wrong, seed, began = Counter[str](), 0, options.seed, time.monotonic()
    try:
        operands(folder)
        expected, seconds = undisturbed(folder)
        say(f"undisturbed: {seconds:.1f} s")
        while total["kills"] < options.kills:
            try:
                killed = one_round(folder, seed, expected, seconds, min(8, options.kills - total["kills"]))
                total.update(killed)
                say(f"seed {seed}: right after {dict(killed)}, {time.monotonic() - began:.0f} s")
            except (AssertionError, TimeoutError) as error:
                wrong += 1
                say(f"seed {seed}: WRONG: {error}")
                for name in os.listdir(folder):
                    if not name.startswith(("A.", "B.")):
                        path = folder / name
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
            seed += 1
    finally:
        shutil.rmtree(folder)
    say(f"{seed - options.seed} jobs, {dict(total)}: {wrong} wrong, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
