"""``distmm resume C``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from distmm.cli import options


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
    from distmm.cli import session
    from distmm.cli.jobs import shown
    from distmm.job import resume as job

    stop, on = options.stop(deadline), options.device_name(device)
    with stop.on_signals():
        summary = shown(job, c, connect=partial(session.cluster, ctx, where, on), device=on, stop=stop)
    typer.echo(session.table(summary.rows(), "Done"))
