"""A worker that is wrong again and again: it is taken out of the cluster, and named.

A block that is rejected is made again on another worker. If that one makes it right, the first one was wrong: its
memory, its processor, its GPU or its network. (A wrong kernel makes the same bits twice, and ends the job.) The fault
may also be in a sketch, or in a block of A or B, which another worker made or sent: that spoils blocks of one row, or
of one column. So it takes several blocks of one worker, not all in one row or column, to say that it is this worker.

A block of A, B or C that has changed in a worker's memory after it was loaded or judged names the worker at once.
"""

from __future__ import annotations

import logging
from collections import defaultdict

from distributed import Client, Scheduler

from distmm.job.folder import Json

__all__ = ["MOST", "FaultyWorkers"]

# Blocks of a worker that others have to put right, or that have changed in its memory, before it is taken out.
MOST = 3

logger = logging.getLogger("distmm.job")


class FaultyWorkers:
    """Counts blocks that a worker made wrong and another one right.

    Parameters
    ----------
    client : distributed.Client

    Attributes
    ----------
    retired : list of dict
        Workers that were taken out in this run: name, host, and number of wrong blocks.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.retired: list[Json] = []
        self._wrong: defaultdict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)  # blocks by worker and host
        self._kept: set[tuple[str, str]] = set()  # workers that could not be taken out
        self._changed: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    def put_right(self, before: Json, now: Json) -> None:
        """Take the records of a block that was rejected and is written now; retire the first worker if it is time.

        A block that could not be compared, of NaN for example, tells nothing of the worker that made it.
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
        """Take a worker out of the cluster after so many blocks, if it is time and it is there."""
        if wrong < MOST or any(one["worker"] == worker[0] for one in self.retired) or worker in self._kept:
            return
        if not self.client.run_on_scheduler(_remove, name=worker[0]):
            self._kept.add(worker)
            logger.warning(
                "Worker %s of %s made %d blocks wrong; it is the last one, or has gone already", *worker, wrong
            )
            return
        self.retired.append({"worker": worker[0], "host": worker[1], "wrong": wrong})
        logger.warning(
            "Worker %s of %s is taken out of the cluster: it made %d blocks wrong that other workers made right. "
            "Check its memory and its GPU before it is used again",
            *worker,
            wrong,
        )


async def _remove(name: str, dask_scheduler: Scheduler) -> bool:
    """Close a worker, unless it is the last one.

    What it holds is not copied to others, as Dask's own ``retire_workers`` does: it may be wrong, too. The scheduler
    has it made again, as for a worker that died.
    """
    found = [ws.address for ws in dask_scheduler.workers.values() if str(ws.name) == name]
    if not found or len(dask_scheduler.workers) == 1:
        return False
    await dask_scheduler.remove_worker(found[0], stimulus_id="distmm-faulty-worker", close=True)
    return True
