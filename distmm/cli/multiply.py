"""``distmm multiply A B -o C``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distmm.cli import options

if TYPE_CHECKING:
    from distributed import Client

    from distmm.job import Summary

__all__ = ["multiply", "run"]


def multiply(
    ctx: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="Matrix (m, k): name.npy, a Zarr folder, name.h5[:/dataset].")],
    b: Annotated[str, typer.Argument(metavar="B", help="Matrix (k, n), in any of these formats.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="C", help="Where C goes: name.npy, name.zarr, name.h5[:/dataset].")
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace C if it exists, once the new one is right.")
    ] = False,
    transa: options.TransA = False,
    transb: options.TransB = False,
    check: options.CheckOption = options.Check.freivalds,
    cluster: options.Cluster = "local",
    device: options.DeviceOption = options.Device.auto,
    workers: options.Workers = None,
    memory_limit: options.MemoryLimit = None,
    tls: options.Tls = "none",
    blocks: options.Blocks = None,
    kernel: options.Kernel = None,
    precision: options.PrecisionOption = options.Precision.highest,
) -> None:
    """Multiply two matrices on disk: C = A @ B.

    Whatever is wrong with A, B, C's place or the memory is said before any work. C is checked as written, and gets its
    name only then.

    ```text
    distmm multiply A.npy B.zarr -o C.zarr
    distmm multiply weights.h5:/layer1/W X.npy -o Y.npy --transa --cluster tcp://10.0.0.1:8786
    ```
    """
    from distmm.cli import session

    edges = options.edges(blocks) if blocks else None
    session.pair(a, b, transa, transb)  # a missing file is not worth the start of a cluster
    with session.cluster(ctx, cluster, device.value, workers, memory_limit, tls) as client:
        summary = run(
            client, a, b, output, overwrite=overwrite, transa=transa, transb=transb, check=check, device=device,
            blocks=edges, kernel=kernel, precision=precision,
        )  # fmt: skip
    session.out().print(session.table(summary.rows(), "Done"))


def run(
    client: Client,
    a: str,
    b: str,
    output: str,
    *,
    check: options.Check,
    device: options.Device,
    precision: options.Precision = options.Precision.highest,
    blocks: tuple[int, int, int] | None = None,
    kernel: str | None = None,
    overwrite: bool = False,
    transa: bool = False,
    transb: bool = False,
) -> Summary:
    """Multiply on a cluster, showing the plan first and the progress then."""
    from contextlib import ExitStack

    from distmm import job
    from distmm.cli import session
    from distmm.plan import Plan
    from distmm.telemetry import progress

    with ExitStack() as shown:
        report: list[progress.Report] = []

        def announce(plan: Plan) -> None:
            session.out().print(session.table(plan.rows(), "Plan"))
            report.append(shown.enter_context(progress.live(plan.problem.flops, session.out(stderr=True))))

        return job.multiply(
            a, b, output, client=client, overwrite=overwrite, transa=transa, transb=transb, check=check.value,
            device=device.value, blocks=blocks, kernel=kernel, precision=precision.value, announce=announce,
            progress=lambda done, total: report[0](done, total),
        )  # fmt: skip
