"""Clients that are killed or interrupted leave no work behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from distributed import Client, Scheduler, Worker

from distmm.host import lent

PROGRAM = """
import sys, time
import numpy as np, dask.array as da
from distributed import Client
import distmm
from distmm.host import lent

def slow(block):
    time.sleep(0.05)
    return block

client = Client(sys.argv[1])
A, B = (da.random.default_rng(s).random((768, 768), chunks=64).map_blocks(slow, dtype="f8") for s in (1, 2))
C = distmm.matmul(A, np.ones((768, 768)), client=client) + distmm.matmul(A, B, client=client)
print("ready", flush=True)
try:
    C.compute()
except KeyboardInterrupt:
    del C
    print("interrupted", flush=True)
    deadline = time.time() + 30
    while lent._kept and time.time() < deadline:
        time.sleep(0.05)
    print("released" if not lent._kept else "kept", flush=True)
    sys.stdin.read()  # the connection stays: it is not its end that frees
"""


def work(client: Client) -> int:
    """Tasks that the scheduler knows or workers are running."""

    def known(dask_scheduler: Scheduler) -> int:
        return len(dask_scheduler.tasks)

    def running(dask_worker: Worker) -> int:
        return len(dask_worker.state.executing)

    return int(client.run_on_scheduler(known)) + sum(client.run(running).values())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_client_that_goes_leaves_no_work_behind(client: Client, how: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, client.scheduler.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        deadline = time.time() + 60
        while not work(client) and time.time() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # in the middle of it
        assert work(client) > 0
        other.send_signal(how)
        deadline = time.time() + 30  # half a second on a quiet machine; the suite also runs on busy ones
        while work(client) and time.time() < deadline:
            time.sleep(0.05)
        assert work(client) == 0
        if how is signal.SIGINT:
            assert other.stdout.readline() == "interrupted\n"
            assert other.stdout.readline() == "released\n"
        other.stdin.close()
    assert lent._kept == {}
