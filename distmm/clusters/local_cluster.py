"""A local cluster, on the GPUs or the CPUs of this machine."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import dask
from dask.system import CPU_COUNT
from dask.utils import parse_bytes
from distributed import Client, LocalCluster, Status
from distributed.system import MEMORY_LIMIT

from distmm import units
from distmm.clusters import cluster
from distmm.clusters.gpus import gpu_count, missing_for_gpu
from distmm.clusters.hardware import Hardware
from distmm.clusters.warm_up import warm_up
from distmm.config import chosen
from distmm.errors import InputError
from distmm.interrupts import sigint_blocked
from distmm.submit import dashboard_access
from distmm.submit.tls import security
from distmm.worker import gpu_worker_setup
from distmm.worker.tasks.probe import LEAST_MEMORY, cores_of

# Configuration of the schedulers that distmm starts.
# - Work stealing ignores placement if worker restrictions are loose.
# - When a worker dies, Dask counts a failure for each task that is queued there. With its limit of 3, a few dead
#   workers would end the product.
# - By default Dask drops the name of a dead worker after 15 s, if no worker of that name has joined. A worker that dies
#   twice, and is just being restarted at that moment, would never join again.
SCHEDULER_CONFIG = {
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.allowed-failures": 100,
    "distributed.deploy.lost-worker-timeout": "1 day",
}

# By default Dask measures the delay of its event loops every 20 ms, and samples the stacks of its tasks every 10 ms. On
# an idle cluster of one worker this takes 11 % of a core. With these intervals it takes 3 %, and the dashboard shows
# both at a coarser resolution.
LOCAL_CONFIG = {
    "distributed.admin.tick.interval": "200ms",
    "distributed.worker.profile.interval": "100ms",
}

# Environment variables for the number of threads of BLAS libraries and Numba.
BLAS_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")

# How malloc treats freed memory on CPU workers. With Dask's setting it returns all of it to the system. A check makes
# many arrays of up to 1 MB, and each got new pages, which take 2 us each. With this setting malloc keeps up to 4 MiB in
# each thread for arrays of less than 2 MiB, and returns the memory of larger ones, such as blocks. The sketches of a
# job took 3.3 s with Dask's setting, and take 2.1.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 21), "MALLOC_TOP_PAD_": str(1 << 22)}

# Most block products that run at the same time on a machine's CPUs. The kernels use the other cores; more products
# would only mean smaller blocks of C. On a machine with at most so many cores, one process runs all products: it has
# one copy of each block of A and B, and sends none (two processes on two cores took 1.4 times the CPU seconds). On a
# machine with more cores each process runs one product, because OpenBLAS runs only one multithreaded product at a time
# in a process.
MOST_CPU_TASKS = 4

UNGUARDED = (
    "this script starts a cluster while a worker imports it: each worker imports the script that started it. Put the "
    "script's work below the line  if __name__ == '__main__':"
)


@contextmanager
def local(
    device: cluster.DeviceChoice = "auto",
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
        ``"auto"`` uses the GPUs if `missing_for_gpu` returns None, else the CPU.
    workers : int, optional
        Number of worker processes. GPUs: one process a GPU, by default for all GPUs. CPUs: by default 1 on up to 4
        cores, else 4.
    threads : int, optional
        Tasks that a CPU worker runs at the same time. By default the number of its cores if that is at most 4, else 1,
        whose kernel uses all of its cores.
    memory_limit : str, optional
        Host memory of each worker, such as ``"8GB"``. By default the workers share the machine's memory evenly.
    dashboard : str or None
        Address of the dashboard; ``":8787"`` makes it visible to other machines. If the port is in use, a free one is
        used instead. None: no dashboard.
    tls : str
        ``"none"``, ``"temporary"`` certificates, or a folder with ``ca.pem``, ``cert.pem`` and ``key.pem``.
    quiet : bool
        Workers do not log failed tasks with their tracebacks. The client receives the errors in any case.

    Yields
    ------
    distributed.Client

    Raises
    ------
    InputError
        If `device` is "gpu" and no GPU can be used, for more workers than GPUs, and for an invalid size or address.
        Also if a worker does not start, as when the calling script, which each worker imports, lacks
        ``if __name__ == "__main__":``, or when other processes use the GPU's memory (``distmm.gpu-pool``).

    Examples
    --------
    >>> import distmm, numpy as np
    >>> from distmm import clusters
    >>> with clusters.local("cpu", dashboard=None) as client:  # doctest: +SKIP
    ...     C = distmm.matmul(np.ones((8, 8)), np.ones((8, 8)), client=client).compute()
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # on GPUs this would be a deadlock
        sys.exit(UNGUARDED)  # without a traceback: the process that starts the worker raises the error
    make, arguments, config = _setup(device, workers, threads, memory_limit)
    # The first product needs Dask's arrays. Their import takes longer than most products, so it runs while the workers
    # start.
    Thread(target=import_module, args=("dask.array",), name="distmm-import", daemon=True).start()
    if make is not LocalCluster:
        from distmm_kernels import background
        from distmm_kernels import device as devices

        background.begin("float32", devices.of_driver()[0][0].compute_capability)  # while the workers start
    # The scheduler's web server always runs, also without a dashboard: it answers /health and /metrics.
    address = "127.0.0.1:0" if dashboard is None else _free_address(dashboard)
    routes = {} if dashboard is not None else {"distributed.scheduler.http.routes": dashboard_access.PROBED}
    arguments["scheduler_kwargs"] = {"dashboard": dashboard is not None}
    if tls != "none":
        arguments |= {"security": security(tls), "protocol": "tls"}
    arguments["silence_logs"] = logging.CRITICAL if quiet else logging.WARNING

    with dask.config.set({**SCHEDULER_CONFIG, **LOCAL_CONFIG, **config}), ExitStack() as start:
        start.enter_context(sigint_blocked())
        try:
            # The scheduler reads the routes only at its start. If another process takes the port after `_free_address`,
            # Dask uses another port and warns.
            with dask.config.set(routes), warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"Port \d+ is already in use", UserWarning)
                local_cluster = make(dashboard_address=address, **arguments)
        except RuntimeError as error:
            raise _not_started("workers of the local cluster have not started", error) from None
        try:
            with local_cluster, Client(local_cluster) as client:
                start.close()
                _refuse_failed_workers(local_cluster)
                warm_up(client)
                yield client
        finally:
            # After an interrupt during the close, Dask would close the cluster again at the end of this process, and
            # wait 10 s without effect. The workers are daemons and end with this process.
            local_cluster.shutdown_on_close = False


def _refuse_failed_workers(local_cluster: LocalCluster) -> None:
    """Raise the error with which a worker's start has failed: `LocalCUDACluster` only logs it."""
    for name, nanny in local_cluster.workers.items():
        if nanny.status is Status.failed:
            try:
                local_cluster.sync(nanny.start)  # raises the error again
            except Exception as error:
                raise _not_started(f"worker {name} of the local cluster has not started", error) from None


def _not_started(what: str, error: BaseException) -> InputError:
    """Return the error that says why workers have not started, with the first cause of the error that Dask raises.

    A process that ends before it is a worker has imported a script without a guard, if the script has none.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    # A worker does not import the `__main__.py` of a package, as in ``python -m distmm``.
    if not script.endswith("__main__.py") and "failed to start worker process" in str(error):
        with suppress(OSError, ValueError):  # not a file, or not text
            if "__main__" not in Path(script).read_text():
                return InputError(UNGUARDED)
    return InputError(f"{what}: {str(error) or type(error).__name__}")


def cpu_workers(device: cluster.DeviceChoice, workers: int | None, memory_limit: str | None) -> Hardware | None:
    """Describe the CPU workers that `local` would start, for a plan without them; None if it would use GPUs."""
    make, arguments, config = _setup(device, workers, None, memory_limit)
    if make is not LocalCluster:
        return None
    threads, blas = arguments["threads_per_worker"], config[f"distributed.nanny.pre-spawn-environ.{BLAS_THREADS[0]}"]
    memory, cores = min(arguments["memory_limit"], MEMORY_LIMIT), cores_of(threads, blas)
    return Hardware(arguments["n_workers"], memory, threads=threads, cores=cores, here=True)


ClusterSetup = tuple[Any, dict[str, Any], dict[str, Any]]  # class of the cluster, its arguments, Dask's configuration


def _setup(device: str, workers: int | None, threads: int | None, memory_limit: str | None) -> ClusterSetup:
    """Check the options of `local`."""
    missing = missing_for_gpu() if chosen("device", device) != "cpu" else "the CPU was chosen"
    if device == "gpu" and missing:
        raise InputError(
            f"a GPU was asked for, and {missing}; or use --device cpu, in a job file workers.device = 'cpu'"
        )
    if workers is not None and workers < 1:
        raise InputError(f"{workers} workers: at least 1 is needed")
    if workers is not None and workers > (most := MEMORY_LIMIT // LEAST_MEMORY):
        raise InputError(
            f"{workers} workers: each needs {LEAST_MEMORY / 1e6:.0f} MB by itself, and this process may take "
            f"{units.size(MEMORY_LIMIT)}; ask for {most} or fewer"
        )
    try:
        limit = None if memory_limit is None else parse_bytes(memory_limit)
    except (ValueError, OverflowError) as error:
        raise InputError(f"memory limit {memory_limit!r} is not a size; write it as 8GB or 16GiB") from error
    if limit is not None and limit < LEAST_MEMORY:
        raise InputError(
            f"memory limit {memory_limit} is less than the {LEAST_MEMORY / 1e6:.0f} MB that a worker needs: it takes "
            "200 MB by itself, and Dask pauses it at 80 % of its limit; give a gigabyte or more"
        )
    return _cpu(workers, limit, threads) if missing else _gpu(workers, limit)


def _cpu(workers: int | None, limit: int | None, threads: int | None) -> ClusterSetup:
    count = workers or (1 if CPU_COUNT <= MOST_CPU_TASKS else MOST_CPU_TASKS)
    cores = max(1, CPU_COUNT // count)
    threads = threads or (cores if cores <= MOST_CPU_TASKS else 1)
    # Dask's default is one BLAS thread for each task, which leaves cores idle if there are fewer tasks than cores.
    environment = MALLOC | dict.fromkeys(BLAS_THREADS, str(max(1, cores // threads)))
    config = {f"distributed.nanny.pre-spawn-environ.{k}": os.environ.get(k, v) for k, v in environment.items()}
    arguments = {
        "n_workers": count,
        "threads_per_worker": threads,
        "processes": True,
        "memory_limit": limit or MEMORY_LIMIT // count,
    }
    return LocalCluster, arguments, config


def _gpu(workers: int | None, limit: int | None) -> ClusterSetup:
    from dask_cuda import LocalCUDACluster

    count = gpu_count()
    if workers is not None and workers > count:
        raise InputError(
            f"{workers} workers: each needs its own GPU, and this process has {count}; ask for {count} or fewer"
        )
    arguments = {
        "n_workers": workers or count,
        "memory_limit": limit or MEMORY_LIMIT // (workers or count),
        **gpu_worker_setup.cluster_arguments(chosen("gpu-pool")),
    }
    # Client memory that a worker pins counts as its own. By its default limits Dask would pause or kill the worker.
    config = {f"distributed.worker.memory.{action}": False for action in ("target", "spill", "pause", "terminate")}
    return LocalCUDACluster, arguments, config


def _free_address(address: str) -> str:
    """Return the address, with port 0 (any free port) if its port is in use.

    Dask would also use another port, but with a warning at each start and with a socket left open.
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
