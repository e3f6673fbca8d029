"""The runs of a job, as its manifest, certificate and report list them: when each one started and ended.

A run that ends with an error records its end in the manifest. The run that completes C records it in the certificate.
A run that is killed cannot record its end. The next run then records the time of the last finished block that it finds:
the killed run lasted at least that long.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from distmm import units
from distmm.errors import DistmmError, InputError, Stopped
from distmm.job.folder import Folder, Json
from distmm.job.lock import Lock
from distmm.job.manifest import write_manifest
from distmm.job.records import read_manifest
from distmm.job.stop import Stop

__all__ = ["add_run", "recorded_end", "table"]

KILLED = "did not end: killed, or cut off from its disk"


def add_run(manifest: Json, run: Json, markers: Iterable[Json]) -> None:
    """Append a new run to a manifest, and complete the entry of a run before it that was killed.

    Parameters
    ----------
    manifest : dict
    run : dict
        What `distmm.job.manifest.run_of` returns.
    markers : iterable of dict
        Markers of the blocks that earlier runs have finished. Their `time` is in seconds since the epoch, by the clock
        of the worker that wrote the block.
    """
    times = [marker["time"] for marker in markers]
    if manifest["runs"] and "ended" not in (killed := manifest["runs"][-1]):
        killed["last_block"] = max((at for at in times if at >= killed["started"]), default=None)
    manifest["runs"].append({**run, "kept": len(times)})


@contextmanager
def recorded_end(folder: Folder, lock: Lock, stop: Stop) -> Iterator[None]:
    """Record the end of the last run of a job in its manifest if the ``with`` block raises an error.

    The error is recorded, too, unless the run was stopped and can go on as it is. A manifest that is gone, or is not
    what distmm wrote, stays as it is.
    """
    try:
        yield
    except BaseException as error:
        if not stop.at_once:  # a second signal asks to end without waiting for writes
            with suppress(InputError, OSError):  # lock, disk or manifest are lost: the error of the run says so
                Lock.check(folder.path, lock.token)
                if folder.exists():
                    manifest = read_manifest(folder)
                    run = manifest["runs"][-1]
                    run["ended"] = time.time()
                    if isinstance(error, Exception) and not isinstance(error, Stopped):
                        kind = "" if isinstance(error, DistmmError) else f"{type(error).__name__}: "
                        run["error"] = f"{kind}{error}"
                    write_manifest(folder, manifest)
        raise


def table(runs: list[Json], now: float) -> list[tuple[str, ...]]:
    """Return a table of the runs of a resumed job, its first row with the labels; an empty list for a single run.

    Parameters
    ----------
    runs : list of dict
        The runs of a manifest. The last one ends `now` if it has no end yet.
    now : float
        Seconds since the epoch.
    """
    if len(runs) < 2:
        return []
    rows: list[tuple[str, ...]] = [
        ("run", "started", "ended", "duration", "host", "batch job", "workers", "blocks of earlier runs")
    ]
    for number, run in enumerate(runs, start=1):
        ended = run.get("ended", now if number == len(runs) else None)
        facts = (str(run.get(fact, "")) for fact in ("host", "batch_job", "workers", "kept"))
        rows.append((str(number), units.date(run["started"]), *_end(run, ended), *facts))
    return rows


def _end(run: Json, ended: float | None) -> tuple[str, str]:
    """Return the end and the duration of a run, as text."""
    if ended is not None:
        return units.date(ended), units.duration(max(0.0, ended - run["started"]))
    if (last := run.get("last_block")) is None:
        return f"{KILLED}; no block written", "unknown"
    duration = f"at least {units.duration(last - run['started'])}"
    return f"{KILLED}; last block written {units.date(last)}", duration
