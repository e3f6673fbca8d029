"""``distmm demo`` and ``distmm examples``."""

from __future__ import annotations

import shutil
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from distmm import clusters, job
from distmm.cli import jobs, options, session
from distmm.errors import InputError

if TYPE_CHECKING:
    import dask.array as da
    from distributed import Client

# About five seconds of work, at 0.1 TFLOP/s on two CPU cores and 5 TFLOP/s of the textbook kernel on a data-centre GPU.
CPU_SIZE, GPU_SIZE = 6000, 20000

# Chunk edge of the matrices on disk: 4 MB of float32.
CHUNK = 1024

# Name of a file that marks a folder as made by a demo, which may replace its contents.
MARK = ".distmm-demo"


def demo(
    ctx: typer.Context,
    size: Annotated[
        int | None, typer.Option(min=1, help=f"About how many rows; {CPU_SIZE} on the CPU, {GPU_SIZE} on GPUs.")
    ] = None,
    dtype: Annotated[
        Literal["float16", "float32", "float64", "int8", "int32", "int64"], typer.Option(help="Type of the elements.")
    ] = "float32",
    folder: Annotated[Path, typer.Option("--dir", help="For the matrices.", metavar="DIR")] = Path("distmm-demo"),
    device: options.DeviceOption = None,
    workers: options.Workers = None,
    memory_limit: options.MemoryLimit = None,
) -> None:
    """Run a complete job: make two matrices on disk, of sizes that no block divides, and their checked product.

    ```text
    distmm demo
    distmm demo --size 2000 --dtype float64 --device cpu
    ```
    """
    on = options.device_name(device)
    size = size or (CPU_SIZE if on == "cpu" or clusters.missing_for_gpu() else GPU_SIZE)
    m, k, n = size + 1, size - size // 8 + 3, size + size // 8 - 5 if size > 8 else size
    _prepare(folder)
    a, b, c = (str(folder / f"{name}.zarr") for name in "ABC")
    with session.cluster(ctx, options.Where("local", workers, memory_limit), on) as client:
        typer.echo(f"Making A ({m} x {k}) and B ({k} x {n}), {dtype}, in {folder}", err=True)
        _make(a, (m, k), dtype, 1, client)
        _make(b, (k, n), dtype, 2, client)
        stop = options.stop(None)
        with stop.on_signals():
            jobs.shown(job.multiply, a, b, c, client=client, device=on, overwrite=True, stop=stop)


def _prepare(folder: Path) -> None:
    """Make the folder, or use that of an earlier demo; refuse a folder with other files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / MARK).exists():
            raise InputError(f"{folder}: is not empty, and no demo made it; give an empty or a new folder with --dir")
        (folder / MARK).touch()
    except OSError as error:
        raise InputError(f"{folder}: cannot be used for the demo: {error}; give another folder with --dir") from error


def _make(path: str, shape: tuple[int, int], dtype: str, seed: int, client: Client) -> None:
    """Write a random matrix, block by block, on the workers. When this has raised, they write nothing more."""
    import numpy as np

    from distmm.product.sinks import fill
    from distmm.storage import create_output

    target = create_output(path, shape, np.dtype(dtype), (CHUNK, CHUNK), overwrite=True)  # refuses what has no room
    try:
        fill(target, _random(shape, dtype, seed), client)
        target.output.commit()
    finally:
        target.output.discard()


def _random(shape: tuple[int, int], dtype: str, seed: int) -> da.Array:
    """Return numbers between -1/2 and 1/2, or small integers for integer types. Normal ones take five times as long."""
    import dask.array as da

    rng = da.random.default_rng(seed)
    if dtype.startswith("int"):
        return rng.integers(-9, 10, shape, chunks=CHUNK, dtype=dtype)
    return (rng.random(shape, chunks=CHUNK, dtype="f4" if dtype == "float32" else "f8") - 0.5).astype(dtype)


# Kinds of examples; each is a folder. Typer has no lists of literals.
Kind = StrEnum("Kind", ["notebooks", "slurm", "kubernetes", "monitoring"])


def examples(
    kinds: Annotated[
        list[Kind] | None, typer.Argument(metavar="KIND", help="Kinds of examples; all by default.")
    ] = None,
    write: Annotated[Path | None, typer.Option(metavar="DIR", help="Copy them to this folder.")] = None,
) -> None:
    """List or copy the examples of distmm: notebooks, job files, and configurations of Prometheus and Grafana.

    ```text
    distmm examples
    distmm examples slurm monitoring --write examples
    ```
    """
    found = {Path(kind) / path.name: path for kind in kinds or Kind for path in _files(kind)}
    if write is not None:
        there = [str(write / name) for name in found if (write / name).exists()]
        if there:
            raise InputError(f"{there[0]}: exists already; give another folder, or remove it first")
    for name, path in found.items():
        if write is not None:
            try:
                (write / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, write / name)
            except OSError as error:
                raise InputError(f"{write / name}: cannot be written: {error}; give another folder") from error
        typer.echo(name if write is None else write / name)


def _files(kind: Kind) -> list[Path]:
    """Return the files of a kind without READMEs, which are part of the documentation."""
    home = Path(__file__).parents[1] / "examples"
    if kind is not Kind.notebooks:
        # A wheel contains copies. In a checkout the only source is deploy/.
        home = home / kind if (home / kind).is_dir() else home.parents[1] / "deploy" / kind
    return sorted(path for path in home.iterdir() if path.is_file() and path.suffix != ".md")
