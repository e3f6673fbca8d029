"""Clients that are killed or interrupted leave no work behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from distributed import Client

from tests.distmm.scheduler.known import known
from tests.until import until

PROGRAM = """
import os, signal, sys
import numpy as np, dask.array as da
from distributed import Client
import distmm
from tests.open_loans import open_loans
from tests.until import until

def wait(block, gate):
    until(lambda: os.path.exists(gate))
    return block

signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have their background processes ignore it
client = Client(sys.argv[1])
matrices = (da.random.default_rng(s).random((768, 768), chunks=64) for s in (1, 2))
A, B = (M.map_blocks(wait, sys.argv[2], dtype="f8", meta=np.empty((0, 0))) for M in matrices)
C = distmm.matmul(A, B, client=client)  # written into memory of this process
if sys.argv[3] == "sum":  # sent by the scheduler
    C = distmm.matmul(A, np.ones((768, 768)), client=client) + C
print("ready", flush=True)
try:
    C.compute()
except KeyboardInterrupt:
    print("interrupted", flush=True)
del C
until(lambda: not open_loans())
print("released", flush=True)
sys.stdin.read()  # the connection stays: it is not its end that frees
"""


def running(client: Client) -> int:
    """Tasks that workers are running."""
    return sum(client.run(lambda dask_worker: len(dask_worker.state.executing)).values())


@pytest.mark.minutes
@pytest.mark.parametrize(("how", "what"), [(signal.SIGKILL, "product"), (signal.SIGINT, "sum")])
def test_a_client_that_goes_leaves_no_work_behind(
    client: Client, how: signal.Signals, what: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    others, gate = known(client), tmp_path / "gate"
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, client.scheduler.address, gate, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        until(lambda: running(client) == 4)  # each worker makes a block, and does not get on until the gate is there
        other.send_signal(how)
        if how is signal.SIGINT:
            assert other.stdout.readline() == "interrupted\n"
        until(lambda: known(client) <= others)
        gate.touch()
        until(lambda: running(client) == 0)
        if how is signal.SIGINT:
            assert other.stdout.readline() == "released\n"
        other.stdin.close()
