"""Options of several commands."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distmm.planning.precision import Precision

if TYPE_CHECKING:
    from distmm.job import Stop

__all__ = [
    "Blocks", "Check", "CheckOption", "Cluster", "ConfiguredCheck", "ConfiguredDevice", "ConfiguredPrecision",
    "Deadline", "Device", "DeviceOption", "Kernel", "MemoryLimit", "Plan", "PrecisionOption", "Tls", "TransA",
    "TransB", "Workers", "device_name", "edges", "element", "picture", "sizes", "stop", "writable",
]  # fmt: skip


class Device(StrEnum):
    """Device of a product."""

    auto = "auto"
    gpu = "gpu"
    cpu = "cpu"


class Check(StrEnum):
    """Check of a result."""

    freivalds = "freivalds"
    full = "full"
    none = "none"


def edges(text: str) -> tuple[int, int, int]:
    """Return (m, k, n) for a text such as ``4096`` or ``4096x2048x4096``."""
    parts = [int(part) for part in text.split("x")] if re.fullmatch(r"\d+(x\d+x\d+)?", text) else []
    if not parts or min(parts) < 1:
        raise typer.BadParameter(f"{text!r} is neither one positive number nor three as in 4096x2048x4096 (m x k x n)")
    m, k, n = parts * 3 if len(parts) == 1 else parts
    return m, k, n


def sizes(texts: list[str] | None) -> list[tuple[int, int, int]] | None:
    """Return (m, k, n) for each text; None if there is none."""
    return [edges(text) for text in texts] if texts else None


def device_name(given: Device | None) -> Any:
    """Return the name of a device, or of the configured device for None."""
    from distmm import config

    return config.chosen("device", None if given is None else given.value)


def element(name: str) -> Any:
    """Return the NumPy type for the name of an element type."""
    import ml_dtypes
    import numpy as np

    try:
        return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    except TypeError as error:
        raise typer.BadParameter(
            f"{name!r} is not a type: use float32, float64, int32, complex64, bfloat16, ..."
        ) from error


def writable(*paths: Path | None) -> None:
    """Refuse paths whose folder does not exist; None is ignored."""
    from distmm.errors import InputError

    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{path}: there is no folder {path.absolute().parent}; make it first")


def picture(name: Path | None) -> Path | None:
    """Return the name of a picture without its suffix, since each format adds one."""
    return name.with_suffix("") if name is not None and name.suffix in (".png", ".svg") else name


def stop(deadline: str | None) -> Stop:
    """Return the object that stops a job at a deadline, if there is one, and on signals."""
    from distmm.durations import seconds
    from distmm.job import Stop

    return Stop(None if deadline is None else seconds(deadline))


Cluster = Annotated[
    str,
    typer.Option(
        help="**local** starts a cluster here, **slurm** or **slurm:job.toml** gets nodes from Slurm; else the address "
        "of a scheduler (tcp://host:8786) or scheduler file."
    ),
]
Tls = Annotated[
    str,
    typer.Option("--tls", help="**temporary** certificates, or a folder with ca.pem, cert.pem and key.pem."),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where to multiply; auto uses GPUs if it can.")]
# If the user gives none of the next three, Dask's configuration applies.
ConfiguredDevice = Annotated[
    Device | None,
    typer.Option("--device", help="Where to multiply; auto uses GPUs if it can.", show_default="auto, or configured"),
]
ConfiguredPrecision = Annotated[
    Precision | None,
    typer.Option("--precision", help="Least accuracy of float32 products.", show_default="highest, or configured"),
]
ConfiguredCheck = Annotated[
    Check | None,
    typer.Option(
        "--check",
        help="freivalds: random vectors, quick; full: every element, for small sizes.",
        show_default="freivalds, or configured",
    ),
]
Workers = Annotated[
    int | None, typer.Option(help="Workers of a local cluster: one a GPU, or processes on the CPU.", show_default=False)
]
MemoryLimit = Annotated[
    str | None, typer.Option(help="Host memory of each worker of a local cluster, as in 8GB.", show_default=False)
]
Kernel = Annotated[
    str | None, typer.Option(help="Name of a kernel, as **distmm info** lists them.", show_default=False)
]
Reproducible = Annotated[
    bool | None,
    typer.Option(
        "--reproducible/--fastest",
        help="Only kernels that promise the same bits for any blocks, GPU count and failures; or the fastest one.",
        show_default="fastest, or configured",
    ),
]
PrecisionOption = Annotated[Precision, typer.Option("--precision", help="Least accuracy of float32 products.")]
Blocks = Annotated[
    str | None,
    typer.Option(metavar="M[xKxN]", help="Edges of the blocks; by default the plan chooses them.", show_default=False),
]
TransA = Annotated[bool, typer.Option("--transa", help="Use the transpose of A, without a copy.")]
TransB = Annotated[bool, typer.Option("--transb", help="Use the transpose of B, without a copy.")]
Plan = Annotated[
    str | None,
    typer.Option(
        "--plan", help="Plan, as **distmm plan** prints it: 'g2x1x1 b8192x8192x8192 p1 w1 l2'.", show_default=False
    ),
]
CheckOption = Annotated[
    Check,
    typer.Option("--check", help="freivalds: random vectors, quick; full: every element, for small sizes."),
]
Deadline = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Stop after this time, as in 55m or 01:30:00: exit code 75.", show_default=False),
]
