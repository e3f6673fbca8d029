"""``distmm examples``."""

from __future__ import annotations

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from distmm.errors import InputError


class Kind(StrEnum):
    """Kinds of examples; each is a folder."""

    notebooks = "notebooks"
    slurm = "slurm"
    kubernetes = "kubernetes"
    monitoring = "monitoring"


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
