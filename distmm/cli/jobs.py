"""What all commands that run a job do: refuse bad input, start a cluster, and show plan, progress and result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from distmm.cli import options

if TYPE_CHECKING:
    from distmm.job import Stop, Summary
    from distmm.planning.plan import Plan
    from distmm.telemetry.figures import Figures


def run(
    ctx: typer.Context,
    given: options.Job,
    inputs: list[str],
    job: Callable[..., Summary],
    **own: Any,
) -> None:
    """Run a job, on a cluster that starts after its checks.

    Parameters
    ----------
    given : Job
        The options that all jobs have.
    inputs : list of str
        Paths of the matrices that are read.
    job : callable
        A function of `distmm.job`, with its inputs and its output.
    **own
        Arguments that only this job has.
    """
    from distmm import interrupts
    from distmm.cli import session
    from distmm.storage import open_matrix

    arguments, stop = given.arguments(), options.stop(given.deadline)
    connect = partial(session.cluster, ctx, given, arguments["device"])
    with stop.on_signals():
        with interrupts.while_started():
            session.tell_missing(*map(open_matrix, inputs))
        summary = shown(job, connect=connect, stop=stop, **arguments, **own)
    typer.echo(session.table(summary.rows(), "Done"))


def shown(job: Callable[..., Summary], *arguments: Any, stop: Stop | None = None, **options: Any) -> Summary:
    """Run a job; show its plan when it starts, and then its progress."""
    from distmm import units
    from distmm.cli import session
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

        def show(figures: Figures | None) -> None:
            report[0](figures and figures._replace(error=""))  # the command ends with it

        return job(*arguments, stop=stop, announce=announce, progress=show, **options)
