"""``distmm submit job.toml``."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from distmm.cli import options, session
from distmm.errors import InputError

if TYPE_CHECKING:
    from distmm.clusters.hardware import Hardware
    from distmm.submit.schema import Job

# Commands that a submitted job may run.
COMMANDS = ("multiply", "topk", "threshold", "resume", "verify")

# Packages that the workers need.
NEEDED = {"gpu": ("distmm", "dask_cuda", "cupy", "rmm"), "cpu": ("distmm",)}

# Prints the packages that a Python lacks. It does not import them, because CUDA's libraries take seconds to import.
LACKING = "import importlib.util as u, sys; print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"


def submit(
    file: Annotated[
        Path | None, typer.Argument(metavar="JOB.toml", help="The job file; distmm examples lists some.")
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND",
            help="Run topk, threshold, resume or verify, with its arguments, instead of the job's product.",
        ),
    ] = None,
    cluster: Annotated[
        Literal["local", "slurm", "kubernetes"], typer.Option(help="System that runs the job.")
    ] = "local",
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Set a key of the job file; may be given several times."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script or the manifests, and submit nothing.")
    ] = False,
    only_cluster: Annotated[
        bool, typer.Option("--only-cluster", help="Kubernetes: print a DaskCluster without the product.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Submit the job, and do not follow it.")] = False,
    follow: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Follow a job that was submitted before: Slurm's number, or NAMESPACE/NAME.",
        ),
    ] = None,
    python: Annotated[
        str, typer.Option(help="Slurm: the Python that nodes start.", show_default="this one")
    ] = sys.executable,
    as_json: options.Json = False,
) -> None:
    """Run a job file here, or submit it to Slurm or Kubernetes and follow it.

    The exit code is that of **distmm multiply**; 75 means stopped with all finished blocks kept: submit it again to
    resume it.

    ```text
    distmm submit job.toml
    distmm submit job.toml --cluster slurm --set workers.nodes=4 --set run.walltime=8h
    distmm submit job.toml --cluster kubernetes --dry-run | kubectl diff -f -
    distmm submit --follow 4711
    distmm submit job.toml --cluster slurm -- topk X.zarr -k 15 --metric cosine -o near.zarr
    ```
    """
    if follow is not None:
        if file is not None:
            raise typer.BadParameter(f"--follow {follow} submits no job: leave out {file}")
        kind = "slurm" if follow.isdigit() else "kubernetes"
        raise _ended(as_json, kind, _follow(follow), follow)
    if file is None:
        raise typer.BadParameter("give a job file, or --follow with the ID of a job that was submitted before")
    from distmm.submit import jobfile

    if command and command[0] not in COMMANDS:
        raise typer.BadParameter(f"{command[0]} is not a command for a cluster: give {', '.join(COMMANDS)}")
    if as_json and (dry_run or only_cluster):
        option = "--dry-run" if dry_run else "--only-cluster"
        raise typer.BadParameter(f"{option} prints what would be submitted, which is not JSON: leave out --json")
    job = jobfile.load(file, change or (), command or ())
    if only_cluster or dry_run:
        if dry_run:
            _say("not checked by --dry-run: whether the matrices are there, and whether the product fits")
        _print(job, "kubernetes" if only_cluster else cluster, only_cluster, python)
        return
    if cluster == "local":
        # JSON alone stays on stdout.
        done = subprocess.run(_local_command(job), check=False, stdout=sys.stderr.fileno() if as_json else None)
        raise _ended(as_json, cluster, done.returncode)
    if cluster == "kubernetes":
        raise _ended(as_json, cluster, *_kubernetes(job, detach))
    words = ["distmm", "submit", str(file.absolute()), "--cluster", cluster]
    words += ["--python", python] if python != sys.executable else []
    words += [word for one in change or () for word in ("--set", one)] + (["--", *command] if command else [])
    raise _ended(as_json, cluster, *_slurm(job, shlex.join(words), detach, python))


def _ended(
    as_json: bool, cluster: str, code: int | None, name: str | None = None, log: str | None = None
) -> typer.Exit:
    """Return the exit with the code of a job, which is None if the job was not followed."""
    if as_json:
        session.print_json({"cluster": cluster, "id": name, "log": log, "exit_code": code})
    return typer.Exit(code or 0)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _follow(name: str, *start_timeout: str) -> int:
    """Follow a job by Slurm's number, or by its namespace and name on Kubernetes."""
    from distmm.submit import kubernetes, slurm

    if name.isdigit():
        slurm.check_program()
        return slurm.follow(name, _say)
    kubernetes.check_program()
    return kubernetes.follow(name, _say, *start_timeout)


def _followed(name: str, detach: bool, ended_by: str, *start_timeout: str) -> int | None:
    """Return the exit code of a submitted job. None if it is not followed; an interrupt only ends that."""
    if detach:
        return None
    try:
        return _follow(name, *start_timeout)
    except KeyboardInterrupt:
        _say(f"the job goes on: distmm submit --follow {name}\n{ended_by} ends it; finished blocks are kept")
        raise


def _local_command(job: Job) -> list[str]:
    workers = ["--workers", str(job.workers.per_node), "--memory-limit", str(job.workers.memory_each)]
    command = [sys.executable, "-m", "distmm", *job.command(), "--tls", job.run.tls, *workers]
    return command + (["--overwrite"] if job.overwrite else [])


def _print(job: Job, cluster: str, only_cluster: bool, python: str) -> None:
    """Print what would be run or submitted. With manifests, the command that creates their Secret is on stderr."""
    from distmm.submit import kubernetes, manifests, slurm

    if cluster == "local":
        typer.echo(shlex.join(_local_command(job)))
    elif cluster == "slurm":
        typer.echo(slurm.render(job, python=python), nl=False)
    else:
        typer.echo(manifests.dump((manifests.cluster if only_cluster else manifests.job)(job)), nl=False)
        if (command := kubernetes.secret_command(job)) is not None:
            _say(f"the pods wait for the Secret {manifests.secret_name(job)}; distmm submit creates it, and so does:")
            _say(command)


def _slurm(job: Job, submitted_by: str, detach: bool, python: str) -> tuple[int | None, str, str]:
    """Submit a job. Return its exit code, its number and its log."""
    from distmm.submit import slurm

    slurm.check_program()
    _check_packages(job, python)
    _check_product(job)
    number = slurm.submit(job, python=python, submitted_by=submitted_by)
    log = f"{job.run.folder}/{job.run.name}-{number}.log"
    _say(f"job {number}: submitted; its log is {log}")
    code = _followed(number, detach, f"scancel {number}")
    if code == slurm.RESUMABLE:
        _say(f"job {number}: finished blocks are kept; to go on: {submitted_by}")
    return code, number, log


def _kubernetes(job: Job, detach: bool) -> tuple[int | None, str]:
    """Submit a job. Return its exit code, and its namespace and name."""
    from distmm.submit import kubernetes

    where, name = job.kubernetes.namespace, job.run.name
    _say("not checked: A, B and C, which only the pods see")
    kubernetes.submit(job)
    _say(f"daskjob {name}: submitted to namespace {where}")
    ended_by, full = f"kubectl -n {where} delete daskjob {name}", f"{where}/{name}"
    return _followed(full, detach, ended_by, job.kubernetes.start_timeout), full


def _check_product(job: Job) -> None:
    """Refuse a product for which this machine can find that the job would fail (`distmm.job.job.preflight`)."""
    from distmm.job.job import preflight
    from distmm.product.choices import Choices

    if (product := job.product) is None:
        _say("not checked: the arguments of the command")
        return
    seconds = float(job.seconds("walltime") - job.seconds("grace"))
    choices = Choices(
        precision=product.precision, kernel=product.kernel or None, plan=product.plan or None, hardware=_machines(job),
        blocks=options.edges(product.blocks) if product.blocks else None,
    )  # fmt: skip
    unknown = preflight(
        product.a, product.b, product.c, choices=choices, overwrite=product.overwrite, check=product.check,
        run_seconds=seconds, transa=product.transa, transb=product.transb,
    )  # fmt: skip
    for what in unknown:
        _say(f"not checked: {what}")


def _check_packages(job: Job, python: str) -> None:
    """Refuse a job whose workers would lack a package. Nothing is checked if their Python is not on this machine."""
    if shutil.which(python) is None:
        return
    command = [python, "-c", LACKING, *NEEDED[job.workers.device]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"{python}: is not a working Python here: {done.stderr.strip()[-200:]}; give another --python")
    if lacking := done.stdout.split():
        raise InputError(
            f"workers.device = {job.workers.device!r}, but {python}, which the nodes start, lacks "
            f"{', '.join(lacking)}: install distmm there by pip install '.[cuda13]' (or cuda12), give another "
            f"--python, or set workers.device = 'cpu'"
        )


def _machines(job: Job) -> Hardware | None:
    """Return the workers of a job file; None for GPUs without a model in ``slurm.gres``."""
    from distmm.clusters.gpu_models import MODELS
    from distmm.clusters.hardware import cpus, gpus

    workers = job.workers
    if workers.device == "cpu":
        found = cpus(workers.count, threads=workers.threads, memory=workers.memory_each)
        return replace(found, cores=max(1, workers.cpus // workers.per_node))
    named = {part.casefold() for part in job.slurm.gres.split(":")}
    model = next((name for name in MODELS if name.casefold() in named), None)
    return None if model is None else gpus(workers.count, model, host_memory=workers.memory_each)
