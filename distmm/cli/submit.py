"""``distmm submit job.toml``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from distmm.submit.schema import Job

__all__ = ["submit"]

# Commands that a submitted job may run.
COMMANDS = ("multiply", "topk", "threshold", "resume", "verify")


def submit(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="JOB.toml", help="The job file; distmm examples lists some.", show_default=False),
    ] = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND",
            help="Run topk, threshold, resume or verify, with its arguments, instead of the job's product.",
            show_default=False,
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
            show_default=False,
        ),
    ] = None,
    python: Annotated[
        str | None, typer.Option(help="Slurm: the Python that nodes start; by default this one.", show_default=False)
    ] = None,
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
        raise typer.Exit(_attached(follow))
    if file is None:
        raise typer.BadParameter("give a job file, or --follow with the ID of a job that was submitted before")
    from distmm.submit import jobfile

    if command and command[0] not in COMMANDS:
        raise typer.BadParameter(f"{command[0]} is not a command for a cluster: give {', '.join(COMMANDS)}")
    job = jobfile.load(file, change or (), command or ())
    if only_cluster:
        from distmm.submit import manifests

        _print(job, manifests.cluster(job))
        return
    run = {"local": _local, "slurm": _slurm, "kubernetes": _kubernetes}[cluster]
    raise typer.Exit(run(job, dry_run, detach, python))


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _attached(name: str) -> int:
    """Follow a job that was submitted before."""
    if name.isdigit():
        from distmm.submit import slurm

        return slurm.attach(name, _say)
    from distmm.submit import kubernetes

    return kubernetes.attach(name, _say)


def _local(job: Job, dry_run: bool, detach: bool, python: str | None) -> int:
    """Run the product on this machine, in a separate process."""
    import shlex

    workers = ["--workers", str(job.workers.per_node), "--memory-limit", str(job.workers.memory_each)]
    command = [sys.executable, "-m", "distmm", *job.command(), "--tls", job.run.tls, *workers]
    command += ["--overwrite"] if job.overwrite else []
    if dry_run:
        typer.echo(shlex.join(command))
        return 0
    return subprocess.run(command, check=False).returncode


def _slurm(job: Job, dry_run: bool, detach: bool, python: str | None) -> int:
    from distmm.cli import preflight
    from distmm.submit import slurm, slurm_script

    if dry_run:
        typer.echo(slurm_script.render(job, python=python or sys.executable), nl=False)
        return 0
    slurm.check_program()
    preflight.check_packages(job, python)
    preflight.check_product(job, _say)
    number = slurm.submit(job, python=python)
    _say(f"job {number}: submitted; its log is {job.run.folder}/{job.run.name}-{number}.log")
    if detach:
        return 0
    try:
        return slurm.follow(job, number, _say)
    except KeyboardInterrupt:
        _say(
            f"job {number} goes on: distmm submit --follow {number}. scancel {number} ends it; finished blocks are kept"
        )
        raise


def _print(job: Job, parts: list[dict[str, Any]]) -> None:
    """Print manifests, and on stderr the command that creates their Secret."""
    from distmm.submit import kubernetes, manifests

    typer.echo(manifests.dump(parts), nl=False)
    if (command := kubernetes.secret_command(job)) is not None:
        _say(f"the pods wait for the Secret {manifests.secret_name(job)}; distmm submit creates it, and so does:")
        _say(command)


def _kubernetes(job: Job, dry_run: bool, detach: bool, python: str | None) -> int:
    from distmm.submit import kubernetes, manifests

    if dry_run:
        _print(job, manifests.job(job))
        return 0
    _say("not checked: A, B and C, which only the pods see")
    kubernetes.submit(job)
    _say(f"daskjob {job.run.name}: submitted to namespace {job.kubernetes.namespace}")
    if detach:
        return 0
    try:
        return kubernetes.follow(job, _say)
    except KeyboardInterrupt:
        where = job.kubernetes.namespace
        _say(f"the job goes on: distmm submit --follow {where}/{job.run.name}")
        _say(f"kubectl -n {where} delete daskjob {job.run.name} ends it; finished blocks are kept")
        raise
