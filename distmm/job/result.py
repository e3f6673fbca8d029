"""The two kinds of results of a job: all blocks of C, or block rows of a reduction of C.

A *unit* is the part of a result that gets a marker: a block ``(i, j)``, or a block row ``(i, 0)``. This file has all
differences between the two kinds of jobs. Both have the same loop, locks, markers, manifest, commit and certificate.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import zarr

from distmm.checking.checksum import checksum
from distmm.errors import InputError
from distmm.job.block_rows import InDraft, InResult, RowFolder
from distmm.job.block_writer import Writer
from distmm.job.folder import Folder, Json
from distmm.job.reduction import Reduction, element_type, from_json
from distmm.job.row_writer import RowWriter
from distmm.planning.blocks import Blocking, Wave, even_edges, slices
from distmm.planning.plan import Plan
from distmm.storage import (
    Matrix,
    Target,
    check_output,
    create_output,
    fsync,
    is_url,
    locate,
    open_draft,
    open_matrix,
    reopen_output,
)
from distmm.storage.overwriting import check_place
from distmm.storage.zarr_internals import open_zarr

__all__ = ["Result", "Unit", "described", "is_reduced", "result_of"]

Unit = tuple[int, int]
Check = Callable[[Json], str | None]


@dataclass(frozen=True)
class _Block:
    """Compares blocks of a matrix with their checksums. Runs on workers."""

    matrix: Matrix
    edges: tuple[tuple[int, ...], tuple[int, ...]]

    def __call__(self, marker: Json) -> str | None:
        """Return what is wrong with one block. None if it is as it was written."""
        rows, columns = (slices(edges)[marker[at]] for edges, at in zip(self.edges, "ij", strict=True))
        try:
            found = checksum(self.matrix[rows, columns])
        except InputError as error:
            return str(error)
        expected = marker["crc32c"]
        return None if found == expected else f"its checksum is {found:08x}, and was {expected:08x} when it was written"


@dataclass(frozen=True)
class Blocks:
    """All blocks of C, a matrix of type `dtype`."""

    dtype: np.dtype[Any]

    name = "blocks"  # of the units, in messages
    writer: ClassVar[Callable[..., Writer]] = Writer  # writes units on workers

    def unit(self, i: int, j: int) -> Unit:
        """Return the unit that a block of C belongs to."""
        return i, j

    def columns(self, j: int, count: int) -> Sequence[int]:
        """Return the columns of blocks, out of `count`, that a unit ``(i, j)`` is computed from."""
        return (j,)

    def together(self, plan: Plan) -> list[tuple[Wave, ...]]:
        """Return groups of waves that are sent as one graph. All blocks of a unit are in the same group."""
        return [(wave,) for wave in plan.waves]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes that the result takes on the disk at least."""
        return shape[0] * shape[1] * self.dtype.itemsize

    def refuse(self, out: str, overwrite: bool) -> None:
        """Refuse an output that would damage other data."""
        check_output(out, overwrite)

    def create(self, out: str, folder: Folder, plan: Plan, overwrite: bool) -> Target:
        """Create the file or folder that units are written to."""
        (m, _, n), shape = plan.block_shape, (plan.problem.m, plan.problem.n)
        return create_output(out, shape, self.dtype, (m, n), overwrite, folder.draft, folder.id)

    def reopen(self, out: str, folder: Folder, overwrite: bool) -> Target:
        """Open that file or folder again."""
        return reopen_output(out, folder.draft, overwrite)

    def in_draft(self, folder: Folder, blocking: Blocking) -> Check:
        """Return a function that checks written units by their markers. It runs on workers."""
        return _Block(open_draft(folder.target, folder.draft), (blocking.m, blocking.n))

    def in_place(self, path: str, content: Json) -> Check | None:
        """Return a function that checks units of the result at `path`. None if `path` is not such a result."""
        output = content["output"]
        c = open_matrix(path)
        if [list(c.shape), c.dtype.name] != [output["shape"], output["dtype"]]:
            return None
        (m, n), (edge_m, _, edge_n) = output["shape"], content["blocks"]
        return _Block(c, (even_edges(m, edge_m), even_edges(n, edge_n)))


@dataclass(frozen=True)
class _BlockRows:
    """A reduction of the rows of a product of type `dtype`, as a Zarr group of arrays."""

    reduction: Reduction
    dtype: np.dtype[Any]

    name = "block rows"
    writer: ClassVar[Callable[..., Writer]] = RowWriter

    def unit(self, i: int, j: int) -> Unit:
        return i, 0

    def columns(self, j: int, count: int) -> Sequence[int]:
        return range(count)

    def together(self, plan: Plan) -> list[tuple[Wave, ...]]:
        return [tuple(waves) for _, waves in groupby(plan.waves, key=lambda wave: wave.rows)]

    def nbytes(self, shape: tuple[int, ...]) -> int:
        return self.reduction.bytes_on_disk(self.dtype, shape[0])

    def refuse(self, out: str, overwrite: bool) -> None:
        if is_url(out):
            raise InputError(
                f"{out}: distmm writes reduced products only to local or mounted folders, not to object stores; write "
                f"to a folder, and copy the result"
            )
        path, _ = locate(out)
        stem, suffix = os.path.splitext(path)
        if suffix.lower() in (".npy", ".h5", ".hdf5"):
            raise InputError(f"{path}: a reduced product is several arrays, in a Zarr group: name it {stem}.zarr")
        check_place(path)
        if overwrite and os.path.lexists(path):
            _refuse_other_group(path)

    def create(self, out: str, folder: Folder, plan: Plan, overwrite: bool) -> RowFolder:
        os.mkdir(folder.block_rows)
        fsync(folder.work)
        return self.reopen(out, folder, overwrite)

    def reopen(self, out: str, folder: Folder, overwrite: bool) -> RowFolder:
        return RowFolder(folder.block_rows, self.reduction, self.dtype)

    def in_draft(self, folder: Folder, blocking: Blocking) -> Check:
        return InDraft(RowFolder(folder.block_rows, self.reduction, self.dtype))

    def in_place(self, path: str, content: Json) -> Check | None:
        return InResult.of(path, content) if _facts(path).get("reduction") == self.reduction.json() else None


Result = Blocks | _BlockRows


def result_of(reduction: Reduction | None, dtype: np.dtype[Any]) -> Result:
    """Return the kind of result of a job with this reduction, for a product of type `dtype`."""
    return Blocks(dtype) if reduction is None else _BlockRows(reduction, dtype)


def described(spec: Json) -> Result:
    """Return the kind of result of a job, by its specification in the manifest or the certificate."""
    return result_of(from_json(spec.get("reduction")), element_type(spec["dtype"]))


def is_reduced(path: str) -> bool:
    """Whether a file or folder is a reduced product that distmm has written."""
    return os.path.isdir(path) and bool(_facts(path))


def _facts(path: str) -> Json:
    """Return distmm's attribute of a Zarr group. Empty if there is none."""
    try:
        group = open_zarr(path)
    except Exception:  # Zarr raises a dozen types of errors for damaged metadata
        return {}
    facts = group.attrs.get("distmm") if isinstance(group, zarr.Group) else None
    return facts if isinstance(facts, dict) else {}


def _refuse_other_group(path: str) -> None:
    """Refuse to replace anything but a reduced product of distmm without other files in its folder."""
    remedy = "it is not replaced: choose another name, or remove it yourself"
    facts = {} if os.path.islink(path) or not os.path.isdir(path) else _facts(path)
    try:
        reduction = from_json(facts.get("reduction"))
    except InputError:
        reduction = None
    if reduction is None:
        raise InputError(f"{path}: is not a reduced product that distmm has written, and {remedy}")
    known = {"zarr.json", *reduction.arrays(np.dtype(np.float64))}
    others = sorted(set(os.listdir(path)) - known)
    if others:
        raise InputError(f"{path}: contains {others[0]}, which is not part of a reduced product, and {remedy}")
