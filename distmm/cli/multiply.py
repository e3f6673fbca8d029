"""``distmm multiply A B -o C``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from distmm.cli import options


def multiply(
    ctx: typer.Context,
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="Matrix (m, k): name.npy, Zarr folder or URL, name.h5[:/dataset], name.bin:ROWSxCOLS:TYPE.",
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Matrix (k, n), in any of these formats.")],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="C",
            help="Output C: name.npy, name.zarr, name.h5[:/dataset], s3://bucket/name.zarr (gs://, az://).",
        ),
    ],
    *,
    given: options.Job,
    alpha: Annotated[float, typer.Option(help="Factor of the product.")] = 1,
    beta: Annotated[float, typer.Option(help="Factor of the existing C, to which the product is added once.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="Type of C; NumPy's result type by default.", show_default=False)
    ] = None,
    reproducible: options.Reproducible = None,
) -> None:
    """Multiply matrices on disk: C = alpha A @ B + beta C.

    Invalid A or B, a C that cannot be written, and too little memory are errors before any work. Each block of C is
    checked and then written. C gets its name when it is complete. A deadline, SIGTERM or Ctrl-C stops the job with exit
    code 75; a second signal does not wait for running writes. After a stop or a crash the same command, or **distmm
    resume C**, computes the missing blocks.

    ```text
    distmm multiply A.npy B.zarr -o C.zarr
    distmm multiply weights.h5:/layer1/W X.npy -o Y.npy --transa --cluster tcp://10.0.0.1:8786 --deadline 55m
    ```
    """
    from distmm.cli import jobs
    from distmm.job import multiply as job

    jobs.run(
        ctx, given, [a, b], partial(job, a, b, output), reproducible=reproducible, alpha=_plain(alpha),
        beta=_plain(beta), dtype=options.element(dtype) if dtype else None,
    )  # fmt: skip


def _plain(value: float) -> float:
    """Return a whole number as int, so that integer matrices give an integer product."""
    return int(value) if value.is_integer() else value
