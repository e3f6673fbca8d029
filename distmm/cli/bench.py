"""``distmm bench kernels``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from distmm.cli import options

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Measure kernels on this machine.")


@app.callback()
def bench() -> None:
    """Measure kernels on this machine."""


@app.command()
def kernels(
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="N|MxKxN", help="Size of a product; may be given several times.", show_default=False),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Type; may be given several times.", metavar="TYPE", show_default=False)
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs of each product; the median counts.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the matrices.")] = 0,
    device: options.DeviceOption = options.Device.auto,
    json: Annotated[Path | None, typer.Option(help="Also write all figures to this file.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw them, as NAME.png and NAME.svg.", metavar="NAME", show_default=False)
    ] = None,
) -> None:
    """Multiply the same matrices by every method: NumPy, plain Python, the kernels, cuBLAS.

    ```text
    distmm bench kernels --size 1024 --size 1000x1003x997 --dtype float32 --json bench.json --plot bench
    ```
    """
    import numpy as np

    from distmm.cli import session
    from distmm.errors import InputError
    from distmm_kernels import bench as experiment
    from distmm_kernels import device as devices

    if device is options.Device.gpu and devices.why_no_gpu():
        raise InputError(f"a GPU was asked for, and {devices.why_no_gpu()}; or use --device cpu")
    for path in (json, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{path}: there is no folder {path.absolute().parent}; make it first")
    try:
        types: dict[str, Any] = {"dtypes": [np.dtype(name) for name in dtype]} if dtype else {}
        report = experiment.run(
            sizes=options.sizes(size), repeat=repeat, seed=seed,
            device=devices.cpu() if device is options.Device.cpu else None, **types,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error
    console = session.out()
    console.width = max(console.width, 132)  # a folded line can be read, columns cut to one character cannot
    console.print(report.table())
    if json is not None:
        report.to_json(json)
    if plot is not None:
        report.plot(plot.with_suffix("") if plot.suffix in (".png", ".svg") else plot)
