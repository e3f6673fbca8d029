"""``distmm topk A B -k K -o OUT`` and ``distmm threshold A B -t T -o OUT``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distmm.cli import options
from distmm.planning.precision import Precision

if TYPE_CHECKING:
    from distmm.job import Summary
    from distmm.job.reduction import Reduction

__all__ = ["threshold", "topk"]


class Metric(StrEnum):
    """Similarity or distance of a row of A and a column of B."""

    inner = "inner"
    cosine = "cosine"
    euclidean = "euclidean"


A = Annotated[str, typer.Argument(metavar="A", help="Matrix (m, d), in any format of **distmm multiply**.")]
B = Annotated[
    str | None,
    typer.Argument(
        metavar="[B]",
        help="Matrix (d, n); with --transb (n, d). Without it A, transposed: each row is compared with all rows of A.",
        show_default=False,
    ),
]
Output = Annotated[str, typer.Option("--output", "-o", metavar="OUT", help="Output: name.zarr, a group.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start over: replace OUT if it exists, and an unfinished job on it.")
]


def topk(
    ctx: typer.Context,
    a: A,
    k: Annotated[int, typer.Option("-k", help="Number of elements of each row, from 1 to n.")],
    output: Output,
    b: B = None,
    metric: Annotated[
        Metric | None,
        typer.Option(
            help="Nearest columns of B (rows, with --transb) to each row of A, by inner product, cosine or Euclidean "
            "distance; else the largest elements of the product.",
            show_default=False,
        ),
    ] = None,
    overwrite: Overwrite = False,
    transa: options.TransA = False,
    transb: options.TransB = False,
    check: options.ConfiguredCheck = None,
    deadline: options.Deadline = None,
    cluster: options.Cluster = "local",
    device: options.ConfiguredDevice = None,
    workers: options.Workers = None,
    memory_limit: options.MemoryLimit = None,
    tls: options.Tls = "none",
    blocks: options.Blocks = None,
    plan: options.Plan = None,
    kernel: options.Kernel = None,
    precision: options.ConfiguredPrecision = None,
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
    from distmm.job import topk as job
    from distmm.job.reduction import TopK

    wished = _name(metric)
    _Command(
        a, b, output, overwrite, transa, transb, check, deadline, cluster, device, workers, memory_limit, tls, blocks,
        plan, kernel, precision,
    ).run(ctx, job, TopK(k, wished), k=k, metric=wished)  # fmt: skip


def threshold(
    ctx: typer.Context,
    a: A,
    t: Annotated[
        float, typer.Option("-t", help="Keep the elements that are at least this; distances that are at most this.")
    ],
    output: Output,
    b: B = None,
    metric: Annotated[
        Metric | None,
        typer.Option(
            help="Compare inner products, cosines or Euclidean distances of rows of A and columns of B (rows, with "
            "--transb); else the elements of the product.",
            show_default=False,
        ),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(min=0, help="Keep at most so many elements, or stop.", show_default="what 40 % of the disk holds"),
    ] = None,
    overwrite: Overwrite = False,
    transa: options.TransA = False,
    transb: options.TransB = False,
    check: options.ConfiguredCheck = None,
    deadline: options.Deadline = None,
    cluster: options.Cluster = "local",
    device: options.ConfiguredDevice = None,
    workers: options.Workers = None,
    memory_limit: options.MemoryLimit = None,
    tls: options.Tls = "none",
    blocks: options.Blocks = None,
    plan: options.Plan = None,
    kernel: options.Kernel = None,
    precision: options.ConfiguredPrecision = None,
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
    from distmm.job import threshold as job
    from distmm.job.reduction import Threshold

    least, wished = int(t) if t.is_integer() and abs(t) < 2**53 else t, _name(metric)
    _Command(
        a, b, output, overwrite, transa, transb, check, deadline, cluster, device, workers, memory_limit, tls, blocks,
        plan, kernel, precision,
    ).run(ctx, job, Threshold(least, wished), t=least, metric=wished, most=most)  # fmt: skip


def _name(metric: Metric | None) -> Any:
    return None if metric is None else metric.value


@dataclass(frozen=True)
class _Command:
    """The options of both commands; the fields have the options' names."""

    a: str
    b: str | None
    output: str
    overwrite: bool
    transa: bool
    transb: bool
    check: options.Check | None
    deadline: str | None
    cluster: str
    device: options.Device | None
    workers: int | None
    memory_limit: str | None
    tls: str
    blocks: str | None
    plan: str | None
    kernel: str | None
    precision: Precision | None

    def run(self, ctx: typer.Context, job: Callable[..., Summary], reduction: Reduction, **own: Any) -> None:
        """Run a job whose product is reduced; `own` are the arguments of this command only."""
        from distmm import interrupts
        from distmm.cli import session
        from distmm.cli.multiply import shown
        from distmm.job.spec import Spec

        edges = options.edges(self.blocks) if self.blocks else None
        on, stop = options.device_name(self.device), options.stop(self.deadline)
        with stop.on_signals():
            with interrupts.while_started():  # refuse bad input before a cluster starts
                b, transb = (self.a, not self.transa) if self.b is None else (self.b, self.transb)
                left, right = session.pair(self.a, b, self.transa, transb)
                spec = Spec.of(left, right, None, transa=self.transa, transb=transb, reduction=reduction)
                spec.refuse(self.output, self.overwrite)
            where = self.cluster, on, self.workers, self.memory_limit, self.tls
            with session.cluster(ctx, *where) as client:
                summary = shown(
                    job, self.a, self.b, out=self.output, overwrite=self.overwrite, client=client,
                    transa=self.transa, transb=self.transb, check=self.check and self.check.value, device=on,
                    blocks=edges, plan=self.plan, kernel=self.kernel, precision=self.precision, stop=stop, **own,
                )  # fmt: skip
        session.out().print(session.table(summary.rows(), "Done"))
