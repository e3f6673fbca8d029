"""``distmm compile``."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer


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
    from distmm import units
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
