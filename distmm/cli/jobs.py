"""What all commands that run a job do: refuse bad input, start a cluster, and show plan, progress and result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import typer

from distmm.cli import options

if TYPE_CHECKING:
    from distmm.job import Stop, Summary
    from distmm.job.spec import Spec
    from distmm.planning.plan import Plan
    from distmm.telemetry.figures import Figures


def run(
    ctx: typer.Context,
    given: options.Job,
    output: str,
    spec: Callable[[], Spec],
    job: Callable[..., Summary],
    replaces: bool,
    **own: Any,
) -> None:
    """Run a job on a cluster, unless its input or output is bad.

    Parameters
    ----------
    given : Job
        The options that all jobs have.
    output : str
    spec : callable
        Opens the inputs, and checks them. It is called before a cluster starts.
    job : callable
        A function of `distmm.job`, with its inputs and its output.
    replaces : bool
        Whether the output may exist.
    **own
        Arguments that only this job has.
    """
    from distmm import interrupts
    from distmm.cli import session

    arguments, stop = given.arguments(), options.stop(given.deadline)
    with stop.on_signals():
        with interrupts.while_started():
            made = spec()
            session.tell_missing(*made.inputs)
            made.refuse(output, replaces)
        with session.cluster(ctx, given, arguments["device"]) as client:
            summary = shown(job, client=client, stop=stop, **arguments, **own)
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
