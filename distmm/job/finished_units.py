"""The units that have a marker: which of them earlier runs have finished, and whether all of them are there."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from distributed import Client

from distmm.errors import InputError
from distmm.job.certificate import damaged
from distmm.job.folder import Folder, Json
from distmm.job.records import read_manifest
from distmm.job.target import Target, Unit
from distmm.telemetry.activity import JOB_TOPIC


def refuse_another_draft(folder: Folder, manifest: Json, target: Target) -> None:
    """Raise `InputError` if the file or folder that C is written to was changed after the job had begun."""
    before, now = manifest["draft"], target.description()
    changed = [f"{name} was {before.get(name)}, is {now[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        raise InputError(
            f"{folder.draft}: has been changed since distmm created it: {'; '.join(changed)}; restore the original, "
            f"or start over with --overwrite"
        )


@dataclass(frozen=True)
class FinishedUnits:
    """The units of a job that have a marker.

    Attributes
    ----------
    client : Client
        Its workers read units again.
    folder : Folder
    units : set of tuple
        All units of the result.
    """

    client: Client
    folder: Folder
    units: set[Unit]

    def trusted(self, target: Target) -> dict[Unit, Json]:
        """Return the markers of the units that are as they were written, and remove the other markers."""
        markers, strays = self.folder.read_markers()
        for path in strays:
            self.folder.store.remove(path)
        # Found here, because a missing chunk would be read as zeros.
        bad = (markers.keys() - self.units) | (markers.keys() & target.missing(markers))
        there = [marker for at, marker in markers.items() if at not in bad]
        if there:
            bad |= damaged(self.client, target.written(), there).keys()
        self.drop(bad)
        return {at: marker for at, marker in markers.items() if at not in bad}

    def drop(self, units: Collection[Unit]) -> None:
        """Remove the markers of units, so that they are computed again."""
        for i, j in units:
            self.client.log_event(JOB_TOPIC, {"event": "rejected", "job": "", "blocks": [(i, j)]})
            self.folder.store.remove(self.folder.marker(i, j))

    def complete(self, manifest: Json, target: Target) -> list[Json]:
        """Return the markers of all units, if no part of the result is missing. Elements are not read.

        Parameters
        ----------
        manifest : dict
            The manifest that this run has written.
        target : Target

        Raises
        ------
        InputError
            With the name of the file that is missing or has changed. A resumed run reads all units again, and computes
            the lost ones.
        """
        folder = self.folder
        if read_manifest(folder)["sha256"] != manifest["sha256"]:
            raise InputError(f"{folder.manifest}: was replaced while the job ran")
        refuse_another_draft(folder, manifest, target)
        markers, strays = folder.read_markers()
        if strays:
            raise InputError(f"{strays[0]}: is not a marker that this job has written for this block")
        for at in sorted(self.units ^ markers.keys()):
            what = "is missing, although its block was written" if at in self.units else "is of a block that C lacks"
            raise InputError(f"{folder.marker(*at)}: {what}")
        missing = target.missing(markers)
        if missing:
            where = os.path.join(folder.draft, "c", *map(str, missing[0]))
            raise InputError(
                f"{where}: is missing or incomplete, although it was written; so are {len(missing) - 1} other chunks"
            )
        return list(markers.values())
