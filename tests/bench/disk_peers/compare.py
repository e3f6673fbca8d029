"""Other programs that multiply Zarr arrays larger than memory, each measured in a process of its own.

One that fails, is killed, or does not come to an end is a row that says so, with the memory and disk that it took.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from experiment.cases import element
from experiment.run import Child, EndedError, SilenceError
from rich.table import Table

import distmm
from distmm.errors import InputError
from distmm.storage import create_output, open_matrix
from distmm.storage.matrix import Matrix

from .task import Task
from .usage import Usage

__all__ = ["PEERS", "Peer", "Product", "Row", "measure", "table"]

STARTING_SECONDS = 120.0  # that a program gets to start its cluster


@dataclass(frozen=True)
class Peer:
    """A module of this folder, what it needs beside distmm's own packages, and what it takes instead of bfloat16."""

    module: str
    packages: tuple[str, ...]
    instead: str
    reason: str


PEERS = {
    "cpu": {
        "dask.array": Peer("with_dask", (), "float32", "NumPy multiplies types of two bytes without BLAS"),
        "cubed": Peer("with_cubed", ("cubed",), "float32", "cubed multiplies no type of two bytes"),
    },
    "gpu": {
        "dask.array": Peer("with_dask", ("dask_cuda", "cupy"), "float16", "CuPy calls its bfloat16 experimental"),
        "cubed": Peer("with_cubed", ("cubed", "cupy"), "float32", "cubed multiplies no type of two bytes"),
    },
}


@dataclass(frozen=True)
class Product:
    """What all programs multiply: ``A.zarr`` and ``B.zarr`` of a folder, square, of the same type.

    Attributes
    ----------
    folder : Path
    device : {"cpu", "gpu"}
    workers : int
    limit : int or None
        Bytes of host memory of each worker.
    block : int
        Edge of the blocks that a task reads at once, a multiple of that of the chunks.
    """

    folder: Path
    device: Literal["cpu", "gpu"]
    workers: int
    limit: int | None
    block: int


@dataclass(frozen=True)
class Row:
    """What became of a program.

    Attributes
    ----------
    seconds : float or None
        From disk to disk, without starting a cluster; None where it did not finish.
    peak : int
        Most bytes of RSS of all its processes.
    written : int
        Bytes written to disk, with C's.
    ok : bool or None
        Whether C is right, by Freivalds' test; None where there is none.
    notes : tuple of str
        The type that it took instead; why it has no figure, or what is wrong.
    """

    name: str
    seconds: float | None = None
    peak: int = 0
    written: int = 0
    ok: bool | None = None
    notes: tuple[str, ...] = ()


def measure(
    product: Product,
    name: str,
    patience: Callable[[], float],
    forget: Callable[[Path], None],
    say: Callable[[str], None],
) -> Row:
    """Have a program multiply.

    Parameters
    ----------
    product : Product
    name : str
        Of `PEERS`.
    patience : callable
        Seconds that the product may take; asked when it begins.
    forget : callable
        Has the next reader of a folder read from the disk.
    say : callable
        Takes a line about what is being done.
    """
    row = Row(name if product.device == "cpu" else f"{name} with CuPy")
    scratch = product.folder / f"peer {name}"
    scratch.mkdir()
    try:
        row = _one(row, product, PEERS[product.device][name], scratch, patience, forget, say)
    except (InputError, OSError) as error:  # no room for operands of another type, no C that can be read
        row = replace(row, notes=(f"cannot: {error}",))
    shutil.rmtree(scratch, ignore_errors=True)  # what a process that is being killed still writes stays
    return row


def _one(
    row: Row,
    product: Product,
    peer: Peer,
    scratch: Path,
    patience: Callable[[], float],
    forget: Callable[[Path], None],
    say: Callable[[str], None],
) -> Row:
    missing = [package for package in peer.packages if importlib.util.find_spec(package) is None]
    if missing:
        return replace(row, notes=(f"{' and '.join(missing)} is not installed",))
    a, b = (product.folder / f"{x}.zarr" for x in "AB")
    if open_matrix(a).dtype == element("bfloat16"):
        row = replace(row, notes=(f"{peer.instead} instead of bfloat16: {peer.reason}",))
        say(f"{row.name}: writing A and B as {peer.instead}")
        a, b = (_converted(open_matrix(path), scratch / path.name, np.dtype(peer.instead)) for path in (a, b))
    for path in (a, b):
        forget(path)
    c = scratch / "C.zarr"
    (scratch / "work").mkdir()
    paths = (str(path) for path in (a, b, c, scratch / "work"))
    task = Task(peer.module, product.device, product.workers, product.limit, product.block, *paths)
    say(f"{row.name}: its process")
    row = _run(row, task, patience())
    if row.seconds is None:
        return row
    say(f"{row.name}: {row.seconds:.1f} s; checking its C")
    verdict = distmm.verify(*(open_matrix(path) for path in (a, b, c)))
    return replace(row, ok=verdict.ok, notes=row.notes if verdict.ok else (*row.notes, verdict.message))


def _converted(matrix: Matrix, path: Path, dtype: np.dtype[Any]) -> Path:
    """Write a matrix of bfloat16 with elements of another type, in the same chunks, each core one at a time."""
    chunk = matrix.chunks or matrix.shape
    output = create_output(path, matrix.shape, dtype, chunk)

    def one(i: int, j: int) -> None:
        where = np.s_[i : min(i + chunk[0], matrix.shape[0]), j : min(j + chunk[1], matrix.shape[1])]
        bits = matrix[where].view(np.uint16).astype(np.uint32)  # upper halves of float32: bfloat16 casts hold the GIL
        output[where] = (bits << 16).view(np.float32).astype(dtype, copy=False)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(one, *zip(*itertools.product(*map(range, (0, 0), matrix.shape, chunk)), strict=True)))
    output.output.commit()
    return path


class PeerChild(Child):
    """The process of a peer."""

    command = (sys.executable, "-m", __package__)


def _run(row: Row, task: Task, patience: float) -> Row:
    found: dict[str, Any] = {}
    failure: tuple[str, ...] = ()
    with PeerChild(task) as child:
        with Usage(child.process.pid) as usage:
            try:
                child.answer(min(patience, STARTING_SECONDS))
                found = child.answer(patience)["row"]
            except SilenceError:
                failure = (f"not finished after {patience:g} s (--patience)",)
            except EndedError as error:
                failure = (textwrap.shorten(str(error), 250),)
        if found:
            child.close()
    return replace(row, **found, peak=usage.peak, written=usage.written, notes=row.notes + failure)


def table(rows: Sequence[Row], title: str) -> Table:
    """Lay the rows out: the first is distmm's, to which the others are compared."""
    notes = [f"{row.name}: {note}" for row in rows for note in row.notes]
    out = Table(title=title, caption="\n".join(notes) or None, caption_justify="left")
    out.add_column("")
    for heading in ("s", "of distmm's", "peak RSS, GB", "written, GB", "C"):
        out.add_column(heading, justify="right")
    own = rows[0].seconds
    for row in rows:
        out.add_row(
            row.name,
            "" if row.seconds is None else f"{row.seconds:.3g}",
            f"{row.seconds / own:.2f}" if row.seconds and own else "",
            f"{row.peak / 1e9:.2f}" if row.peak else "",
            f"{row.written / 1e9:.2f}" if row.written else "",
            {True: "right", False: "WRONG", None: "none"}[row.ok],
        )
    return out
