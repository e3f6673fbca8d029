"""What all commands that run a job do, and ``distmm resume C`` and ``distmm status C``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distmm import interrupts, job, units
from distmm.cli import options, session

if TYPE_CHECKING:
    from distmm.planning.plan import Plan


def run(
    ctx: typer.Context,
    given: options.Job,
    inputs: list[str],
    function: Callable[..., job.Summary],
    **own: Any,
) -> None:
    """Run a job, on a cluster that starts after its checks.

    Parameters
    ----------
    given : Job
        The options that all jobs have.
    inputs : list of str
        Paths of the matrices that are read.
    function : callable
        A function of `distmm.job`, with its inputs and its output.
    **own
        Arguments that only this job has.
    """
    from distmm.storage import open_matrix

    arguments, stop = given.arguments(), options.stop(given.deadline)
    connect = partial(session.cluster, ctx, given, arguments["device"])
    with stop.on_signals():
        with interrupts.while_started():
            session.tell_missing(*map(open_matrix, dict.fromkeys(inputs)))  # one folder is listed once
        shown(function, connect=connect, stop=stop, **arguments, **own)


def shown(function: Callable[..., job.Summary], *arguments: Any, **options: Any) -> None:
    """Run a job; show its plan when it starts, then its progress, and its summary at the end."""
    from distmm.telemetry import progress

    with ExitStack() as live:
        report: list[progress.Report] = []

        def announce(plan: Plan, flops: float) -> None:
            typer.echo(session.table(plan.rows(), "Plan"))
            blocks = plan.blocking.whole.c_blocks
            if kept := blocks - round(blocks * flops / max(1, plan.problem.flops)):
                typer.echo(
                    f"{kept} of {units.count(blocks, 'block of C')} are finished and kept; the others are made now"
                )
            report.append(live.enter_context(progress.live(session.out(stderr=True))))

        summary = function(*arguments, announce=announce, progress=lambda figures: report[0](figures), **options)
    typer.echo(session.table(summary.rows(), "Done"))


def resume(
    ctx: typer.Context,
    c: Annotated[str, typer.Argument(metavar="C", help="The output of the job, as given to distmm multiply.")],
    *,
    deadline: options.Deadline = None,
    where: options.Where,
    device: options.DeviceOption = None,
) -> None:
    """Resume a job that was stopped or killed: compute the missing blocks only.

    The job's folder next to C has the options of the job. If A or B has changed since the job began, the job is
    refused, and the error names the file. You can use another cluster with the same kind of device.

    ```text
    distmm resume C.zarr
    distmm resume C.zarr --cluster scheduler.json --deadline 55m
    ```
    """
    stop, on = options.stop(deadline), options.device_name(device)
    with stop.on_signals():
        shown(job.resume, c, connect=partial(session.cluster, ctx, where, on), device=on, stop=stop)


def status(
    c: Annotated[str, typer.Argument(metavar="C", help="The output of the job, as given to distmm multiply.")],
    as_json: options.Json = False,
) -> None:
    """Show the progress of a job from its files, on any machine that can read them, without a cluster.

    The exit code is 1 for a job whose last run has failed.

    ```text
    distmm status C.zarr
    ```
    """
    found = job.status(c)
    if as_json:
        session.print_json(asdict(found))
    else:
        typer.echo(session.table(found.rows(), found.path))
    if found.state == "failed":
        raise typer.Exit(1)
