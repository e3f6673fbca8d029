"""``distmm verify C`` and ``distmm verify A B C``."""

from __future__ import annotations

from typing import Annotated

import typer

from distmm.cli import options

__all__ = ["verify"]


def verify(
    ctx: typer.Context,
    paths: Annotated[
        list[str],
        typer.Argument(metavar="[A B] C", help="C on disk with its certificate; or A, B, and C said to be A @ B."),
    ],
    transa: options.TransA = False,
    transb: options.TransB = False,
    check: options.CheckOption = options.Check.freivalds,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the random vectors.", show_default=False)] = None,
    precision: options.ConfiguredPrecision = None,
    cluster: options.Cluster = "local-cpu",
    workers: options.Workers = None,
    memory_limit: options.MemoryLimit = None,
    tls: options.Tls = "none",
) -> None:
    """Check that C is A @ B, wherever it was computed: exit code 0 if it is, 1 if not, 4 if the check cannot tell.

    With C alone, its certificate names A and B: each block of C is compared with its checksum, and Freivalds' test
    follows; of a result of **distmm topk** or **threshold**, some rows are computed again over all columns. If A or B
    has changed or is gone (or there was a C0, or C is boolean), the checksums alone are compared: exit code 4.

    Freivalds' test multiplies by random vectors: it reads each matrix once and names the first bad block. The full
    check computes every element in float64 and names the first bad position with both values.

    ```text
    distmm verify C.zarr
    distmm verify A.npy B.zarr C.zarr
    distmm verify A.npy B.npy C.npy --check full
    ```
    """
    from distmm.api.verify import verify as verdict_of
    from distmm.cli import session
    from distmm.job import recheck
    from distmm.job.result import is_reduced
    from distmm.storage import open_matrix

    if check is options.Check.none:
        raise typer.BadParameter("there is nothing to verify without a check: use freivalds or full")
    if len(paths) not in (1, 3):
        raise typer.BadParameter(f"{len(paths)} matrices are given: give C, which has a certificate, or A, B and C")
    # A reduced product is several arrays; its certificate says which.
    matrices = [open_matrix(path) for path in paths if len(paths) == 3 or not is_reduced(path)]
    session.tell_missing(*matrices)
    with session.cluster(ctx, cluster, "auto", workers, memory_limit, tls) as client:
        verdict = (
            recheck(paths[0], client, seed)
            if len(paths) == 1
            else verdict_of(
                *matrices,
                check="full" if check is options.Check.full else "freivalds",
                seed=seed or 0,
                transa=transa,
                transb=transb,
                precision=precision,
            )
        )
    verdict.raise_if_wrong()
    session.out().print(f"Right: {verdict.message}", markup=False)
