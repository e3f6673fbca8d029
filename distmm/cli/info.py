"""``distmm info``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from distmm.cli import options

if TYPE_CHECKING:
    from distmm_kernels.device import Device
    from distmm_kernels.measured import Measurement

PACKAGES = (
    "distmm", "numpy", "dask", "distributed", "dask-cuda", "distributed-ucxx-cu12", "distributed-ucxx-cu13",
    "cupy-cuda12x", "cupy-cuda13x", "numba", "numba-cuda", "zarr", "h5py",
)  # fmt: skip


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
    from distmm.cli import session
    from distmm.versions import installed
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
