"""``distmm multiply A B -o C``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distmm.cli import options

if TYPE_CHECKING:
    from distmm.job import Stop, Summary
    from distmm.planning.plan import Plan
    from distmm.telemetry.figures import Figures

__all__ = ["multiply", "shown"]


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
    overwrite: options.Overwrite = False,
    transposes: options.Transposes,
    alpha: Annotated[float, typer.Option(help="Factor of the product.")] = 1,
    beta: Annotated[float, typer.Option(help="Factor of the existing C, to which the product is added once.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="Type of C; NumPy's result type by default.", show_default=False)
    ] = None,
    check: options.CheckOption = None,
    deadline: options.Deadline = None,
    where: options.Where,
    method: options.Method,
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
    from distmm import interrupts
    from distmm.cli import session
    from distmm.job import multiply as job
    from distmm.job.spec import Spec

    scalars: dict[str, Any] = {
        "alpha": _plain(alpha), "beta": _plain(beta), "dtype": options.element(dtype) if dtype else None,
    }  # fmt: skip
    how, transposed, stop = method.arguments(), asdict(transposes), options.stop(deadline)
    with stop.on_signals():
        with interrupts.while_started():  # refuse bad input before a cluster starts
            left, right = session.pair(a, b, **transposed)
            spec = Spec.of(left, right, output if beta != 0 else None, **transposed, **scalars)
            spec.refuse(output, overwrite or beta != 0)
        with session.cluster(ctx, where, how["device"]) as client:
            summary = shown(
                job, a, b, output, client=client, overwrite=overwrite, check=check, reproducible=reproducible,
                stop=stop, **transposed, **scalars, **how,
            )  # fmt: skip
    session.out().print(session.table(summary.rows(), "Done"))


def _plain(value: float) -> float:
    """Return a whole number as int, so that integer matrices give an integer product."""
    return int(value) if value.is_integer() else value


def shown(job: Callable[..., Summary], *arguments: Any, stop: Stop | None = None, **options: Any) -> Summary:
    """Run a job; show its plan when it starts, and then its progress."""
    from contextlib import ExitStack

    from distmm.cli import session
    from distmm.telemetry import progress

    with ExitStack() as live:
        report: list[progress.Report] = []

        def announce(plan: Plan, flops: float) -> None:
            session.out().print(session.table(plan.rows(), "Plan"))
            blocks = plan.blocking.whole.c_blocks
            if kept := blocks - round(blocks * flops / max(1, plan.problem.flops)):
                session.out().print(f"{kept} of {blocks} blocks of C are finished and kept; the others are made now")
            report.append(live.enter_context(progress.live(session.out(stderr=True))))

        def show(figures: Figures | None) -> None:
            report[0](figures and figures._replace(error=""))  # the command ends with it

        return job(*arguments, stop=stop, announce=announce, progress=show, **options)
