"""``distmm verify A B C``."""

from __future__ import annotations

from typing import Annotated

import typer

from distmm.cli import options

__all__ = ["verify"]


def verify(
    ctx: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="Matrix (m, k) on disk.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Matrix (k, n) on disk.")],
    c: Annotated[str, typer.Argument(metavar="C", help="Matrix (m, n) on disk, said to be their product.")],
    transa: options.TransA = False,
    transb: options.TransB = False,
    check: options.CheckOption = options.Check.freivalds,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random vectors.")] = 0,
    cluster: options.Cluster = "local-cpu",
    workers: options.Workers = None,
    memory_limit: options.MemoryLimit = None,
    tls: options.Tls = "none",
) -> None:
    """Check that C is A @ B, wherever it was computed; exit code 1 if it is not.

    Freivalds' test multiplies by random vectors: it reads each matrix once and names the first bad block. The full
    check computes every element in float64 and names the first bad position with both values.

    ```text
    distmm verify A.npy B.zarr C.zarr
    distmm verify A.npy B.npy C.npy --check full
    ```
    """
    from distmm.cli import session
    from distmm.storage import open_matrix
    from distmm.verify import verify as verdict_of

    if check is options.Check.none:
        raise typer.BadParameter("there is nothing to verify without a check: use freivalds or full")
    matrices = [open_matrix(path) for path in (a, b, c)]
    with session.cluster(ctx, cluster, "auto", workers, memory_limit, tls):
        verdict = verdict_of(
            *matrices,
            check="full" if check is options.Check.full else "freivalds",
            seed=seed,
            transa=transa,
            transb=transb,
        )
    verdict.raise_if_wrong()
    session.out().print(f"Right: {verdict.message}", markup=False)
