"""Workers from Slurm for a client that runs on the login node: ``distmm multiply ... --cluster slurm``.

Each node is a separate Slurm job. So a product can start before all nodes are there, and a lost node is requested
again. To run the client inside one allocation of all nodes, submit a job file instead.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import dask
from dask.utils import parse_bytes
from pydantic import ValidationError

from distmm.all_workers import workers_of
from distmm.durations import seconds
from distmm.errors import InputError
from distmm.submit import dashboard_access, jobfile, slurm_queue
from distmm.submit.schema import Run, Slurm, Workers
from distmm.submit.slurm_queue import POLL_SECONDS
from distmm.tls import certificate_paths, create, security
from distmm.worker import gpu_worker_setup

if TYPE_CHECKING:
    from distributed import Client
    from distributed.security import Security

__all__ = ["arguments", "connect", "start"]

# Seconds between two searches of the queue for lost nodes. Each is a request to slurmctld, which serves the whole site.
LOOK_SECONDS = 15.0


@contextmanager
def connect(
    where: str,
    *,
    tls: str = "none",
    device: str = "auto",
    workers: int | None = None,
    memory_limit: str | None = None,
    quiet: bool = False,
) -> Iterator[Client]:
    """Start workers for ``--cluster slurm`` (one node) or ``--cluster slurm:job.toml`` (as the job file says).

    The parameters are those of `distmm.clusters.connect`.

    Yields
    ------
    distributed.Client

    Raises
    ------
    InputError
        For options that contradict the job file or are invalid, and as `start` does.
    """
    _, colon, file = where.partition(":")
    if colon and (workers is not None or memory_limit is not None):
        raise InputError(f"workers and memory_limit are set by {file}: leave them out, or change them there")
    if colon:
        job = jobfile.load(file)
        run, machines, slurm = job.run, job.workers, job.slurm
    else:
        run, slurm = Run(), Slurm()
        given = {"per_node": workers, "memory": memory_limit, "device": "cpu" if device == "cpu" else "gpu"}
        try:
            machines = Workers.model_validate({key: value for key, value in given.items() if value is not None})
        except ValidationError as error:
            wrong = error.errors()[0]
            key, value = wrong["loc"][0], wrong["input"]
            raise InputError(f"--cluster slurm: {key} {value!r} is not {jobfile.expected(wrong)}") from error
    switch = run.tls if tls == "none" else tls
    certificates = certificate_paths(switch, run.folder, run.name)
    if certificates is not None and switch == "temporary":  # in the shared folder, where nodes read them
        create(certificates)
        switch = os.path.dirname(certificates["key"])
    with start(run, machines, slurm, security=security(switch)) as client:
        yield client


def arguments(run: Run, workers: Workers, slurm: Slurm, security: Security | None = None) -> dict[str, Any]:
    """Return the arguments of dask-jobqueue's ``SLURMCluster``.

    ``processes`` counts workers, ``cores`` their threads, and ``job_cpu`` the cores of the node. There is one process
    for each GPU: ``cores=8, processes=1`` would give each of 8 GPU workers 8 threads and the whole memory of the job.
    For keys that the job file leaves empty (partition, account), dask-jobqueue uses its own configuration.

    Parameters
    ----------
    run, workers, slurm
        Tables of a job file.
    security : distributed.security.Security, optional
        For a cluster with TLS.
    """
    gpu = workers.device == "gpu"
    dashboard = ":0" if run.dashboard == "all" else "127.0.0.1:0"
    threads = max(1, workers.cpus // workers.per_node)
    directives = {
        "gres": slurm.gres or (f"gpu:{workers.per_node}" if gpu else ""),
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": slurm.constraint,
    }
    found: dict[str, Any] = {
        "job_name": run.name,
        "cores": workers.per_node * workers.threads,
        "processes": workers.per_node,
        "memory": f"{workers.memory_each * workers.per_node} B",
        "job_cpu": workers.cpus,
        "job_mem": f"{parse_bytes(workers.memory) // 2**20}M",
        "walltime": str(-(-int(seconds(run.walltime)) // 60)),
        "queue": slurm.partition or None,
        "account": slurm.account or None,
        "interface": workers.interface or None,
        "log_directory": None if run.folder == Run().folder else run.folder,
        "job_extra_directives": [
            *(f"--{name}={value}" for name, value in directives.items() if value),
            *(["--exclusive"] if slurm.exclusive else []),
        ],
        "job_script_prologue": [f"export {name}_NUM_THREADS={threads}" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")],
        "worker_extra_args": ["--dashboard-address", dashboard],
        "scheduler_options": {
            "dashboard_address": dashboard,  # any port: 8787 of a login node is somebody else's
            "dashboard": run.dashboard != "none",
        },
    }
    if gpu:
        found["worker_command"] = "dask_cuda.cli"
        found["worker_extra_args"] += gpu_worker_setup.worker_options()
    if workers.transport == "ucx":
        found["protocol"] = "ucx"
    if security is not None:
        found |= {"protocol": "tls", "security": security}
    return found


@contextmanager
def start(
    run: Run, workers: Workers, slurm: Slurm, *, security: Security | None = None, timeout: float = 600
) -> Iterator[Client]:
    """Request nodes from Slurm, wait for their workers, and cancel the jobs at the end of the ``with`` block.

    Parameters
    ----------
    run, workers, slurm
        Tables of a job file.
    security : distributed.security.Security, optional
        For a cluster with TLS: paths of files that all nodes can read.
    timeout : float
        Seconds to wait for all workers. After that, the product starts with the workers that have joined.

    Yields
    ------
    distributed.Client

    Raises
    ------
    InputError
        Without dask-jobqueue or Slurm, if Slurm refuses the jobs or can never start one, and if no worker joins.
    """
    try:
        from dask_jobqueue import SLURMCluster
    except ImportError as error:
        raise InputError("--cluster slurm needs dask-jobqueue: type pip install '.[slurm]'") from error
    if shutil.which("sbatch") is None:
        raise InputError("there is no sbatch here: use --cluster slurm on a login node of a cluster with Slurm")
    slurm_queue.check_answers()
    from distributed import Client

    refusals: list[str] = []
    made = arguments(run, workers, slurm, security) | {"job_cls": _reporting(SLURMCluster.job_cls, refusals)}
    with (
        dask.config.set(dashboard_access.settings(run.dashboard, port="{port}")),
        SLURMCluster(**made) as cluster,
        Client(cluster) as client,
        _replacing_lost_nodes(cluster, workers.nodes, run.restarts),
    ):
        # Not adapt(): when there are few tasks, it retires workers and the blocks that they hold.
        cluster.scale(jobs=workers.nodes)
        _wait(client, cluster, run, workers, timeout, refusals)
        yield client


def _reporting(job: Any, refusals: list[str]) -> Any:
    """Return a subclass of dask-jobqueue's job class that adds sbatch's message to `refusals` if it refuses a job.

    dask-jobqueue submits jobs in a callback of its event loop. An error there is only logged, and code that waits for
    the workers does not see it.
    """
    from distributed.deploy.spec import ProcessInterface

    class Job(job):  # type: ignore[misc]
        async def start(self) -> None:
            try:
                await super().start()
            except RuntimeError as error:
                said = re.search(r"(?s)stderr:\n(.*\S)", str(error))
                refusals.append(said[1].strip() if said else str(error))
                await ProcessInterface.start(self)  # a job without a number is requested again, like a lost one

    return Job


def _wait(client: Client, cluster: Any, run: Run, workers: Workers, timeout: float, refusals: list[str]) -> None:
    """Wait for all workers, at most `timeout` seconds.

    Raises
    ------
    InputError
        At once if Slurm refuses all jobs, if one can never start, and if one ends before the first worker joins; after
        `timeout` seconds if no worker has joined.
    """
    ends = time.monotonic() + timeout
    while True:
        with suppress(TimeoutError):
            client.wait_for_workers(workers.count, timeout=max(0.1, min(POLL_SECONDS, ends - time.monotonic())))
            return
        numbers = [job.job_id for job in dict(cluster.workers).values() if job.job_id]
        queue = slurm_queue.entries(numbers) if numbers else []
        some_joined = bool(workers_of(client))
        reasons = [f"job {entry.number} can never start: {entry.reason}" for entry in queue if entry.can_never_start]
        if not some_joined:  # later, a job that has ended is replaced by another one
            log = run.folder if run.folder != Run().folder else "this folder"
            reasons += [f"job {entry.number} {entry.end}; its log is in {log}" for entry in queue if entry.end]
        if len(refusals) >= workers.nodes:  # a site may accept some jobs of a user and refuse others
            reasons.append(f"sbatch refuses: {refusals[0]}")
        if reasons:
            raise InputError(
                f"{reasons[0]}. Each node is a separate job, with {workers.per_node} worker(s), {workers.cpus} CPUs "
                f"and {workers.memory} of memory: compare with sinfo, and change the job file's [workers] and [slurm]"
            )
        if time.monotonic() > ends:
            if some_joined:
                return
            raise InputError(
                f"Slurm has started none of {workers.nodes} node(s) within {timeout:g} s: see squeue --me; "
                f"distmm submit waits in the queue instead"
            )


@contextmanager
def _replacing_lost_nodes(cluster: Any, nodes: int, restarts: int) -> Iterator[None]:
    """Request nodes again whose jobs have left the queue, at most `restarts` times in all.

    Dask does this for adaptive clusters only, and never for jobs with several workers. Jobs that Slurm has requeued, or
    whose worker is being restarted, are still in the queue and are not requested again.
    """
    ended = threading.Event()

    def keep() -> None:
        left = restarts
        while left and not ended.wait(LOOK_SECONDS):
            submitted = dict(cluster.workers)
            queue = slurm_queue.queued()
            if queue is None:
                continue
            lost = [name for name, job in submitted.items() if job.job_id not in queue][:left]
            if lost:
                left -= len(lost)
                cluster.loop.add_callback(replace, lost)

    def replace(lost: list[Any]) -> None:
        for name in lost:
            cluster.workers.pop(name, None)
        cluster.scale(jobs=nodes)  # submits as many new jobs, under the same names

    thread = threading.Thread(target=keep, name="distmm-slurm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
