"""``distmm status C``."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["status"]


def status(
    c: Annotated[str, typer.Argument(metavar="C", help="The output of the job, as given to distmm multiply.")],
) -> None:
    """Show the progress of a job from its files, on any machine that can read them, without a cluster.

    ```text
    distmm status C.zarr
    ```
    """
    from distmm import job
    from distmm.cli import session

    found = job.status(c)
    session.out().print(session.table(found.rows(), found.path))
