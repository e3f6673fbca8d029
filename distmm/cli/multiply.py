"""``distmm multiply A B -o C``, ``distmm topk A B -k K -o OUT`` and ``distmm threshold A B -t T -o OUT``."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import typer

from distmm import job
from distmm.cli import jobs, options


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
    dtype: Annotated[str | None, typer.Option(help="Type of C; NumPy's result type by default.")] = None,
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
    jobs.run(
        ctx, given, [a, b], partial(job.multiply, a, b, output), reproducible=reproducible, alpha=_plain(alpha),
        beta=_plain(beta), dtype=options.element(dtype) if dtype else None,
    )  # fmt: skip


def _plain(value: float) -> float:
    """Return a whole number as int, so that integer matrices give an integer product."""
    return int(value) if value.is_integer() else value


A = Annotated[str, typer.Argument(metavar="A", help="Matrix (m, d), in any format of distmm multiply.")]
B = Annotated[
    str | None,
    typer.Argument(
        metavar="B",
        help="Matrix (d, n); with --transb (n, d). Without it A, transposed: each row is compared with all rows of A.",
    ),
]
Metric = Annotated[
    Literal["inner", "cosine", "euclidean"] | None,
    typer.Option(
        help="Compare inner products, cosines or Euclidean distances of rows of A and columns of B (rows, with "
        "--transb), to find the nearest ones; else the elements of the product."
    ),
]
Output = Annotated[str, typer.Option("--output", "-o", metavar="OUT", help="Output: name.zarr, a group.")]


def topk(
    ctx: typer.Context,
    a: A,
    k: Annotated[int, typer.Option("-k", help="Number of elements of each row, from 1 to n.")],
    output: Output,
    b: B = None,
    metric: Metric = None,
    *,
    given: options.Job,
) -> None:
    """Write the k best elements of each row of A @ B, and their columns, to disk. The full product is never stored.

    OUT is a Zarr group with the arrays **values** and **indices**, both m x k. The worker that computes a block of the
    product checks and reduces it. Finished rows of blocks are kept: after a stop or a crash the same command, or
    **distmm resume OUT**, computes the others. At the end some rows are computed again and compared. **distmm verify
    OUT** does that with other rows.

    ```text
    distmm topk A.npy B.zarr -k 15 -o best.zarr
    distmm topk X.zarr Y.zarr --transb -k 15 --metric cosine -o near.zarr
    distmm topk X.zarr -k 15 --metric euclidean -o neighbours.zarr
    ```
    """
    jobs.run(ctx, given, [a, b or a], partial(job.topk, a, b, k, output, metric=metric))


def threshold(
    ctx: typer.Context,
    a: A,
    t: Annotated[
        float, typer.Option("-t", help="Keep the elements that are at least this; distances that are at most this.")
    ],
    output: Output,
    b: B = None,
    metric: Metric = None,
    most: Annotated[
        int | None,
        typer.Option(min=0, help="Keep at most so many elements, or stop.", show_default="what 40 % of the disk holds"),
    ] = None,
    *,
    given: options.Job,
) -> None:
    """Write the elements of A @ B that are at least t to disk, as a sparse matrix. The full product is never stored.

    OUT is a Zarr group with the arrays **rows**, **columns** and **values**, sorted by row, and within a row by column.
    A threshold that keeps more than --most elements ends the job with exit code 2 and the count so far. The same
    command with a higher limit resumes it. Apart from that it runs, stops and resumes like **distmm topk**.

    ```text
    distmm threshold A.npy B.zarr -t 0.9 -o network.zarr
    distmm threshold X.zarr -t 0.9 --metric cosine --most 1000000000 -o network.zarr
    ```
    """
    least = int(t) if t.is_integer() and abs(t) < 2**53 else t
    jobs.run(ctx, given, [a, b or a], partial(job.threshold, a, b, least, output, metric=metric, most=most))
