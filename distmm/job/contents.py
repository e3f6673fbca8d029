"""What a job keeps of a product: all of C, or a reduction of its rows. It says how the result is cut and created."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

import numpy as np
import zarr

from distmm import storage
from distmm.errors import InputError
from distmm.job.folder import Folder, Json
from distmm.job.reduction import Reduction, Threshold, from_json
from distmm.job.target import Cuts, Pieces, Target, Unit, Units
from distmm.planning.blocks import Wave, even_edges
from distmm.planning.plan import Plan
from distmm.storage import is_url, locate, open_matrix
from distmm.storage.durability import fsync_tree
from distmm.storage.output import Output, TargetArray
from distmm.storage.paths import REMEDY, check_place
from distmm.storage.zarr_folder import ZarrMatrix
from distmm.storage.zarr_internals import open_zarr
from distmm.storage.zarr_target import ZarrTarget


@dataclass(frozen=True)
class Contents:
    """What a job keeps.

    Attributes
    ----------
    reduction : TopK or Threshold or None
        None: all of C.
    dtype : numpy.dtype
        Type of C.
    shape : tuple of int
        Shape of C.
    """

    reduction: Reduction | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def described(cls, content: Json) -> Contents:
        """Return the contents that a manifest or a certificate describes."""
        spec = content["spec"]
        return cls(from_json(spec["reduction"]), np.dtype(spec["dtype"]), tuple(content["output"]["shape"]))

    @property
    def name(self) -> str:
        """Name of the units, in messages."""
        return "blocks" if self.reduction is None else "block rows"

    def unit(self, i: int, j: int) -> Unit:
        """Return the unit that a block of C belongs to."""
        return (i, j) if self.reduction is None else (i, 0)

    def columns(self, j: int, count: int) -> Sequence[int]:
        """Return the columns of blocks, out of `count`, that a unit ``(i, j)`` is computed from."""
        return (j,) if self.reduction is None else range(count)

    def together(self, plan: Plan) -> list[tuple[Wave, ...]]:
        """Return groups of waves that are sent as one graph. All blocks of a unit are in the same group."""
        if self.reduction is None:
            return [(wave,) for wave in plan.waves]
        return [tuple(waves) for _, waves in groupby(plan.waves, key=lambda wave: wave.rows)]

    def cuts(self, blocks: Sequence[int]) -> Cuts:
        """Return the edges of the units along rows and columns, for blocks of the edges (m, k, n)."""
        m, n = self.shape
        columns = even_edges(n, blocks[2]) if self.reduction is None else (self.reduction.width,)
        return even_edges(m, blocks[0]), columns

    def units(self, blocks: Sequence[int]) -> set[Unit]:
        """Return all units."""
        rows, columns = map(len, self.cuts(blocks))
        return set(product(range(rows), range(columns)))

    @property
    def nbytes(self) -> int:
        """The bytes that the result takes on the disk at least."""
        if self.reduction is None:
            return math.prod(self.shape) * self.dtype.itemsize
        if isinstance(self.reduction, Threshold):
            return 0  # the number of kept elements is not known before
        return self.shape[0] * self.reduction.k * sum(x.itemsize for x in self.reduction.arrays(self.dtype).values())

    def refuse(self, out: str, overwrite: bool) -> None:
        """Refuse an output that would damage other data.

        Raises
        ------
        InputError
            With the reason, and what to give instead.
        """
        if self.reduction is None:
            storage.check_output(out, overwrite)
            return
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

    def create(
        self, out: str, folder: Folder, blocks: Sequence[int], replaces: bool, given: Sequence[int] | None = None
    ) -> Target:
        """Create the files and folders that units are written to, and sync them.

        The caller's blocks, if they are `given`, are the chunks of C. Several of them may be one of the job's `blocks`.
        """
        cuts = self.cuts(blocks)
        if self.reduction is None:
            chunks = tuple((given or blocks)[::2])
            array = storage.create_output(out, self.shape, self.dtype, chunks, replaces, folder.draft, folder.id)
            return Target(folder, {"C": array}, cuts)
        if isinstance(self.reduction, Threshold):
            os.mkdir(folder.rows)
        else:
            zarr.create_group(folder.draft, attributes={"distmm": self._facts(folder.id)})
            for name, dtype in self.reduction.arrays(self.dtype).items():
                output = Output(folder.target, os.path.join(folder.draft, name), replaces)
                ZarrTarget.create(output, (self.shape[0], self.reduction.width), dtype, (blocks[0], cuts[1][0]), None)
        fsync_tree(folder.work)
        return self.reopen(out, folder, blocks, replaces)

    def reopen(self, out: str, folder: Folder, blocks: Sequence[int], replaces: bool) -> Target:
        """Open these files and folders again."""
        if self.reduction is None:
            return Target(folder, {"C": storage.reopen_output(out, folder.draft, replaces)}, self.cuts(blocks))
        arrays: dict[str, TargetArray] = {}
        for name, dtype in self.reduction.arrays(self.dtype).items():
            if isinstance(self.reduction, Threshold):
                arrays[name] = Pieces(Output(folder.target, folder.rows, replaces), (0,), dtype, name, blocks[0])
            else:
                array = ZarrTarget.reopen(Output(folder.target, os.path.join(folder.draft, name), replaces))
                arrays[name] = replace(array, drafts=folder.work)
        return Target(folder, arrays, self.cuts(blocks), self._facts(folder.id))

    def _facts(self, job: str) -> Json:
        """Return the attribute ``distmm`` of the group of a reduced product."""
        assert self.reduction is not None
        return {
            "reduction": self.reduction.json(), "shape": list(self.shape), "dtype": self.dtype.name, "job": job,
        }  # fmt: skip

    def complete(self, path: str, content: Json) -> Units | None:
        """Return the units of the complete result at `path`, by its certificate. None if it is another result.

        Raises
        ------
        InputError
            If C cannot be read, or a marker is damaged.
        """
        if self.reduction is None:
            c = open_matrix(path)
            same = (c.shape, c.dtype.name) == (self.shape, content["output"]["dtype"])
            return Units({"C": c}, self.cuts(content["blocks"])) if same else None
        if _facts(path).get("reduction") != self.reduction.json():
            return None
        markers = sorted(content["done"], key=lambda marker: marker["i"])
        if any("count" not in marker for marker in markers):
            raise InputError(f"the certificate of {path} is damaged, or of another version: count is missing")
        counts = tuple(marker["count"] for marker in markers)
        try:
            arrays = {
                name: ZarrMatrix.open(os.path.join(path, name), any_shape=True)
                for name in self.reduction.arrays(self.dtype)
            }
        except InputError:
            return None
        return Units(arrays, (counts,)) if {len(one) for one in arrays.values()} == {sum(counts)} else None


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
    facts = {} if os.path.islink(path) or not os.path.isdir(path) else _facts(path)
    try:
        reduction = from_json(facts.get("reduction"))
    except InputError:
        reduction = None
    if reduction is None:
        raise InputError(f"{path}: is not a reduced product that distmm has written, and {REMEDY}")
    known = {"zarr.json", *reduction.arrays(np.dtype(np.float64))}
    others = sorted(set(os.listdir(path)) - known)
    if others:
        raise InputError(f"{path}: contains {others[0]}, which is not part of a reduced product, and {REMEDY}")
