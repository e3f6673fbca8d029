"""Lose all data without fsync at a moment of a job: ``python tests/bench/lazyfs_states.py --lazyfs PATH --states 6``.

LazyFS (Ramos et al., PVLDB 17-11, https://github.com/dsrhaslab/lazyfs) keeps what programs write in its own memory,
and writes it to the disk when they call fsync. Each job writes to a LazyFS whose process is killed at a seeded moment:
what was not synced is gone. New names, renames and lengths stay. The job goes on from what is on the disk, and
`device_states.py` says what must hold then.

Needs root, FUSE and LazyFS. Prints a line for each kind of job and a table; the exit code is 1 if a state was refused
or wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from device_states import FAILURES, cluster, described, say
from device_trials import KINDS, Trial, operands
from recorded_device import namespace

from tests.until import until

COLUMNS = ("states", "during the job", "after the job", "absent before", "replaced before", "right before", "right")

CONFIGURATION = """
[faults]
fifo_path = "{folder}/commands"
[cache]
apply_eviction = false
[cache.simple]
custom_size = "256mb"
blocks_per_page = 1
[filesystem]
log_all_operations = false
logfile = "{folder}/log"
"""


class LazyFolder:
    """A folder that is seen through LazyFS during a job, and directly before and after it.

    Parameters
    ----------
    folder : Path
        A new folder.
    program : str
        LazyFS.
    """

    def __init__(self, folder: Path, program: str) -> None:
        self.folder, self.program = folder, program
        self.place, self._disk = folder / "seen", folder / "disk"
        for each in (self.place, self._disk):
            each.mkdir(parents=True)
        self._settings = folder / "settings.toml"
        self._settings.write_text(CONFIGURATION.format(folder=folder))

    @contextmanager
    def mounted(self, image: Path | None = None) -> Iterator[None]:
        """Show what is on the disk. `image` is for devices, and None here."""
        subprocess.run(["mount", "--bind", self._disk, self.place], check=True)
        try:
            yield
        finally:
            until(self._unmounted, f"{self.place} is still in use")

    @contextmanager
    def lazy(self) -> Iterator[subprocess.Popen[bytes]]:
        """Show it through LazyFS, whose process is killed at the end, if it still runs."""
        options = ["-f", "-o", "allow_other", "-o", "modules=subdir", "-o", f"subdir={self._disk}"]
        command = [self.program, str(self.place), "--config-path", str(self._settings), *options]
        with (
            open(self.folder / "output", "wb") as output,
            subprocess.Popen(command, stdout=output, stderr=output) as process,
        ):
            try:
                until(lambda: os.path.ismount(self.place) or process.poll() is not None)
                if process.poll() is not None:
                    raise RuntimeError(f"LazyFS ended with {process.returncode}: {self.folder / 'output'} says why")
                yield process
            finally:
                process.kill()
                process.wait()
                subprocess.run(["umount", "--lazy", self.place], check=True)

    def _unmounted(self) -> bool:
        return subprocess.run(["umount", self.place], capture_output=True, check=False).returncode == 0


def job_until(trial: Trial, seconds: float | None) -> bool:
    """Run a job, kill LazyFS after so many seconds or at its end, and return whether the job had ended."""
    assert isinstance(trial.device, LazyFolder)
    with trial.device.mounted():
        trial._prepare()
    with trial.device.lazy() as process:
        lost = threading.Event()

        def lose() -> None:
            lost.set()
            process.kill()

        timer = threading.Timer(seconds or 1e6, lose)
        timer.start()
        room = shutil.disk_usage(trial.device.folder)  # LazyFS says that it has none
        try:
            with mock.patch("shutil.disk_usage", return_value=room):
                trial.multiply()
            ended = True
        except Exception:  # whatever a job raises whose disk is gone
            if not lost.is_set():
                raise
            ended = False
        finally:
            timer.cancel()
        until(lambda: not any(trial.client.processing().values()), "tasks of the job still run")
    return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lazyfs", required=True, help="the program")
    parser.add_argument("--states", type=int, default=6, help="of each job")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unsynced", action="store_true", help="jobs without fsync, to see what is found")
    parser.add_argument("--dir", type=Path, help="folder for the matrices")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        os.execvp(namespace()[0], [*namespace(), sys.executable, __file__, *sys.argv[1:], "--inside"])
    folder = Path(tempfile.mkdtemp(prefix="distmm-lazyfs-", dir=options.dir)).resolve()
    began, total = time.monotonic(), Counter[str]()
    operands(folder / "inputs")
    with cluster() as client:
        for number, (name, kind) in enumerate((name, KINDS[name]) for name in options.kinds):
            rng, count, takes = random.Random(f"{options.seed}, {name}"), Counter[str](), 0.0
            for state in range(options.states + 2):  # the first two run to their end, and the second one's time counts
                device = LazyFolder(folder / f"{number}-{state}", options.lazyfs)
                trial = Trial(device, kind, folder / "inputs", client)  # type: ignore[arg-type]
                start = time.monotonic()
                trial._set_fsync(not options.unsynced)
                ended = job_until(trial, rng.uniform(0, 1.1 * takes) if state > 1 else None)
                trial._set_fsync(True)
                takes = time.monotonic() - start if state < 2 else takes
                outcome, what = trial.verdict(device.folder, ended)
                count.update({"states": 1, outcome: 1, "after the job" if ended else "during the job": 1})
                if outcome == "right":
                    count[f"{what} before"] += 1
                    shutil.rmtree(device.folder)
                else:
                    say(f"{name}: {outcome.upper()}: {what}; {device.folder}")
            say(f"{name}: {described(count)}")
            total.update(count)
    columns = (*COLUMNS, *FAILURES)
    say(f"| {' | '.join(columns)} |\n|{' ---: |' * len(columns)}")
    say(f"| {' | '.join(str(total[column]) for column in columns)} |")
    say(f"{total['states']} states, {total['right']} right, {time.monotonic() - began:.0f} s")
    if total["right"] == total["states"]:
        shutil.rmtree(folder)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
