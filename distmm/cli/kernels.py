"""``distmm bench kernels``, ``distmm compile`` and ``distmm info``."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from json import dumps as serialised
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from distmm import units
from distmm.cli import options, session
from distmm.errors import InputError
from distmm.versions import installed

if TYPE_CHECKING:
    from distmm_kernels.device import Device
    from distmm_kernels.measured import Measurement

PACKAGES = (
    "distmm", "numpy", "dask", "distributed", "dask-cuda", "distributed-ucxx-cu12", "distributed-ucxx-cu13",
    "cupy-cuda12x", "cupy-cuda13x", "numba", "numba-cuda", "zarr", "h5py",
)  # fmt: skip


def kernels(
    size: Annotated[
        list[str] | None, typer.Option(metavar="N|MxKxN", help="Size of a product; may be given several times.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Type; may be given several times.", metavar="TYPE")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs of each product; the median counts.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the matrices.")] = 0,
    device: options.DeviceOption = None,
    part: Annotated[
        Literal["all", "ladder", "race"],
        typer.Option(help="The ladder of methods, the race against cuBLAS (on a GPU), or all."),
    ] = "all",
    json: Annotated[Path | None, typer.Option(help="Also write all figures to this file.")] = None,
) -> None:
    """Multiply the same matrices by every method: NumPy, plain Python, the kernels. On a GPU also race cuBLAS.

    ```text
    distmm bench kernels --size 1024 --size 1000x1003x997 --dtype float32 --json bench.json
    distmm bench kernels --part race
    ```
    """
    from distmm.bench import ladder
    from distmm_kernels import bench
    from distmm_kernels import device as devices

    on, missing = options.device_name(device), devices.why_no_gpu()
    if missing and (on == "gpu" or part == "race"):
        raise InputError(f"a GPU was asked for, and {missing}; or use --device cpu --part ladder")
    options.writable(json)
    here = devices.cpu() if on == "cpu" else devices.current()
    if part == "race" and here.kind == "cpu":
        raise InputError("--part race needs a GPU, for cuBLAS: leave out --device cpu")
    console = session.out()
    found: dict[str, Any] = {}
    sizes = [options.edges(text) for text in size or ()]
    try:
        if part != "race":
            # types that only tensor cores multiply have a race, and no ladder
            types = [text for text in dtype or () if part == "ladder" or text not in ("bfloat16", "float16", "int8")]
            if types or not dtype:
                chosen: dict[str, Any] = {"dtypes": [options.element(text) for text in types]} if types else {}
                found["ladder"] = ladder.run(sizes or None, repeat=repeat, seed=seed, device=here, **chosen)
                console.print(found["ladder"].table())
        if part != "ladder" and here.kind == "cuda":
            heats = [heat for heat in bench.HEATS if not dtype or heat.dtype in dtype]
            found["race"] = bench.race(here, sizes or bench.SIZES, heats, repeat, seed)
            console.print(found["race"].table())
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error
    if json is not None:
        facts = {part: asdict(report) for part, report in found.items()}
        json.write_text(serialised(facts, indent=1) + "\n", encoding="utf-8")


def compile(  # noqa: A001  # the command's name
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="As in 90a, 80 or sm_89; repeat it for several.", show_default="those of this machine's GPUs"
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Type of the operands; repeat it for several.", show_default="all")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that compile at the same time.", show_default="one a core")
    ] = None,
) -> None:
    """Build the kernels of the usual products ahead, so that no product waits for them. This needs no GPU.

    The kernels are written to the folder **DISTMM_CACHE_DIR**. Copies of this folder serve machines that have the
    same versions of distmm, Numba and CUDA's compilers.

    ```text
    distmm compile --arch 90a
    distmm compile --arch 80 --arch 89 --dtype float32
    ```
    """
    from distmm_kernels import ahead, device
    from distmm_kernels.launch.cache import cache_folder

    here = {each.compute_capability for each in device.gpus()}
    capabilities = sorted(map(_capability, arch or ())) or sorted(each for each in here if each is not None)
    if not capabilities:
        raise typer.BadParameter(f"there is no GPU here ({device.why_no_gpu()}): give --arch, as in --arch 90a")
    types = dtype or list(ahead.TYPES)
    for capability in capabilities:
        begun = time.monotonic()
        try:
            sizes = list(ahead.build(capability, types, processes))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        what = f"{len(sizes)} kernels for sm_{capability[0]}{capability[1]}, {units.size(sum(sizes))}"
        typer.echo(f"{what}, are in {cache_folder()}; this took {units.duration(time.monotonic() - begun)}")


def _capability(name: str) -> tuple[int, int]:
    found = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)[af]?", name)
    if found is None:
        raise typer.BadParameter(f"{name!r} is no architecture: use one as in 90a, 80 or sm_89")
    return int(found[1]), int(found[2])


def info(
    size: Annotated[
        str, typer.Option(metavar="M[xKxN]", help="Size of the block product for which kernels are listed.")
    ] = "4096",
    precision: options.PrecisionOption = None,
    as_json: options.Json = False,
) -> None:
    """Show devices, the source of their kernels' rates, versions, and the kernel for each type.

    ```text
    distmm info --size 1000x1003x997
    ```
    """
    from distmm import config as configured
    from distmm_kernels import config, device, select

    (m, k, n), least = options.edges(size), configured.chosen("precision", precision)
    missing, here = device.why_no_gpu(), device.current()
    kernels = {
        str(dtype): select.explain(config.Problem(m=m, k=k, n=n, dtype=dtype), here, least).partition(": ")[2]
        for dtype in config.SUPPORTED
    }
    if as_json:
        facts = {
            "devices": [asdict(each) for each in (*device.gpus(), device.cpu())],
            "no_gpu": missing,
            "rates": [list(row) for row in _rates()],
            "versions": installed(PACKAGES),
            "kernels": kernels,
        }
        session.print_json(facts)
        return
    devices = [(f"cuda:{gpu.index}", _described(gpu)) for gpu in device.gpus()] or [("GPU", f"none: {missing}")]
    types: dict[str, list[str]] = {}
    for dtype, reasons in kernels.items():
        types.setdefault(reasons, []).append(dtype)
    tables = {
        "Devices": [*devices, ("CPU", _described(device.cpu()))],
        "Rates of kernels": _rates(),
        "Versions": installed(PACKAGES).items(),
        f"Kernels for a block product of {m} x {k} times {k} x {n}": [
            (", ".join(names), reasons) for reasons, names in types.items()
        ],
    }
    typer.echo("\n\n".join(session.table(rows, title) for title, rows in tables.items()))


def _described(device: Device) -> str:
    memory = f"{device.memory / 2**30:.3g} GiB"
    if device.compute_capability is None:
        return f"{device.name}, {device.multiprocessors} cores, {memory}"
    major, minor = device.compute_capability
    return f"{device.name}, compute capability {major}.{minor}, {device.multiprocessors} multiprocessors, {memory}"


def _rates() -> list[tuple[str, str]]:
    """Return rows for each device model of this machine: the source of its rates, and what was measured and when."""
    from distmm_kernels import device, measured, rates

    found = []
    for here in {each.name: each for each in (*device.gpus(), device.cpu())}.values():
        known = rates.shipped(here)
        if known is not None:
            of = "a core with AVX-512" if here.kind == "cpu" else known.model
            found.append((here.name, f"shipped with distmm, measured on {of}, {known.measured}"))
            continue
        kept = measured.all_kept(here)
        found += [(f"{here.name}, {each.dtype} {each.precision}", _measured(each)) for each in kept]
        if not kept:
            other = rates.rates_of(here).model
            found.append((here.name, f"not measured yet, the first product of a type does it; until then as {other}"))
    return found


def _measured(found: Measurement) -> str:
    best = sorted(found.rates, key=lambda name: -found.rates[name])
    return f"measured here, {found.measured}: " + ", ".join(f"{x} {found.rates[x] / 1e12:.3g} TFLOP/s" for x in best)
