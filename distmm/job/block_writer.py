"""The task that checks and writes a finished block of C, and writes its marker when the block is on the disk.

The block is in the memory of the device that computed it. A GPU checks its block, while one copy of the block is made
in host memory. Its CRC-32C is computed from that copy, and the copy is written. Until the block has its marker, the
scheduler counts it as one of the worker's blocks of C. So the plan's GPU memory includes it.
"""

from __future__ import annotations

import math
import pickle
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from distributed import get_worker

from distmm.checking import sketch
from distmm.checking.checksum import checksum, checksum_of_input
from distmm.checking.tolerance import Tolerance
from distmm.graph.placement import Placement
from distmm.job import made_blocks
from distmm.job.folded_checksums import Order
from distmm.job.folder import Folder, Json, read_json, write_json
from distmm.job.json_forms import MARKER
from distmm.job.lock import Lock
from distmm.planning.blocks import slices
from distmm.planning.plan import Plan
from distmm.storage import Target
from distmm.transfer import loaded_blocks
from distmm.transfer.counted_writes import CountedRun
from distmm.worker import gpu
from distmm.worker.tasks import to_host
from distmm.worker.worker_slots import slot_released

__all__ = ["Writer", "write"]

# Blocks that a CPU worker writes concurrently while products run. More concurrent requests do not make a disk faster.
# Without this bound 2,505 threads waited for a disk that hung. With it, products wait.
WRITERS = 32

# S[i]; the folded checksums of A[i, :] and of each B[:, j]; if a reduction needs them, the squared norms of the rows of
# A[i, :] and of the columns of each B[:, j]; and the blocks that have changed in memory: of B by column, of A by None.
Left = tuple[sketch.Sketch | None, np.ndarray, list[np.ndarray] | None, dict[int | None, Json]]


def changed(name: str, block: Any, since: str = "loaded") -> Json | None:
    """Describe a block that has changed in memory since this worker loaded it. None if it has not changed."""
    return _change(name, since) if loaded_blocks.has_changed(block) else None


def _change(name: str, since: str) -> Json:
    """Describe a changed block: its name, this worker and host, and since when."""
    return {"block": name, "worker": str(get_worker().name), "host": socket.gethostname(), "since": since}


@dataclass(frozen=True)
class Writer:
    """Checks blocks of C on a worker, writes them, and writes their markers.

    Attributes
    ----------
    folder : Folder
    run : CountedRun
        The run of the job. Its id is the token of the lock that allows the writes.
    target : Target or RowFolder
        The output for blocks, or for block rows.
    plan : Plan
    tolerance : Tolerance or None
        None: blocks are not checked.
    seed : int
        Seed of the random vectors.
    alpha, beta : scalars
    orders : dict
        How checksums of A, B and C0 are computed.
    attempt : int
        How often the block was rejected before.
    before : dict or None
        The record of the previous attempt. If inf or NaN make the comparison impossible, or a row is only an outlier, a
        block with the same bits as in the previous attempt is accepted.
    """

    folder: Folder
    run: CountedRun
    target: Target
    plan: Plan
    tolerance: Tolerance | None
    seed: int
    alpha: complex
    beta: complex
    orders: dict[str, Order]
    attempt: int = 0
    before: Json | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared, (type(self), pickle.dumps(tuple(getattr(self, one.name) for one in fields(self))))

    @property
    def needs_norms(self) -> bool:
        """Whether the norms of rows of A and columns of B are computed, too."""
        return False

    def region(self, i: int, j: int) -> tuple[slice, slice]:
        """Return the rows and columns of a block."""
        return slices(self.plan.blocking.m)[i], slices(self.plan.blocking.n)[j]

    def write(
        self,
        where: Placement,
        block: Any,
        left: Left,
        position: int,
        added: np.ndarray | None,
        weights: dict[int, sketch.Weights] | None,
    ) -> Json:
        """Check one block. If it is right, write it and its marker.

        Parameters
        ----------
        where : Placement
        block : NumPy or CuPy array of shape (m, n)
        left : tuple
            The sketch of the row of blocks, and the checksums of its inputs.
        position : int
            Position of the block's column in `left`.
        added : array or None
            The block of C0.
        weights : dict or None
            The weights of each block column.

        Returns
        -------
        dict
            The record of the block for the certificate. ``"written"`` is False if the block was wrong.
        """
        record, on_host = self.judged(where, block, left, position, added, weights)
        accepted = record.pop("right")
        return self._store(on_host, record) if accepted else {**record, "written": False}

    def judged(
        self,
        where: Placement,
        block: Any,
        left: Left,
        position: int,
        added: np.ndarray | None,
        weights: dict[int, sketch.Weights] | None,
        norms: Any = None,
    ) -> tuple[Json, Any]:
        """Check one block. Return its record, in which ``"right"`` is the outcome, and the result of `kept`."""
        sketches, sums, _, spoilt = left
        inputs = {"A": f"{sums[0]:016x}", "B": f"{sums[1 + position]:016x}"}
        if added is not None:
            order = self.orders["C0"]
            inputs["C0"] = f"{checksum_of_input(added, *order):016x}"
        with ThreadPoolExecutor(1) as copying:
            copied = copying.submit(self.kept, where, block, norms)
            if gpu.namespace(block) is np:
                wait([copied])  # same memory: if the block changes after the checksum, the test detects it
            judged = None
            if self.tolerance is not None and sketches is not None and weights is not None:
                x = sketch.vectors(self.seed, where.j, block.shape[1], self.tolerance.exact)
                about = self.tolerance, sketches, position, block, x, self.alpha, self.beta, added
                judged = sketch.judge(*about, by=weights[where.j])
        kept, crc = copied.result()
        record: Json = {
            "job": self.folder.id,
            "i": where.i,
            "j": where.j,
            "crc32c": crc,
            "inputs": inputs,
            "host": socket.gethostname(),
            "worker": str(get_worker().name),
            "attempt": self.attempt,
        }
        right = True
        if judged is not None:
            before = self.previous(where.i, where.j)
            confirmed = judged.residual <= 1 and before is not None and before["crc32c"] == crc
            right = judged.ok or confirmed
            # JSON has no infinity, which is the residual of integers that differ.
            record["residual"] = judged.residual if math.isfinite(judged.residual) else None
            record["how"] = "sketch" if judged.ok else _same_bits(before, record["worker"]) if confirmed else "rejected"
            record["row"] = judged.row
        found = spoilt.get(None) or spoilt.get(where.j) or changed(f"C0[{where.i}, {where.j}]", added)
        if found is not None:  # block and sketches agree, because both were made from the changed block
            right = False
            record |= {"residual": None, "how": "rejected", "row": 0, "changed": found}
        return {**record, "right": right}, kept

    def kept(self, where: Placement, block: Any, norms: Any) -> tuple[Any, int]:
        """Return a block in host memory, in C order, and its CRC-32C."""
        on_host = np.ascontiguousarray(to_host(block))
        return on_host, checksum(on_host)

    def previous(self, i: int, j: int) -> Json | None:
        """Return the record of a block in the previous attempt, if it was rejected then."""
        return self.before

    def marked(self, i: int, j: int) -> Json | None:
        """Return the marker of a unit if another worker has written it in this run. None otherwise."""
        marker = self.folder.marker(i, j)
        return read_json(marker, MARKER) if self.folder.store.exists(marker) else None

    def _store(self, block: np.ndarray, record: Json) -> Json:
        """Write a block, and its marker when the block is on the disk, provided that the run has not ended.

        The CRC-32C of the block is computed again after the write, because the block may have waited in memory for a
        slow disk. A block that has changed since its check is removed, and gets no marker.

        The client tells its workers when a run has ended. Workers that the client cannot reach learn it from the lock.
        Both are checked again before the marker is written, because the write may take long, and the process may have
        been suspended. `distmm.job.lock` explains what a process can do that is suspended after such a check.

        Returns
        -------
        dict
            The record of the block, with ``"written"``. If the scheduler had lost another worker that wrote the block
            before, it is the record of that worker.
        """
        i, j = record["i"], record["j"]
        rows, columns = self.region(i, j)
        with self.run.writing(), self.while_owned(), self.target.writing(rows, columns):
            Lock.check(self.folder.path, self.run.id)
            if (marked := self.marked(i, j)) is not None:
                return {**marked, "written": True}
            try:
                self.target[rows, columns] = block
            except FileExistsError:  # in an object store: this task runs again, or its run has ended
                self._check()
                self.target.discard(rows, columns)
                self.target[rows, columns] = block
            if block.size:
                self.target.sync(rows, columns)
                record.update(self.target.evidence(rows, columns))
            if (now := checksum(block)) != record["crc32c"]:
                record |= {"residual": None, "how": "rejected", "row": 0, "crc32c": now}
                record["changed"] = _change(f"C[{i}, {j}]", "judged")
                self.target.discard(rows, columns)
                return {**record, "written": False}
            record["time"] = time.time()
            self._check()
            write_json(self.folder.marker(i, j), record)
        return {**record, "written": True}

    @contextmanager
    def while_owned(self) -> Iterator[None]:
        """Raise the error that another job has taken over, if that is the reason why a file is not found."""
        try:
            yield
        except FileNotFoundError:
            Lock.check(self.folder.path, self.run.id)
            raise

    def _check(self) -> None:
        """Raise an error if this run has ended, or another job has taken over."""
        self.run.check()
        Lock.check(self.folder.path, self.run.id)


def _same_bits(before: Json | None, worker: str) -> str:
    """Return a text on who has computed the same bits. A second worker is a stronger confirmation."""
    elsewhere = before is not None and before["worker"] != worker
    return "same bits on two workers" if elsewhere else "same bits twice on one worker"


@lru_cache(maxsize=4)
def _shared(kind: type[Writer], content: bytes) -> Writer:
    """Return one writer for all tasks of a process with the same pickled writer. Each takes 10 kB of memory."""
    return kind(*pickle.loads(content))


def write(where: Placement, writer: Writer, block: Any, *about: Any) -> Json:
    """Check and write a block while the worker's products continue. The task of a block of C. Runs on workers."""
    cluster = writer.plan.cluster
    # A GPU worker writes at most as many blocks concurrently as it has slots. If the disk is slower than the GPU,
    # products wait, and host memory has no more blocks than planned. On CPU workers the plan counts all finished blocks
    # of a wave, but each write takes a thread.
    with slot_released("write", WRITERS if cluster.device == "cpu" else cluster.threads):
        made_blocks.report(writer.run.id)
        return writer.write(where, block, *about)
