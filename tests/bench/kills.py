"""Products while their workers are killed: ``python tests/bench/kills.py --kills 200``.

Workers of a local cluster die by SIGKILL at seeded random moments, one after the other, while products of the same
matrices are computed over and over, each time in another blocking along m and n. Every C must have the bits of the one
that was computed in peace. One that takes longer than `--patience` seconds gets as many more in peace: where kills come
faster than progress it finishes then ("late"), and else it hangs. The exit code is 1 for a wrong or a hung one.
On GPUs, blocks of at least 512 x 512 go to other workers by tickets (`distmm.transfer.serialization`). A replacement
takes seconds to start there, so several runs share the GPUs, each with a small pool: ``--pool 4GB``.
With ``DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD=forkserver`` replacements come several times sooner.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import dask.array as da
import numpy as np
from distributed import Client, Future, Scheduler, Status, wait

import distmm
from distmm import clusters
from distmm.scheduler.plugin import PlacementPlugin

EDGE = 64  # of the blocks: products take a millisecond, so that most of the time something is on its way somewhere
TICKET_EDGE = 512  # the same on GPUs: smaller blocks go through host memory


@dataclass
class Outcome:
    """What came of a run.

    Attributes
    ----------
    products, kills : int
        Products computed, and workers killed while they were.
    wrong, late, hung : list of int
        Products whose bits differ, those that did not finish before the kills paused, and not then either.
    slowest : float
        Seconds of the slowest product.
    """

    products: int = 0
    kills: int = 0
    wrong: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    hung: list[int] = field(default_factory=list)
    slowest: float = 0.0


def operands(edge: int, delay: float, gpu: bool) -> tuple[da.Array, da.Array]:
    """Two float32 matrices of 6 x 6 blocks, which take `delay` seconds to make, and are the same each time."""

    def block(rows: np.ndarray, columns: np.ndarray, seed: int = 0) -> np.ndarray:
        time.sleep(delay)
        # Blockings differ along m and n, and a BLAS adds in another order for each. Whole numbers have the same sums in
        # any order. Sums over panels are rounded: each panel of A (seed 1) is multiplied by another power of two.
        rng = np.random.default_rng((seed, int(rows[0, 0]), int(columns[0, 0])))
        exponent = (12, -12, 0)[int(columns[0, 0]) // edge % 3] if seed == 1 else 0
        made: np.ndarray = (rng.integers(-8, 9, (rows.shape[0], columns.shape[1])) * 2.0**exponent).astype("f4")
        if not gpu:
            return made
        import cupy

        return cupy.asarray(made)

    index = da.arange(6 * edge, chunks=edge)
    meta = np.empty((0, 0), "f4")
    if gpu:
        import cupy

        meta = cupy.empty((0, 0), "f4")
    made = [da.map_blocks(block, index[:, None], index[None, :], seed=s, dtype="f4", meta=meta) for s in (1, 2)]
    return made[0], made[1]


class Killer:
    """Kills a worker at random moments, when no replacement is on its way and another worker is left.

    Dask's nanny gives up, for good, on a worker that dies while it starts: so the nannies, which are in this process,
    are asked.
    """

    def __init__(self, client: Client, seed: int, pause: tuple[float, float]) -> None:
        self.client, self.random, self.pause = client, random.Random(seed), pause
        self.kills, self.resting, self.stopped = 0, False, threading.Event()
        self.last = time.monotonic()  # when a worker was killed, or a rest ended
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Killer:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopped.set()
        self.thread.join()

    def _run(self) -> None:
        killed: set[int] = set()
        while not self.stopped.wait(self.random.uniform(*self.pause)):
            workers = self.workers()
            running = sorted({pid for status, pid in workers if status is Status.running and pid} - killed)
            coming = any(status in (Status.init, Status.starting) for status, _ in workers)
            if not self.resting and not coming and len(running) > 1:
                victim = self.random.choice(running)
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
                self.kills += 1
                self.last = time.monotonic()

    def workers(self) -> list[tuple[Status, int | None]]:
        """State and process of each worker, as its nanny sees it."""
        processes = [nanny.process for nanny in list(self.client.cluster.workers.values())]
        return [(process.status, process.pid) for process in processes if process is not None]


def run(
    client: Client,
    *,
    kills: int,
    seed: int = 0,
    edge: int = EDGE,
    delay: float = 0.02,
    pause: tuple[float, float] = (0.1, 1.5),
    patience: float = 120.0,
    seconds: float = float("inf"),
    kernel: str | None = None,
    gpu: bool = False,
) -> Outcome:
    """Multiply until `kills` workers have been killed, or for some seconds; at least one product."""
    A, B = operands(edge, delay, gpu)
    outcome, expected = Outcome(), None
    edges = [edge, 2 * edge, 3 * edge]
    choose, deadline = random.Random(seed), time.monotonic() + seconds

    def product(a: da.Array, b: da.Array, blocks: tuple[int, ...]) -> da.Array:
        # The panels of k are given: a plan might unite them, and the sums over panels are rounded.
        made = distmm.matmul(a, b, client=client, kernel=kernel, blocks=blocks)
        return made.map_blocks(to_numpy, dtype="f4")

    with client.as_current():
        expected = client.compute(product(A, B, blocks=(edge,) * 3), sync=True)
        with Killer(client, seed, pause) as killer:
            while (killer.kills < kills and time.monotonic() < deadline) or not outcome.products:
                m, n = choose.choice(edges), choose.choice(edges)
                C = product(A.rechunk((m, edge)), B.rechunk((edge, n)), blocks=(m, edge, n))
                started = time.perf_counter()
                future = client.compute(C)
                if not _finishes(future, patience):
                    killer.resting = True
                    if not _finishes(future, patience):
                        outcome.hung.append(outcome.products)
                        print("\n".join(client.run_on_scheduler(_unfinished)))  # noqa: T201
                        break
                    outcome.late.append(outcome.products)
                    killer.resting, killer.last = False, time.monotonic()
                if time.monotonic() - killer.last > patience:
                    raise TimeoutError(f"for {patience:.0f} s no worker could be killed: they are {killer.workers()}")
                if future.result().tobytes() != expected.tobytes():
                    outcome.wrong.append(outcome.products)
                outcome.products += 1
                if outcome.products % 20 == 0:
                    print(f"{killer.kills} kills, {outcome.products} products", flush=True)  # noqa: T201
                outcome.slowest = max(outcome.slowest, time.perf_counter() - started)
            outcome.kills = killer.kills
    return outcome


def _finishes(future: Future, seconds: float) -> bool:
    try:
        wait(future, timeout=seconds)
    except TimeoutError:
        return False
    return True


def _unfinished(dask_scheduler: Scheduler) -> list[str]:
    """Describe tasks that wait for nothing that is not there, and what the plugin holds back. Runs on the scheduler."""
    waiting = [
        f"{ts.key}: {ts.state}, may run on {ts.worker_restrictions}, runs on {ts.processing_on}"
        for ts in dask_scheduler.tasks.values()
        if ts.state not in ("memory", "released", "forgotten") and not ts.waiting_on
    ]
    products = dask_scheduler.plugins[PlacementPlugin.name].products.products
    looks = {name: product.lookahead for name, product in products.items()}
    steps = [f"{name}: left {dict(look.unfinished)}, held {sorted(look.held)}" for name, look in looks.items()]
    return [f"workers: {list(dask_scheduler.workers)}", *waiting[:20], *steps]


def to_numpy(block: np.ndarray) -> np.ndarray:
    """Bring a CuPy block to the host on its worker: a client that got it on the GPU would keep that memory mapped."""
    return block.get() if hasattr(block, "get") else block


@contextmanager
def cluster(kind: str, device: Literal["cpu", "gpu"], workers: int | None, size: str) -> Iterator[Client]:
    """Start a cluster of distmm, or one of GPUs as users start it: without options, or with UCX and a pool."""
    if kind == "own":
        with clusters.local(device=device, workers=workers, dashboard=None, quiet=True) as client:
            yield client
        return
    from dask_cuda import LocalCUDACluster

    pool = {"protocol": "ucx", "rmm_pool_size": size} if kind == "ucx" else {}
    with (
        LocalCUDACluster(n_workers=workers, dashboard_address=":0", silence_logs=logging.CRITICAL, **pool) as started,
        Client(started) as client,
    ):
        yield client


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, help="two at least; by default two on the CPU, and all GPUs")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument(
        "--cluster", choices=["own", "tcp", "ucx"], default="own", help="distmm's own, or a user's GPUs"
    )
    parser.add_argument("--pool", default="0.6", help="of each GPU's worker with UCX: a share, or a size such as 4GB")
    parser.add_argument("--kernel", default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=120.0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after these, with fewer kills, too")
    options = parser.parse_args()
    started = time.perf_counter()
    gpu = options.device == "gpu"
    workers = options.workers or (None if gpu else 2)  # a cluster's only worker is not killed
    with cluster(options.cluster, options.device, workers, options.pool) as client:
        outcome = run(
            client,
            kills=options.kills,
            seed=options.seed,
            patience=options.patience,
            seconds=options.seconds,
            kernel=options.kernel,
            gpu=gpu,
            edge=TICKET_EDGE if gpu else EDGE,
            pause=(0.5, 2.5) if gpu else (0.1, 0.8),
        )
    print(  # noqa: T201
        f"{outcome.kills} kills during {outcome.products} products in {time.perf_counter() - started:.0f} s: "
        f"{len(outcome.wrong)} wrong {outcome.wrong}, {len(outcome.late)} late {outcome.late}, "
        f"{len(outcome.hung)} hung {outcome.hung}, "
        f"slowest {outcome.slowest:.1f} s"
    )
    return bool(outcome.wrong or outcome.hung)


if __name__ == "__main__":
    sys.exit(main())
