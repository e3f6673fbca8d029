"""Whether all of C is there, before it gets its name: markers, manifest, and the file or folder of its blocks."""

from __future__ import annotations

import os
from collections.abc import Iterable

from distmm.errors import InputError
from distmm.job.block_rows import RowFolder
from distmm.job.folder import Folder, Json
from distmm.job.manifest import read_manifest
from distmm.storage import Target

__all__ = ["complete_markers", "refuse_another_draft"]

Block = tuple[int, int]


def refuse_another_draft(folder: Folder, manifest: Json, target: Target | RowFolder) -> None:
    """Raise `InputError` if the file or folder that C is written to is not what it was when the job was begun."""
    before, now = manifest["draft"], target.description()
    changed = [f"{name} was {before.get(name)}, is {now[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        raise InputError(
            f"{folder.draft}: has been changed since distmm made it: {'; '.join(changed)}; bring back what was there, "
            f"or begin anew with --overwrite"
        )


def complete_markers(folder: Folder, manifest: Json, target: Target | RowFolder, blocks: Iterable[Block]) -> list[Json]:
    """Return the markers of all blocks, once nothing of C is found missing; elements are not read.

    Parameters
    ----------
    folder : Folder
    manifest : dict
        As this run has written it.
    target : Target
        What C is written to.
    blocks : iterable of tuple
        All blocks of the plan.

    Raises
    ------
    InputError
        That names the file which is missing, or is not what was written. A run that goes on reads all blocks again,
        and makes those that are lost.
    """
    if read_manifest(folder)["sha256"] != manifest["sha256"]:
        raise InputError(f"{folder.manifest}: has been replaced while the job ran")
    refuse_another_draft(folder, manifest, target)
    markers, strays = folder.read_markers()
    if strays:
        raise InputError(f"{strays[0]}: is no marker that this job has written for this block")
    blocks = set(blocks)
    for i, j in sorted(blocks ^ markers.keys()):
        what = "is not there, although its block was written" if (i, j) in blocks else "is of a block that C has not"
        raise InputError(f"{folder.marker(i, j)}: {what}")
    missing = target.missing(markers)
    if missing:
        where = os.path.join(folder.draft, "c", *map(str, missing[0]))
        raise InputError(f"{where}: is not there in full, although it was written; so are {len(missing) - 1} others")
    return list(markers.values())
