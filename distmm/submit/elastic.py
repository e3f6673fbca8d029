"""Workers from Slurm for a client that runs on the login node: ``distmm multiply ... --cluster slurm``.

Each node is a job of its own, so that a product starts with the nodes that the queue has given so far, and a node that
is lost is asked for again. Where the whole allocation is wanted at once, and the client in it, submit a job file.
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

# Between two looks at the queue for nodes that are lost: one question to slurmctld, which serves the whole site.
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
    """Start workers for ``--cluster slurm``, on one node, or ``--cluster slurm:job.toml``, as a job file says.

    Parameters are those of `distmm.clusters.connect`.
    """
    _, colon, file = where.partition(":")
    if colon and (workers is not None or memory_limit is not None):
        raise InputError(f"workers and memory_limit are for {file} to say: leave out, or change it there")
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
    if certificates is not None and switch == "temporary":  # nodes read them from a folder that they share
        create(certificates)
        switch = os.path.dirname(certificates["key"])
    with start(run, machines, slurm, security=security(switch)) as client:
        yield client


def arguments(run: Run, workers: Workers, slurm: Slurm, security: Security | None = None) -> dict[str, Any]:
    """Say how dask-jobqueue's ``SLURMCluster`` is to be made.

    One process a GPU: ``cores=8, processes=1`` would give 8 threads and the whole memory of the job to each of 8 GPU
    workers. ``processes`` counts workers, ``cores`` their threads, and ``job_cpu`` the cores of the node.
    dask-jobqueue takes what the job file leaves empty (partition, account) from its own configuration.
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
    """Ask Slurm for the nodes, wait for their workers, and cancel their jobs at the end of the ``with`` block.

    Parameters
    ----------
    run, workers, slurm
        Tables of a job file.
    security : distributed.security.Security, optional
        For a cluster with TLS: paths of files that all nodes see.
    timeout : float
        Seconds to wait for all workers. Then the product starts with those that are there.

    Yields
    ------
    distributed.Client

    Raises
    ------
    InputError
        Without dask-jobqueue or Slurm, for jobs that Slurm refuses or can never start, and where no worker came.
    """
    try:
        from dask_jobqueue import SLURMCluster
    except ImportError as error:
        raise InputError("--cluster slurm needs dask-jobqueue: type pip install 'distmm[slurm]'") from error
    if shutil.which("sbatch") is None:
        raise InputError("there is no sbatch here: --cluster slurm is for a login node of a cluster with Slurm")
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
        # Not adapt(): it retires workers, with the blocks that they hold, as soon as tasks are few.
        cluster.scale(jobs=workers.nodes)
        _wait(client, cluster, run, workers, timeout, refusals)
        yield client


def _reporting(job: Any, refusals: list[str]) -> Any:
    """Return dask-jobqueue's class of jobs, which notes what sbatch said of a job that it refused.

    dask-jobqueue submits in a callback of its event loop: there an error becomes a traceback in the log, and whoever
    waits for the workers is not told.
    """
    from distributed.deploy.spec import ProcessInterface

    class Job(job):  # type: ignore[misc]
        async def start(self) -> None:
            try:
                await super().start()
            except RuntimeError as error:
                said = re.search(r"(?s)stderr:\n(.*\S)", str(error))
                refusals.append(said[1].strip() if said else str(error))
                await ProcessInterface.start(self)  # a job without a number is asked for again, as one that was lost

    return Job


def _wait(client: Client, cluster: Any, run: Run, workers: Workers, timeout: float, refusals: list[str]) -> None:
    """Wait for all workers, at most `timeout` seconds.

    Raises
    ------
    InputError
        At once where Slurm refuses all jobs, where one can never start, and where one ends before any worker is there;
        after `timeout` seconds if no worker has come.
    """
    ends = time.monotonic() + timeout
    while True:
        with suppress(TimeoutError):
            client.wait_for_workers(workers.count, timeout=max(0.1, min(POLL_SECONDS, ends - time.monotonic())))
            return
        numbers = [job.job_id for job in dict(cluster.workers).values() if job.job_id]
        queue = slurm_queue.entries(numbers) if numbers else []
        there = bool(client.scheduler_info()["workers"])
        reasons = [f"job {entry.number} can never start: {entry.reason}" for entry in queue if entry.can_never_start]
        if not there:  # else another job is asked for, in place of one that has ended
            log = run.folder if run.folder != Run().folder else "this folder"
            reasons += [f"job {entry.number} {entry.end}; its log is in {log}" for entry in queue if entry.end]
        if len(refusals) >= workers.nodes:  # a site may take some jobs of a user and refuse others
            reasons.append(f"sbatch refuses: {refusals[0]}")
        if reasons:
            raise InputError(
                f"{reasons[0]}. Each node is a job of its own, with {workers.per_node} worker(s), {workers.cpus} CPUs "
                f"and {workers.memory} of memory: compare with sinfo, and change the job file's [workers] and [slurm]"
            )
        if time.monotonic() > ends:
            if there:
                return
            raise InputError(
                f"Slurm has started none of {workers.nodes} node(s) within {timeout:g} s: see squeue --me; "
                f"distmm submit waits in the queue instead"
            )


@contextmanager
def _replacing_lost_nodes(cluster: Any, nodes: int, restarts: int) -> Iterator[None]:
    """Ask again for nodes whose jobs have left the queue, at most `restarts` times in all.

    Dask does so for adaptive clusters only, and never where a job has several workers. A job that Slurm has requeued,
    or whose worker is being restarted, is left alone.
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
        cluster.scale(jobs=nodes)  # makes the same number of jobs anew, under the same names

    thread = threading.Thread(target=keep, name="distmm-slurm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
