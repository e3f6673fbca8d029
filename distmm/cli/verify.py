"""``distmm verify C`` and ``distmm verify A B C``."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated

import typer

from distmm import job
from distmm.cli import options, session

# Elements of A, B and C together that this process checks itself, in less time than a cluster takes to start.
SMALL = 1 << 25

HERE = options.Where(cluster="local-cpu")


def verify(
    ctx: typer.Context,
    paths: Annotated[
        list[str],
        typer.Argument(metavar="[A B] C", help="C on disk with its certificate; or A, B and C, to check C = A @ B."),
    ],
    *,
    transposes: options.Transposes,
    check: Annotated[
        options.Check, typer.Option(help="freivalds: random vectors, quick; full: every element, for small sizes.")
    ] = "freivalds",
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the random vectors or rows.", show_default="random")
    ] = None,
    precision: options.PrecisionOption = None,
    where: options.Where = HERE,
    as_json: options.Json = False,
) -> None:
    """Check that C is A @ B, whichever program computed it. Exit code: 0 right, 1 wrong, 4 cannot tell.

    With C alone, the certificate gives A and B. Each block of C is compared with its checksum, and then C is compared
    with A and B by Freivalds' test. For a result of **distmm topk** or **threshold**, some rows are computed again over
    all columns instead. If A or B has changed or is missing, if a C0 was added, or if C is boolean, only the checksums
    are compared: exit code 4.

    Freivalds' test multiplies by random vectors: it reads each matrix once and names the first bad block. The full
    check computes every element in float64 and names the first bad position with both values. The output names the
    seed of the random numbers: with **--seed**, the same check is repeated.

    Small matrices, of 33 million elements together, are checked by this process. No cluster starts then, unless an
    option describes one.

    ```text
    distmm verify C.zarr
    distmm verify A.npy B.zarr C.zarr
    distmm verify A.npy B.npy C.npy --check full
    ```
    """
    from distmm.storage import open_matrix

    if check == "none":
        raise typer.BadParameter("--check none verifies nothing: use freivalds or full")
    if len(paths) not in (1, 3):
        raise typer.BadParameter(f"{len(paths)} matrices are given: give C, which has a certificate, or A, B and C")
    shapes: list[tuple[int, ...]] = []
    if len(paths) == 1:
        from distmm.job.contents import is_reduced
        from distmm.job.folder import Folder
        from distmm.job.records import read_certificate

        content = read_certificate(Folder.of(paths[0]))
        shapes += [content["spec"][name].get("shape", ()) for name in "AB"] if content else []
    # A reduced product consists of several arrays, which its certificate lists.
    matrices = [open_matrix(path) for path in paths if len(paths) == 3 or not is_reduced(path)]
    session.tell_missing(*matrices)
    shapes += [matrix.shape for matrix in matrices]
    small = where == HERE and sum(map(math.prod, shapes)) <= SMALL
    with nullcontext() if small else session.cluster(ctx, where, "auto") as client:
        if len(paths) == 1:
            verdict = job.recheck(paths[0], client, seed)
        else:
            from distmm.api.verify import verify as verdict_of

            verdict = verdict_of(*matrices, check=check, seed=seed, precision=precision, **asdict(transposes))
    if as_json:
        session.print_json(asdict(verdict))
    verdict.raise_if_wrong()
    if not as_json:
        typer.echo(f"Right: {verdict.message}")
