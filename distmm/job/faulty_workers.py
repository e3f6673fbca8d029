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
        self._wrong: defaultdict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)  # blocks by worker and host
        self._kept: set[tuple[str, str]] = set()  # workers that could not be removed
        self._changed: defaultdict[tuple[str, str], set[str]] = defaultdict(set)  # names of blocks by worker and host

    def put_right(self, before: Json, now: Json) -> None:
        """Take both records of a block that was rejected and is now right. Remove the first worker if it is faulty.

        Parameters
        ----------
        before, now : dict
            Records of the rejected attempt, and of the attempt that was written. A rejected block that could not be
            compared, for example because of NaN, does not count against its worker.
        """
        if (found := before.get("changed")) is not None:
            worker = found["worker"], found["host"]
            blocks = self._changed[worker]
            if found["block"] not in blocks:
                blocks.add(found["block"])
                self._retire(worker, len(blocks))
            return
        wrong = before["residual"] is None or before["residual"] > 1
        elsewhere = before["worker"] != now["worker"] and before["crc32c"] != now["crc32c"]
        if not (wrong and elsewhere and now["how"] == "sketch"):
            return
        worker = before["worker"], before["host"]
        self._wrong[worker].add((before["i"], before["j"]))
        rows, columns = map(set, zip(*self._wrong[worker], strict=True))
        if len(rows) > 1 and len(columns) > 1:
            self._retire(worker, len(self._wrong[worker]))

    def _retire(self, worker: tuple[str, str], wrong: int) -> None:
        """Remove a worker from the cluster if it has at least `MOST` wrong blocks."""
        if wrong < MOST or any(one["worker"] == worker[0] for one in self.retired) or worker in self._kept:
            return
        if not self.client.run_on_scheduler(_remove, name=worker[0]):
            self._kept.add(worker)
            logger.warning(
                "Worker %s of %s computed %d wrong blocks; it is kept, because it is the last worker, or has already "
                "left the cluster",
                *worker,
                wrong,
            )
            return
        self.retired.append({"worker": worker[0], "host": worker[1], "wrong": wrong})
        logger.warning(
            "Worker %s of %s is removed from the cluster: it computed %d wrong blocks that other workers computed "
            "right. Check its memory and its GPU before you use it again",
            *worker,
            wrong,
        )


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
