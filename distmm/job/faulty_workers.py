"""Removes a worker from the cluster that computes wrong blocks repeatedly, and reports its name and host.

A rejected block is computed again on another worker. If that worker's block is right, the first worker has a fault: in
its memory, processor, GPU or network. (A wrong kernel computes the same bits twice, which ends the job.) But the fault
may also be in a sketch, or in a block of A or B, that came from a third worker. Such a fault affects blocks of one row
or one column. So a worker counts as faulty only after several wrong blocks that are not all in one row or column.

If a block of A, B or C has changed in a worker's memory after it was loaded or checked, that worker is known at once.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

from distributed import Client, Scheduler

from distmm.job.folder import Json

# A worker is removed after this number of blocks that were wrong, or that changed in its memory.
MOST = 3

logger = logging.getLogger("distmm.job")


class FaultyWorkers:
    """Counts the blocks that were wrong on one worker and right on another.

    Parameters
    ----------
    client : distributed.Client

    Attributes
    ----------
    retired : list of dict
        Workers that were removed in this run: name, host, and number of wrong blocks.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.retired: list[Json] = []
        # By worker, host, and whether they changed in memory: the positions of blocks that were wrong, or their names.
        self._blocks: defaultdict[tuple[str, str, bool], set[Any]] = defaultdict(set)
        self._decided: set[tuple[str, str]] = set()  # workers that were removed, or could not be

    def put_right(self, before: Json, now: Json) -> None:
        """Take both records of a block that was rejected and is now right. Remove the first worker if it is faulty.

        Parameters
        ----------
        before, now : dict
            Records of the rejected attempt, and of the attempt that was written. A rejected block that could not be
            compared, for example because of NaN, does not count against its worker.
        """
        found = before.get("changed")
        worker = ((found or before)["worker"], (found or before)["host"])
        wrong = before["residual"] is None or before["residual"] > 1
        elsewhere = before["worker"] != now["worker"] and before["crc32c"] != now["crc32c"]
        if found is None and not (wrong and elsewhere and now["how"] == "sketch"):
            return
        blocks = self._blocks[*worker, found is not None]
        blocks.add((before["i"], before["j"]) if found is None else found["block"])
        known = found is not None or all(len(set(line)) > 1 for line in zip(*blocks, strict=True))
        if known and len(blocks) >= MOST and worker not in self._decided:
            self._retire(*worker, len(blocks))

    def _retire(self, worker: str, host: str, wrong: int) -> None:
        """Remove a worker from the cluster."""
        self._decided.add((worker, host))
        if self.client.run_on_scheduler(_remove, name=worker):
            self.retired.append({"worker": worker, "host": host, "wrong": wrong})
            what = (
                "Worker %s of %s is removed from the cluster: it computed %d wrong blocks that other workers computed "
                "right. Check its memory and its GPU before you use it again"
            )
        else:
            what = (
                "Worker %s of %s computed %d wrong blocks; it is kept, because it is the last worker, or has already "
                "left the cluster"
            )
        logger.warning(what, worker, host, wrong)


async def _remove(name: str, dask_scheduler: Scheduler) -> bool:
    """Close a worker, unless it is the last one. Return whether it was closed.

    Its results are not copied to other workers, as Dask's ``retire_workers`` does, because they may be wrong, too. The
    scheduler computes them again, as for a worker that died.
    """
    found = [ws.address for ws in dask_scheduler.workers.values() if str(ws.name) == name]
    if not found or len(dask_scheduler.workers) == 1:
        return False
    await dask_scheduler.remove_worker(found[0], stimulus_id="distmm-faulty-worker", close=True)
    return True
