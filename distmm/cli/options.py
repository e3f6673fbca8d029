"""Options of several commands: their lists, and how a command takes a list as one argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from distmm import job
from distmm.errors import InputError
from distmm.planning.precision import Precision
from distmm.units import seconds


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function whose parameters Typer can read.

    A parameter of `function` whose type is a list of options, such as `Where`, becomes the options of this list. If the
    parameter has a default, it has the defaults of these options.
    """
    hints = get_type_hints(function, include_extras=True)
    options: list[inspect.Parameter] = []
    lists: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        kind: Any = hints[parameter.name]
        if is_dataclass(kind):
            lists[parameter.name] = kind
            default = lists[parameter.name]() if parameter.default is parameter.empty else parameter.default
            types = get_type_hints(kind, include_extras=True)
            each = [(one.name, getattr(default, one.name), types[one.name]) for one in fields(kind)]
        else:
            each = [(parameter.name, parameter.default, kind)]
        options += [inspect.Parameter(name, parameter.KEYWORD_ONLY, default=x, annotation=of) for name, x, of in each]

    @wraps(function)
    def called(**given: Any) -> None:
        made = {name: kind(**{one.name: given.pop(one.name) for one in fields(kind)}) for name, kind in lists.items()}
        function(**given, **made)

    called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    called.__annotations__ = {option.name: option.annotation for option in options}
    return called


def edges(text: str) -> tuple[int, int, int]:
    """Return (m, k, n) for a text such as ``4096`` or ``4096x2048x4096``."""
    parts = [int(part) for part in text.split("x")] if re.fullmatch(r"\d+(x\d+x\d+)?", text) else []
    if not parts or min(parts) < 1:
        raise typer.BadParameter(f"{text!r} is neither one positive number nor three as in 4096x2048x4096 (m x k x n)")
    m, k, n = parts * 3 if len(parts) == 1 else parts
    return m, k, n


def device_name(given: Device | None) -> Any:
    """Return the name of a device, or of the configured device for None."""
    from distmm import config

    return config.chosen("device", given)


def element(name: str) -> Any:
    """Return the NumPy type for the name of an element type."""
    import ml_dtypes  # noqa: F401  # NumPy knows the name bfloat16 from it
    import numpy as np

    try:
        return np.dtype(name)
    except TypeError as error:
        raise typer.BadParameter(
            f"{name!r} is not a type: use float32, float64, int32, complex64, bfloat16, ..."
        ) from error


def writable(*paths: Path | None) -> None:
    """Refuse paths whose folder does not exist; None is ignored."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(f"{path}: there is no folder {path.absolute().parent}; make it first")


def stop(deadline: str | None) -> job.Stop:
    """Return the object that stops a job at a deadline, if there is one, and on signals."""
    limit = None if deadline is None else seconds(deadline)
    if limit == 0:  # of a program, Stop(0) is a deadline that has come
        raise typer.BadParameter("a deadline of 0 s leaves no time for work: give a longer one, or none")
    return job.Stop(limit)


# If the user gives no device, precision, check or `--reproducible`, Dask's configuration applies.
Device = Literal["auto", "gpu", "cpu"]
DeviceOption = Annotated[
    Device | None, typer.Option(help="Where to multiply; auto uses GPUs if it can.", show_default="auto, or configured")
]
PrecisionOption = Annotated[
    Precision | None, typer.Option(help="Least accuracy of float32 products.", show_default="highest, or configured")
]
Check = Literal["freivalds", "full", "none"]
Cluster = Annotated[
    str,
    typer.Option(
        help="local starts a cluster here; else the address of a scheduler (tcp://host:8786) or scheduler file."
    ),
]
Workers = Annotated[int | None, typer.Option(help="Workers of a local cluster: one a GPU, or processes on the CPU.")]
MemoryLimit = Annotated[str | None, typer.Option(help="Host memory of each worker of a local cluster, as in 8GB.")]
Kernel = Annotated[str | None, typer.Option(help="Name of a kernel, as distmm info lists them.")]
Reproducible = Annotated[
    bool | None,
    typer.Option(
        "--reproducible/--fastest",
        help="Only kernels that promise the same bits for any blocks, GPU count and failures; or the fastest one.",
        show_default="fastest, or configured",
    ),
]
Deadline = Annotated[
    str | None, typer.Option(metavar="TIME", help="Stop after this time, as in 55m or 01:30:00: exit code 75.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead; the reference has its schema.")]


@dataclass(frozen=True)
class Transposes:
    """Whether the operands are transposed."""

    transa: Annotated[bool, typer.Option("--transa", help="Use the transpose of A, without a copy.")] = False
    transb: Annotated[bool, typer.Option("--transb", help="Use the transpose of B, without a copy.")] = False


@dataclass(frozen=True)
class Where:
    """The cluster."""

    cluster: Cluster = "local"
    workers: Workers = None
    memory_limit: MemoryLimit = None
    tls: Annotated[str, typer.Option(help="temporary certificates, or a folder with ca.pem, cert.pem and key.pem.")] = (
        "none"
    )
    connect_timeout: Annotated[
        float,
        typer.Option(min=0.1, max=86400, help="Seconds to wait for a running cluster, and then for its first worker."),
    ] = 10


@dataclass(frozen=True)
class Method:
    """How a product is computed."""

    device: DeviceOption = None
    blocks: Annotated[
        str | None, typer.Option(metavar="M[xKxN]", help="Edges of the blocks; by default the plan chooses them.")
    ] = None
    plan: Annotated[
        str | None, typer.Option(help="Plan, as distmm plan prints it: 'g2x1x1 b8192x8192x8192 p1 w1 l2'.")
    ] = None
    kernel: Kernel = None
    precision: PrecisionOption = None

    def arguments(self) -> dict[str, Any]:
        """Return them as arguments of a job, without the cluster and the deadline."""
        other = {"deadline", *(one.name for one in fields(Where))}
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in other}
        return {**own, "device": device_name(self.device), "blocks": edges(self.blocks) if self.blocks else None}


@dataclass(frozen=True)
class Job(Method, Where, Transposes):
    """A job on disk: where and how it is computed, and when it stops."""

    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Start over: replace the output, and an unfinished job on it. Object stores remove the old at once.",
        ),
    ] = False
    check: Annotated[
        Check | None,
        typer.Option(
            help="freivalds: random vectors, quick; full: every element, for small sizes.",
            show_default="freivalds, or configured",
        ),
    ] = None
    deadline: Deadline = None
