"""Lose power during a job and up to a minute after it: ``python tests/bench/device_states.py --states 12``.

A job writes to ext4, xfs and btrfs on loop devices whose writes are recorded (`recorded_device.py`). From each record
states of the device are drawn at seeded moments. Each state is mounted, so that the file system replays its journal.
Then it must hold:

- C is not there, or what was there before, or the right one;
- each marker has its block;
- if the job had ended, C is there with its certificate;
- `distmm resume` makes the right C, or says that there is no unfinished job; the same call then makes it;
- nothing but C, its certificate and its report is left, and the certificate fits.

Needs root, loop devices, FUSE and the programs of `recorded_device.NEEDED`. Prints one line a record and a table; the
exit code is 1 if a state was refused or wrong. Images of such states are kept.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from device_trials import KINDS, Trial, operands
from distributed import Client
from recorded_device import LOSSES, MAKE, Device, Parts, namespace
from rich.console import Console

from distmm import clusters
from tests import forked

say = Console(highlight=False, soft_wrap=True).print

FAILURES = ("refused", "wrong", "gone", "marker without a block", "unreadable")
COLUMNS = (
    "states", "during the job", "after the job", *LOSSES, "absent before", "replaced before", "right before", "right",
    *FAILURES,
)  # fmt: skip


@contextmanager
def cluster() -> Iterator[Client]:
    """Two workers for all jobs, whose reports are without charts: these take longer than the job."""
    with (
        forked.workers(),
        pytest.MonkeyPatch.context() as patch,
        clusters.local(device="cpu", workers=2, memory_limit="2GiB", dashboard=None, quiet=True) as client,
    ):
        for name in ("timeline", "lines"):
            patch.setattr(f"distmm.telemetry.charts.{name}", lambda *_: "<svg/>")
        yield client


def draw(trial: Trial, states: int, seed: str, failed: Callable[[str, str, Path], None]) -> Counter[str]:
    """Lose power as often as that in one recorded job; count outcomes, moments and losses."""
    rng, count, seen = random.Random(seed), Counter[str](), set[Parts]()
    end = trial.device.count(trial.end)
    first = rng.randrange(12)  # a few states of many jobs have all moments and all losses
    for n, point in enumerate(trial.points(rng, first), first):
        if len(seen) == states or n > first + 20 * states:
            return count
        loss = LOSSES[n % len(LOSSES)]
        parts = trial.device.parts(point, loss, rng)
        if parts in seen:
            continue
        seen.add(parts)
        image = trial.device.state(parts)
        outcome, what = trial.verdict(image, point >= end)
        count.update({"states": 1, outcome: 1, loss: 1, "after the job" if point >= end else "during the job": 1})
        if outcome == "right":
            count[f"{what} before"] += 1
        else:
            failed(outcome, f"{what}; {loss} after request {point} of {len(trial.device.requests)}", image)
    raise AssertionError("the points never end")


def run(options: argparse.Namespace, folder: Path) -> dict[str, Counter[str]]:
    """Record all kinds of jobs on all file systems, and lose power in each of them; return counts by file system."""
    total = {system: Counter[str]() for system in options.systems}
    operands(folder / "inputs")
    with cluster() as client:
        for system in options.systems:
            trials = {}
            with ExitStack() as held:
                for n, kind in enumerate(options.kinds):
                    device = Device(folder / f"{system}-{n}", system)
                    trials[kind] = Trial(device, KINDS[kind], folder / "inputs", client)
                    held.enter_context(trials[kind].recorded(synced=not options.unsynced))
                last = max(trial.ended for trial in trials.values())
                time.sleep(max(0.0, last + options.after - time.monotonic()))
            for kind, trial in trials.items():
                name = f"{system}, {kind}"

                def failed(outcome: str, what: str, image: Path, name: str = name) -> None:
                    say(f"{name}: {outcome.upper()}: {what}")
                    kept = folder / "failed"
                    kept.mkdir(exist_ok=True)
                    subprocess.run(["cp", "--sparse=always", image, kept / str(len(os.listdir(kept)))], check=True)

                count = draw(trial, options.states, f"{options.seed}, {name}", failed)
                say(f"{name}: {described(count)}")
                total[system].update(count)
                trial.device.remove()
    return total


def described(count: Counter[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in count.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=12, help="of each job")
    parser.add_argument("--systems", nargs="+", choices=MAKE, default=list(MAKE))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--after", type=float, default=60, help="seconds for which writes are recorded after a job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unsynced", action="store_true", help="jobs without fsync, to see what is found")
    parser.add_argument("--dir", type=Path, help="folder for images")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        os.execvp(namespace()[0], [*namespace(), sys.executable, __file__, *sys.argv[1:], "--inside"])
    folder = Path(tempfile.mkdtemp(prefix="distmm-devices-", dir=options.dir)).resolve()
    began = time.monotonic()
    try:
        systems = run(options, folder)
    finally:
        if (folder / "failed").exists():
            say(f"images of states that failed are in {folder / 'failed'}")
        else:
            shutil.rmtree(folder)
    table(systems)
    total = sum(systems.values(), Counter[str]())
    say(f"{total['states']} states, {total['right']} right, {time.monotonic() - began:.0f} s")
    return 0 if total["right"] == total["states"] else 1


def table(systems: dict[str, Counter[str]]) -> None:
    """Print counts for `tests/bench/README.md`."""
    say(f"| | {' | '.join(COLUMNS)} |")
    say(f"| --- |{' ---: |' * len(COLUMNS)}")
    for system, count in systems.items():
        say(f"| {system} | {' | '.join(str(count[column]) for column in COLUMNS)} |")


if __name__ == "__main__":
    sys.exit(main())
