"""Blocks that earlier runs have finished: a resumed run keeps them, or computes them again."""

from __future__ import annotations

from dataclasses import dataclass

from distributed import Client

from distmm.job.block_rows import RowFolder
from distmm.job.certificate import damaged
from distmm.job.folder import Folder, Json
from distmm.job.input_checksums import misread, unchanged
from distmm.job.spec import Spec
from distmm.planning.plan import Plan
from distmm.storage import Target
from distmm.telemetry.activity import JOB_TOPIC

__all__ = ["FinishedBlocks"]


@dataclass(frozen=True)
class FinishedBlocks:
    """The blocks of a job that have a marker. Workers of `client` read blocks and inputs again."""

    client: Client
    folder: Folder
    spec: Spec
    plan: Plan

    def unchanged(self, stamps: dict[str, str]) -> dict[str, str]:
        """Raise `InputError` if the inputs have changed since the blocks were computed. Return the inputs' stamps."""
        markers = self.folder.markers().values()
        return unchanged(self.client, self.spec, self.plan.blocking, self.plan.cluster.device, stamps, markers)

    def drop_misread(self, stamps: dict[str, str]) -> int:
        """Drop the blocks for which an input was read wrong, and return their number."""
        markers = self.folder.markers().values()
        wrong = misread(self.client, self.spec, self.plan.blocking, self.plan.cluster.device, stamps, markers)
        for marker in wrong:
            self._drop(marker["i"], marker["j"])
        return len(wrong)

    def trusted(self, target: Target | RowFolder) -> dict[tuple[int, int], Json]:
        """Return the markers of the blocks that are as they were written, and remove the other markers."""
        folder, blocking = self.folder, self.plan.blocking
        markers, strays = folder.read_markers()
        for path in strays:
            folder.store.remove(path)
        result = self.spec.result
        blocks = {result.unit(i, j) for _, i, j in blocking.c_indices()}
        # Found here, because a missing chunk would be read as zeros.
        bad = (markers.keys() - blocks) | (markers.keys() & target.missing(markers))
        there = [marker for at, marker in markers.items() if at not in bad]
        if there:
            bad |= damaged(self.client, result.in_draft(folder, blocking), there).keys()
        for i, j in bad:
            self._drop(i, j)
        return {at: marker for at, marker in markers.items() if at not in bad}

    def _drop(self, i: int, j: int) -> None:
        """Remove the marker of a block, so that it is computed again."""
        self.client.log_event(JOB_TOPIC, {"event": "rejected", "job": "", "blocks": [(i, j)]})
        self.folder.store.remove(self.folder.marker(i, j))
