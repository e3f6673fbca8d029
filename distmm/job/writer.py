"""Writes units of the result, and their markers when the units are on the disk. The tasks of a job's blocks of C.

Until a block of C has its marker, or is reduced, the scheduler counts it as one of the worker's blocks of C. So the
plan's GPU memory includes it.

A row of blocks that is reduced is written when all of its blocks are right. Until then its parts are in the memory of
workers.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from distmm.checking.checksum import checksum
from distmm.errors import InputError
from distmm.graph.placement import Placement
from distmm.job.folder import Folder, Json, read_json
from distmm.job.forms import Marker
from distmm.job.inputs import folded
from distmm.job.judge import Judge, Kept, RowOfA, change, here
from distmm.job.lock import Lock
from distmm.job.target import Target, Unit
from distmm.transfer.counted_writes import CountedRun
from distmm.worker.tasks.reductions import merge
from distmm.worker.worker_slots import slot_released

# Files that a CPU worker writes concurrently while products run. More concurrent requests do not make a disk faster.
# Without this bound 2,505 threads waited for a disk that hung. With it, products wait.
WRITERS = 32


@dataclass(frozen=True)
class Writer:
    """Writes units whose blocks are right, and their markers.

    Attributes
    ----------
    folder : Folder
    run : CountedRun
        The run of the job. Its id is the token of the lock that allows the writes.
    target : Target
    judge : Judge
        Checks the blocks.
    """

    folder: Folder
    run: CountedRun
    target: Target
    judge: Judge

    def write(self, unit: Unit, made: Kept) -> Json:
        """Write a unit and its marker, unless a block is wrong.

        Parameters
        ----------
        unit : tuple of int
        made : tuple
            The records of its blocks, and what the job keeps of them.

        Returns
        -------
        dict
            The record of the unit for the certificate. ``"written"`` is False if a block was wrong.
        """
        records, kept = made
        record = self._judged(unit, sorted(records, key=lambda one: one["j"]), kept)
        return record if "written" in record else self._written(unit, self.judge.arrays(unit[0], kept), record)

    def _judged(self, unit: Unit, records: list[Json], kept: Any) -> Json:
        """Return the record of a unit by those of its blocks. It has ``"written"`` if a block was wrong."""
        bad = [record for record in records if not record.pop("accepted")]
        spoilt = next((record["changed"] for record in bad if "changed" in record), None)
        if spoilt is not None:  # before the comparison of inputs, which then differ
            return {**bad[0], "changed": spoilt, "bad": bad, "written": False}
        if len({record["inputs"]["A"] for record in records}) > 1:
            raise InputError(
                f"A has changed while it was multiplied: blocks of row {unit[0]} of C were made from different rows of "
                f"it. If A was only read wrong once, continue with distmm resume; if A was written, start over with "
                f"--overwrite"
            )
        inputs = {**records[0]["inputs"], "B": folded([record["inputs"]["B"] for record in records])}
        if bad:
            return {**bad[0], "inputs": inputs, "bad": bad, "written": False}
        worst = max(records, key=lambda record: record.get("residual") or 0.0)
        record = {**worst, "j": unit[1], "inputs": inputs, **here()}
        odd = next((one["how"] for one in records if one.get("how", "sketch") != "sketch"), None)
        if odd is not None:
            record["how"] = odd
        if self.judge.reduction is not None and isinstance(kept[0], int) and kept[1] is None:
            return {**record, "too_many": kept[0], "written": False}  # of a threshold: a count of too many elements
        return record

    def _written(self, unit: Unit, arrays: Mapping[str, np.ndarray], record: Json) -> Json:
        """Write a unit, and its marker when it is on the disk, provided that the run has not ended.

        A block of C that has changed in memory since its check is removed, and gets no marker.

        The client tells its workers when a run has ended. Workers that the client cannot reach learn it from the lock.
        Both are checked again before the marker is written, because the write may take long, and the process may have
        been suspended. `distmm.job.lock` explains what a process can do that is suspended after such a check.

        Returns
        -------
        dict
            The record of the unit, with ``"written"``. If the scheduler had lost another worker that wrote the unit
            before, it is the record of that worker.
        """
        with self.run.writing(), self.target.locked(unit):
            Lock.check(self.folder.path, self.run.id)
            marker, store = self.folder.marker(*unit), self.folder.store
            if store.exists(marker):
                return {**read_json(marker, Marker), "written": True}
            sums = self.target.write(unit, arrays, self._check)
            if "C" not in sums:
                crc = checksum(np.array(list(sums.values()), "<u4"))
                record |= {"count": len(next(iter(arrays.values()))), "sums": sums, "crc32c": crc}
            elif sums["C"] != record["crc32c"]:
                self.target.discard(unit)
                found = change(f"C[{unit[0]}, {unit[1]}]", "judged")
                record |= {"crc32c": sums["C"], "residual": None, "how": "rejected", "row": 0, "changed": found}
                return {**record, "bad": [record], "written": False}
            record |= {**self.target.evidence(unit), "time": time.time()}
            self._check()
            store.write(marker, json.dumps(record).encode())
        return {**record, "written": True}

    def _check(self) -> None:
        """Raise an error if this run has ended, or another job has taken over."""
        self.run.check()
        Lock.check(self.folder.path, self.run.id)


def _beside_products(writer: Writer, files: int) -> AbstractContextManager[None]:
    """Let products continue while a block is checked and written to so many files.

    A GPU worker writes at most as many blocks concurrently as it has slots. If the disk is slower than the GPU,
    products wait, and host memory has no more blocks than planned. On CPU workers the plan counts all finished blocks
    of a wave, but each write takes a thread, and open files.
    """
    cluster = writer.judge.plan.cluster
    return slot_released("write", max(1, WRITERS // max(1, files)) if cluster.device == "cpu" else cluster.threads)


def take(where: Placement, writer: Writer, row: RowOfA, block: Any, *about: Any) -> Json | Kept:
    """Check and write a block, or reduce it if C is reduced: the task of a block of C. Runs on workers.

    The arguments after `block` are those of `Judge.judged`.
    """
    unit, whole = (where.i, where.j), writer.judge.reduction is None
    with _beside_products(writer, writer.target.files(unit) if whole else 1):
        made = writer.judge.judged(where, block, row, *about)
        return writer.write(unit, made) if whole else made


def gather(writer: Writer, i: int, made: Sequence[Kept], last: bool) -> Kept | Json:
    """Merge the parts of blocks of one row. The `last` task of a row writes the row, and returns its record.

    Parts are merged in the order of blocks, so that the bits of a row do not depend on which task ends first.
    """
    assert writer.judge.reduction is not None
    records = list(itertools.chain.from_iterable(each for each, _ in made))
    parts, part = [part for _, part in made], None
    if all(each is not None for each in parts):
        part = merge(writer.judge.reduction, parts, None, False, writer.judge.plan.cluster.device)
    # The last task keeps its slot, so that no more rows are merged at a time than planned. The write is short.
    return writer.write((i, 0), (records, part)) if last else (records, part)
