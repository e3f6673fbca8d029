"""``distmm status C``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from distmm.cli import options


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
    from distmm import job
    from distmm.cli import session

    found = job.status(c)
    if as_json:
        session.print_json(asdict(found))
    else:
        typer.echo(session.table(found.rows(), found.path))
    if found.state == "failed":
        raise typer.Exit(1)
