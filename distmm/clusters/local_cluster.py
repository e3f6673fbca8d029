"""A cluster started here, on the GPUs or the CPUs of this machine."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import dask
from dask.system import CPU_COUNT
from dask.utils import parse_bytes
from distributed import Client, LocalCluster
from distributed.system import MEMORY_LIMIT

from distmm.clusters import cluster
from distmm.clusters.gpus import gpu_count, missing_for_gpu
from distmm.errors import InputError
from distmm.interrupts import sigint_blocked
from distmm.submit import dashboard_access
from distmm.tls import security
from distmm.worker import gpu_worker_setup

__all__ = ["BLAS_THREADS", "LOCAL_CONFIG", "SCHEDULER_CONFIG", "local"]

# Configuration of the schedulers that distmm starts.
# - Work stealing ignores placement where restrictions are loose.
# - When a worker dies, Dask counts a failure for each task that waits there. With its limit of 3, a few dead workers
#   would end the product.
# - 15 s after a worker's death Dask gives up its name, unless a worker of that name is there. A worker that dies twice
#   in that time, and is being started again at its end, would never come back.
SCHEDULER_CONFIG = {
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.allowed-failures": 100,
    "distributed.deploy.lost-worker-timeout": "1 day",
}

# By default Dask measures every 20 ms how late its event loops are, and takes the stacks of its tasks every 10 ms: on
# an idle cluster of one worker that takes 11 % of a core. With these intervals it takes 3 %, and the dashboard still
# shows both, more coarsely.
LOCAL_CONFIG = {
    "distributed.admin.tick.interval": "200ms",
    "distributed.worker.profile.interval": "100ms",
}

# Environment variables for the number of threads of BLAS libraries and Numba.
BLAS_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")

# Most products at a time on the CPUs of a machine. More products would only cut its memory into smaller blocks of C;
# the kernels use the other cores. With at most so many cores one process runs all products: it holds one copy of each
# block of A and B, and sends none (two processes on two cores took 1.4 times the CPU seconds). With more cores each
# process runs one product, because within a process OpenBLAS runs one product of several threads at a time.
MOST_CPU_TASKS = 4

# Host memory of a worker that has imported what it needs. Dask ends a worker at 95 % of its limit: a worker with a
# limit of 100 MB was ended before its first task, one with 200 MB multiplied small matrices.
LEAST_MEMORY = 200_000_000


@contextmanager
def local(
    device: cluster.Device = "auto",
    *,
    workers: int | None = None,
    threads: int | None = None,
    memory_limit: str | None = None,
    dashboard: str | None = "127.0.0.1:8787",
    tls: str = "none",
    quiet: bool = False,
) -> Iterator[Client]:
    """Start a cluster on this machine, and stop it at the end of the ``with`` block.

    Parameters
    ----------
    device : {"auto", "gpu", "cpu"}
        ``"auto"`` takes the GPUs if `missing_for_gpu` finds nothing missing.
    workers : int, optional
        Processes: one a GPU, all GPUs by default; on the CPU one if there are 4 cores or fewer, else 4.
    threads : int, optional
        Tasks that a CPU worker runs at a time; by default as many as its share of the cores if that is 4 or fewer, else
        one, whose kernel uses them all.
    memory_limit : str, optional
        Host memory of each worker, such as ``"8GB"``; by default the machine's memory is shared evenly.
    dashboard : str or None
        Address of the dashboard, ``":8787"`` to show it to other machines; a free port is taken where this one is in
        use. None: no dashboard.
    tls : str
        ``"none"``, ``"temporary"`` certificates, or a folder with ``ca.pem``, ``cert.pem`` and ``key.pem``. UCX is not
        used with TLS.
    quiet : bool
        Keep the workers from logging each failed task with its traceback: the error reaches the client anyway.

    Yields
    ------
    distributed.Client

    Raises
    ------
    InputError
        For a GPU asked for where none can be used, more workers than GPUs, or a limit that is no size; in a worker that
        runs the script anew, as its import, because the script does not say which part is for the main process alone.

    Examples
    --------
    >>> import distmm, numpy as np
    >>> from distmm import clusters
    >>> with clusters.local("cpu", dashboard=None) as client:  # doctest: +SKIP
    ...     C = distmm.matmul(np.ones((8, 8)), np.ones((8, 8)), client=client).compute()
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # on GPUs the two would wait for each other
        raise InputError(
            "this script starts a cluster while a worker imports it, as each worker does with the script that has "
            "started it: put what the script does below the line  if __name__ == '__main__':"
        )
    if device not in ("auto", "gpu", "cpu"):
        raise InputError(f"device {device!r} is not one of auto, gpu, cpu")
    missing = missing_for_gpu() if device != "cpu" else "the CPU was asked for"
    if device == "gpu" and missing:
        raise InputError(
            f"a GPU was asked for, and {missing}; or use --device cpu, in a job file workers.device = 'cpu'"
        )
    if workers is not None and workers < 1:
        raise InputError(f"{workers} workers: at least 1 is needed")
    try:
        limit = None if memory_limit is None else parse_bytes(memory_limit)
    except ValueError as error:
        raise InputError(f"memory limit {memory_limit!r} is not a size; write it as 8GB or 16GiB") from error
    if limit is not None and limit < LEAST_MEMORY:
        raise InputError(
            f"memory limit {memory_limit} is less than the {LEAST_MEMORY / 1e6:.0f} MB that a worker takes by itself: "
            f"Dask would end it as soon as it has started; give a gigabyte or more"
        )
    make, arguments, config = _cpu(workers, limit, threads) if missing else _gpu(workers, limit)
    # The scheduler's web server always runs, also without a dashboard: it answers /health and /metrics.
    address = "127.0.0.1:0" if dashboard is None else _free_address(dashboard)
    routes = {} if dashboard is not None else {"distributed.scheduler.http.routes": dashboard_access.PROBED}
    arguments["scheduler_kwargs"] = {"dashboard": dashboard is not None}
    if tls != "none":
        arguments |= {"security": security(tls), "protocol": "tls"}
    arguments["silence_logs"] = logging.CRITICAL if quiet else logging.WARNING

    def started() -> LocalCluster:
        # The routes are read once, by this scheduler. Another process may take the port after `_free_address` has found
        # it free: Dask then takes another one, and warns.
        with dask.config.set(routes), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"Port \d+ is already in use", UserWarning)
            return make(dashboard_address=address, **arguments)

    with (
        dask.config.set({**SCHEDULER_CONFIG, **LOCAL_CONFIG, **config}),
        ExitStack() as start,
    ):
        start.enter_context(sigint_blocked())
        local_cluster = started()
        try:
            with local_cluster, Client(local_cluster) as client:
                start.close()
                cluster.warm_up(client)
                yield client
        finally:
            # If an interrupt came while it was closing, Dask would close it once more when the process ends, and wait
            # 10 s in vain. Its workers are daemons, which end with this process.
            local_cluster.shutdown_on_close = False


Recipe = tuple[Any, dict[str, Any], dict[str, Any]]  # class of the cluster, its arguments, Dask's configuration


def _cpu(workers: int | None, limit: int | None, threads: int | None) -> Recipe:
    count = workers or (1 if CPU_COUNT <= MOST_CPU_TASKS else MOST_CPU_TASKS)
    cores = max(1, CPU_COUNT // count)
    threads = threads or (cores if cores <= MOST_CPU_TASKS else 1)
    # Dask would give each task one BLAS thread, which leaves cores idle if there are fewer tasks than cores.
    kernel = str(max(1, cores // threads))
    config = {f"distributed.nanny.pre-spawn-environ.{name}": os.environ.get(name, kernel) for name in BLAS_THREADS}
    arguments = {
        "n_workers": count,
        "threads_per_worker": threads,
        "processes": True,
        "memory_limit": limit or MEMORY_LIMIT // count,
    }
    return LocalCluster, arguments, config


def _gpu(workers: int | None, limit: int | None) -> Recipe:
    from dask_cuda import LocalCUDACluster

    count = gpu_count()
    if workers is not None and workers > count:
        raise InputError(
            f"{workers} workers: one is started a GPU, and this process has {count}; ask for {count} or fewer"
        )
    arguments = {
        "n_workers": workers or count,
        "memory_limit": limit or MEMORY_LIMIT // (workers or count),
        "protocol": "ucx" if importlib.util.find_spec("distributed_ucxx") else "tcp",
        **gpu_worker_setup.cluster_arguments(),
    }
    # Memory of the client that a worker pins counts as the worker's, and Dask would pause and kill the worker for it.
    config = {f"distributed.worker.memory.{action}": False for action in ("target", "spill", "pause", "terminate")}
    return LocalCUDACluster, arguments, config


def _free_address(address: str) -> str:
    """Return the address if its port can be bound, else the same with any free port.

    Dask takes another port too, but it warns on each start, and leaves a socket open.
    """
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise InputError(f"dashboard address {address!r} has no port; write it as :8787 or 127.0.0.1:8787")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError:
            return f"{host}:0"
    return address
