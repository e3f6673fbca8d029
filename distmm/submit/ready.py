"""First program of a batch job's client: waits for the workers, and runs the product.

``python -m distmm.submit.ready SCHEDULER COUNT SECONDS -- COMMAND...``; batch scripts and manifests contain this
module's name.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from distmm.all_workers import workers_of
from distmm.errors import DistmmError, InputError

# Exit code if scheduler or workers are missing. The code 1 would mean a wrong result.
LOST = 3


def wait(scheduler: str, count: int, timeout: float) -> None:
    """Wait until the scheduler answers and all workers have joined.

    Parameters
    ----------
    scheduler : str
        Address of the scheduler, or path of the scheduler file that it will write.
    count : int
        Number of workers.
    timeout : float
        Seconds.

    Raises
    ------
    InputError
        If a worker is missing after `timeout`. The message has the number and the hosts of those that joined.
    """
    from distributed import Client

    deadline = time.monotonic() + timeout
    if "://" in scheduler:
        where = {"address": scheduler}
    else:
        where = {"scheduler_file": scheduler}
        while not Path(scheduler).is_file():
            if time.monotonic() > deadline:
                raise InputError(f"no scheduler has written {scheduler} within {timeout:g} s; its errors are above")
            time.sleep(0.2)
    # The certificates of a TLS cluster come from Dask's configuration, which the batch script exports.
    try:
        client = Client(**where, timeout=max(1.0, deadline - time.monotonic()), set_as_default=False)
    except OSError as error:
        raise InputError(
            f"no scheduler answers at {scheduler} within {timeout:g} s: {error}; is it running, and can this node "
            f"reach it?"
        ) from error
    with client:
        try:
            client.wait_for_workers(count, timeout=max(1.0, deadline - time.monotonic()))
        except TimeoutError as error:
            joined = workers_of(client)
            hosts = sorted({worker["host"] for worker in joined.values()})
            raise InputError(
                f"{len(joined)} of {count} workers are there after {timeout:g} s, from "
                f"{', '.join(hosts) or 'no host'}; the errors of the others are above"
            ) from error


def main(scheduler: str, count: str, seconds: str, separator: str, *command: str) -> NoReturn:
    """Wait for the workers, and replace this process by the command."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # No work has started yet: the code is that of a job that was stopped and can be resumed.
        signal.signal(number, lambda *_: os._exit(os.EX_TEMPFAIL))
    try:
        wait(scheduler, int(count), float(seconds))
    except DistmmError as error:
        print(f"distmm: {error}", file=sys.stderr, flush=True)  # noqa: T201
        sys.exit(LOST)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
