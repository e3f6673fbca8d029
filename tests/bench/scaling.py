"""How products scale with the GPUs of a host, beside other programs: ``python tests/bench/scaling.py``.

JAX gets the precision that ``--precision`` says ("JAX"), or one of its algorithms that emulate float32 on tensor cores
("JAX:..."). A program that is not installed is a row that says so.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from experiment import PLACES, Case, Experiment, Results, Row, picture, run
from experiment.cases import Device
from peers import PROGRAMS

from distmm import clusters
from distmm.cli import options, session
from distmm.cli.app import Command, Group
from distmm.errors import InputError, WrongResultError
from distmm.units import seconds

__all__ = ["app"]

Name = StrEnum("Name", [(program.name, program.name) for program in PROGRAMS])  # type: ignore[misc]

app = typer.Typer(cls=Group, rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)

# n of strong scaling, and of weak scaling on one worker. On the CPU this is one or two seconds of work.
SIZES = {"gpu": (65536, 32768), "cpu": (4096, 2048)}
QUICK_SIZES = {"gpu": (16384, 8192), "cpu": (512, 256)}


@app.callback()
def measured() -> None:
    """Measure products."""


@app.command(cls=Command)
def scaling(
    program: Annotated[
        list[Name] | None,
        typer.Option(
            metavar="NAME",
            help="Only this program; may be given several times. By default all that run on the device: "
            f"{', '.join(Name)}.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        list[int] | None,
        typer.Option(
            "--gpus",
            "--workers",
            metavar="P",
            help="Number of GPUs, or of CPU workers; may be given several times. By default 1, 2, 4 and 8 as far as "
            "there are GPUs; 1 and 2 CPU workers.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        int | None, typer.Option(metavar="N", help="n of strong scaling; 65536, on CPUs 4096.", show_default=False)
    ] = None,
    weak: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="n of weak scaling on one GPU; 32768, on CPUs 2048: n = N √P.", show_default=False
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, to test that everything runs.")] = False,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of resident matrices along each dimension.")] = 4,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="Only strong or weak, resident, host or streamed (C.sum() of a C made a quarter at a time); may "
            "be given several times. By default all but streamed.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE",
            help="float32, float64, bfloat16, complex64; may be given several times. By default float32 and "
            "bfloat16, on CPUs float32.",
            show_default=False,
        ),
    ] = None,
    precision: options.PrecisionOption = None,
    kernel: options.Kernel = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Products of each case, each of new matrices; the median counts.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the matrices.")] = 0,
    device: options.DeviceOption = None,
    patience: Annotated[
        str, typer.Option(metavar="TIME", help="Time limit of a case, with creation and check of its matrices.")
    ] = "5m",
    deadline: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Start no further case after this time, as in 8m.", show_default=False),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write all figures to this file, after each case.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw them: NAME.png and NAME.svg.", metavar="NAME", show_default=False)
    ] = None,
) -> None:
    """Run the same products on 1, 2, 4 and 8 GPUs of this host, or on CPU workers, by distmm and other programs.

    Strong scaling: one size. Weak scaling: the same memory on each GPU. Each product has new matrices, in the GPUs'
    memory (resident) or in pinned memory of the host. Each number of GPUs has a separate process. If a case fails, its
    row gives the reason. Every result is checked; the seconds do not include the check.

    ```text
    python tests/bench/scaling.py --json scaling.json --plot scaling
    python tests/bench/scaling.py --gpus 1 --gpus 2 --patience 75s --deadline 8m
    python tests/bench/scaling.py --quick --device cpu
    ```
    """
    missing = clusters.missing_for_gpu()
    if missing and device == "gpu":
        raise InputError(f"a GPU was asked for, and {missing}; or use --device cpu")
    options.writable(json, plot)
    on_gpu = device != "cpu" and not missing
    there = clusters.gpu_count() if on_gpu else None
    if there is not None and max(gpus or [1]) > there:
        raise InputError(f"--gpus {max(gpus or [1])}: this machine has {there}; give {there} or fewer")
    where: Device = "gpu" if on_gpu else "cpu"
    sizes = (QUICK_SIZES if quick else SIZES)[where]
    kinds = only or []
    unknown = sorted(set(kinds) - {"strong", "weak", "resident", "host", "streamed"})
    if unknown:
        raise InputError(f"--only {', '.join(unknown)}: give strong, weak, resident, host or streamed")
    experiment = Experiment(
        device=where,
        counts=gpus or [p for p in (1, 2, 4, 8) if p <= (there or 2)],
        size=size or sizes[0],
        weak=weak or sizes[1],
        blocks=blocks,
        programs=[each for each in PROGRAMS if (each.name in program if program else where in each.kinds)],
        scalings=[name for name in ("strong", "weak") if name in kinds] or ("strong", "weak"),
        places=[name for name in ("resident", "host", "streamed") if name in kinds] or PLACES,
        dtypes=dtype or (("float32", "bfloat16") if on_gpu else ("float32",)),
        precision=precision or "highest",
        kernel=kernel,
        repeat=repeat,
        seed=seed,
    )
    notes = session.out(stderr=True)
    if missing and device in (None, "auto") and clusters.gpu_count():
        notes.print(f"Working on the CPU: {missing}")

    def progress(results: Results, row: Row) -> None:
        notes.print(f"{row.case}: {_outcome(row)}")
        if json is not None:
            results.write(json)

    results = run(experiment, seconds(patience), None if deadline is None else seconds(deadline), progress)
    console = session.out()
    console.print(results.table())
    name = plot.with_suffix("") if plot is not None and plot.suffix in (".png", ".svg") else plot  # formats add one
    if name is not None and any(row.seconds for row in results.rows):
        picture.draw(results, name)
    wrong: list[Case] = [row.case for row in results.rows if row.ok is False]
    if wrong:
        raise WrongResultError(f"{len(wrong)} results are wrong, the first of {wrong[0]}")


def _outcome(row: Row) -> str:
    if row.failure or not row.seconds:
        return str(row.failure)
    check = {True: ", right", False: ", WRONG", None: ""}[row.ok]
    return f"{row.seconds:.3g} s, {row.case.flops / row.seconds / 1e12:.3g} TFLOP/s{check}"


if __name__ == "__main__":
    app(["scaling", *sys.argv[1:]])
