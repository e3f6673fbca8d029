"""Checks that C is complete before it gets its final name: its markers, its manifest, and its file or folder."""

from __future__ import annotations

import os
from collections.abc import Iterable

from distmm.errors import InputError
from distmm.job.block_rows import RowFolder
from distmm.job.folder import Folder, Json
from distmm.job.records import read_manifest
from distmm.storage import Target

__all__ = ["complete_markers", "refuse_another_draft"]

Block = tuple[int, int]


def refuse_another_draft(folder: Folder, manifest: Json, target: Target | RowFolder) -> None:
    """Raise `InputError` if the file or folder that C is written to was changed after the job had begun."""
    before, now = manifest["draft"], target.description()
    changed = [f"{name} was {before.get(name)}, is {now[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        raise InputError(
            f"{folder.draft}: has been changed since distmm created it: {'; '.join(changed)}; restore the original, "
            f"or start over with --overwrite"
        )


def complete_markers(folder: Folder, manifest: Json, target: Target | RowFolder, blocks: Iterable[Block]) -> list[Json]:
    """Return the markers of all blocks, if no part of C is missing. Elements are not read.

    Parameters
    ----------
    folder : Folder
    manifest : dict
        The manifest that this run has written.
    target : Target or RowFolder
        The output of this job.
    blocks : iterable of tuple
        All blocks of the plan.

    Returns
    -------
    list of dict

    Raises
    ------
    InputError
        With the name of the file that is missing or has changed. A resumed run reads all blocks again, and computes the
        lost ones.
    """
    if read_manifest(folder)["sha256"] != manifest["sha256"]:
        raise InputError(f"{folder.manifest}: was replaced while the job ran")
    refuse_another_draft(folder, manifest, target)
    markers, strays = folder.read_markers()
    if strays:
        raise InputError(f"{strays[0]}: is not a marker that this job has written for this block")
    blocks = set(blocks)
    for i, j in sorted(blocks ^ markers.keys()):
        what = "is missing, although its block was written" if (i, j) in blocks else "is of a block that is not in C"
        raise InputError(f"{folder.marker(i, j)}: {what}")
    missing = target.missing(markers)
    if missing:
        where = os.path.join(folder.draft, "c", *map(str, missing[0]))
        raise InputError(
            f"{where}: is missing or incomplete, although it was written; so are {len(missing) - 1} other chunks"
        )
    return list(markers.values())
