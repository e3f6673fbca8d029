"""``distmm plan A B``."""

from __future__ import annotations

from typing import Annotated

import typer

from distmm.cli import options

__all__ = ["plan"]


def plan(
    ctx: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="Matrix (m, k) on disk.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Matrix (k, n) on disk.")],
    transa: options.TransA = False,
    transb: options.TransB = False,
    cluster: options.Cluster = "local",
    device: options.DeviceOption = options.Device.auto,
    workers: options.Workers = None,
    memory_limit: options.MemoryLimit = None,
    tls: options.Tls = "none",
    blocks: options.Blocks = None,
    plan: options.Plan = None,
    kernel: options.Kernel = None,
    precision: options.PrecisionOption = "highest",
) -> None:
    """Say how A @ B would be computed, and what it would take; compute nothing.

    The plan is for a C on disk. If it does not fit into memory, the exit code is 2, and the error names what is
    missing. The last line is the plan as --plan takes it.

    ```text
    distmm plan A.zarr B.npy
    distmm plan A.zarr B.npy --cluster tcp://10.0.0.1:8786 --blocks 8192
    ```
    """
    import distmm
    from distmm.cli import session

    edges = options.edges(blocks) if blocks else None
    left, right = session.pair(a, b, transa, transb)
    with session.cluster(ctx, cluster, device.value, workers, memory_limit, tls) as client:
        planned = distmm.plan(
            left, right, transa=transa, transb=transb, precision=precision, kernel=kernel, device=device.value,
            blocks=edges, plan=plan, out=True, client=client,
        )  # fmt: skip
    session.out().print(session.table(planned.rows(), "Plan"))
    planned.validate()
