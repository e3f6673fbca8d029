"""What a worker does with a finished block of C: judge it, write it, and mark it once it is on the disk.

The block is in the memory of the device that made it. On a GPU it is judged there, while one copy of it goes to host
memory, where its CRC-32C is computed and from where it is written. Until the block has its marker, the scheduler counts
it as one of the blocks of C that the worker may hold, so the plan's figure for GPU memory contains it.
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

# Blocks that a CPU worker writes while products run. More requests at a time make no disk faster. Without a bound a
# disk that hung had 2,505 threads waiting for it; with it, products wait.
WRITERS = 32

# S[i]; the folded checksums of A[i, :] and of each B[:, j]; where a reduction asks for them, the squared norms of the
# rows of A[i, :] and of the columns of each B[:, j]; and what has changed in memory: of B by column, of A by None.
Left = tuple[sketch.Sketch | None, np.ndarray, list[np.ndarray] | None, dict[int | None, Json]]


def changed(name: str, block: Any, since: str = "loaded") -> Json | None:
    """Say where a block has changed in memory since this worker loaded it; None if it has not."""
    return _here(name, since) if loaded_blocks.has_changed(block) else None


def _here(name: str, since: str) -> Json:
    return {"block": name, "worker": str(get_worker().name), "host": socket.gethostname(), "since": since}


@dataclass(frozen=True)
class Writer:
    """What a worker needs to judge, write and mark blocks of C.

    Attributes
    ----------
    folder : Folder
    run : CountedRun
        Of the job. Its id is the token of the lock under which blocks may be written.
    target : Target or RowFolder
        What blocks, or block rows, are written to.
    plan : Plan
    tolerance : Tolerance or None
        None: blocks are not judged.
    seed : int
        Of the random vectors.
    alpha, beta : scalars
    orders : dict
        How checksums of A, B and C0 are made.
    attempt : int
        How often the block has been rejected before.
    before : dict or None
        The record of the attempt before. Where inf or NaN leave nothing to compare, or one row only stands out from the
        others, the same bits a second time are accepted.
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
        """Whether blocks of A and B are measured, too."""
        return False

    @property
    def topic(self) -> str:
        """Dask's name for the events that tell the client which blocks are made, and have only to be written."""
        return f"distmm-made-{self.run.id}"

    def region(self, i: int, j: int) -> tuple[slice, slice]:
        """Rows and columns of a block."""
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
        """Judge one block; write and mark it if it is right.

        Parameters
        ----------
        where : Placement
        block : NumPy or CuPy array
        left : tuple
            The sketch of the block's row, and the checksums of what it was made from.
        position : int
            Of the block's column among those of `left`.
        added : array or None
            The block of C0.
        weights : dict or None
            Of the block columns.

        Returns
        -------
        dict
            What the certificate says of the block; ``"written"`` is whether it was right and has been written.
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
        """Judge one block; return its record, where ``"right"`` says the outcome, and what is kept of the block."""
        sketches, sums, _, spoilt = left
        inputs = {"A": f"{sums[0]:016x}", "B": f"{sums[1 + position]:016x}"}
        if added is not None:
            order = self.orders["C0"]
            inputs["C0"] = f"{checksum_of_input(added, *order):016x}"
        with ThreadPoolExecutor(1) as copying:
            copied = copying.submit(self.kept, where, block, norms)
            if gpu.namespace(block) is np:
                wait([copied])  # it is the same memory: what changes between the checksum and the test, the test finds
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
            # JSON has no infinity: an integer that differs has no residual to speak of.
            record["residual"] = judged.residual if math.isfinite(judged.residual) else None
            record["how"] = "sketch" if judged.ok else _same_bits(before, record["worker"]) if confirmed else "rejected"
            record["row"] = judged.row
        found = spoilt.get(None) or spoilt.get(where.j) or changed(f"C0[{where.i}, {where.j}]", added)
        if found is not None:  # block and sketches agree, for both were made from what is wrong
            right = False
            record |= {"residual": None, "how": "rejected", "row": 0, "changed": found}
        return {**record, "right": right}, kept

    def kept(self, where: Placement, block: Any, norms: Any) -> tuple[Any, int]:
        """Return a block in host memory, in C order, and its CRC-32C."""
        on_host = np.ascontiguousarray(to_host(block))
        return on_host, checksum(on_host)

    def previous(self, i: int, j: int) -> Json | None:
        """Return the record of a block in the attempt before, if it was rejected then."""
        return self.before

    def marked(self, i: int, j: int) -> Json | None:
        """Return the record of a unit that another worker has written, and marked, in this run; None if none has."""
        marker = self.folder.marker(i, j)
        return read_json(marker, MARKER) if self.folder.store.exists(marker) else None

    def _store(self, block: np.ndarray, record: Json) -> Json:
        """Write a block, and its marker once it is on the disk, as long as this run goes on and has the lock.

        A block that has waited for a slow disk is summed up again after it was written. If it has changed since it was
        judged, it is removed, and gets no marker.

        The client tells its workers when a run has ended. The lock says it also to a worker that the client cannot
        reach. Both are asked again before the marker: the disk may take long, and a process may have been stopped.
        What that may do nevertheless when it goes on, after either look, is said in `distmm.job.lock`.

        Returns
        -------
        dict
            The record of the block, with whether it is ``"written"``. It is that of another worker, if the scheduler
            has lost one of the two meanwhile and the other one was first.
        """
        i, j = record["i"], record["j"]
        rows, columns = self.region(i, j)
        with self.run.writing(), self.while_owned(), self.target.writing(rows, columns):
            Lock.check(self.folder.path, self.run.id)
            if (marked := self.marked(i, j)) is not None:
                return {**marked, "written": True}
            try:
                self.target[rows, columns] = block
            except FileExistsError:  # in an object store: this task runs again, or belongs to a run that is over
                self._check()
                self.target.discard(rows, columns)
                self.target[rows, columns] = block
            if block.size:
                self.target.sync(rows, columns)
                record.update(self.target.evidence(rows, columns))
            if (now := checksum(block)) != record["crc32c"]:
                record |= {"residual": None, "how": "rejected", "row": 0, "crc32c": now}
                record["changed"] = _here(f"C[{i}, {j}]", "judged")
                self.target.discard(rows, columns)
                return {**record, "written": False}
            record["time"] = time.time()
            self._check()
            write_json(self.folder.marker(i, j), record)
        return {**record, "written": True}

    @contextmanager
    def while_owned(self) -> Iterator[None]:
        """Say that another job has taken over, where that is why a file is not found."""
        try:
            yield
        except FileNotFoundError:
            Lock.check(self.folder.path, self.run.id)
            raise

    def _check(self) -> None:
        """Raise if this run is over."""
        self.run.check()
        Lock.check(self.folder.path, self.run.id)


def _same_bits(before: Json | None, worker: str) -> str:
    """Say who has made the same bits: a worker that makes a block twice is no second opinion."""
    elsewhere = before is not None and before["worker"] != worker
    return "same bits on two workers" if elsewhere else "same bits twice on one worker"


@lru_cache(maxsize=4)
def _shared(kind: type[Writer], content: bytes) -> Writer:
    """Return one writer for all tasks of a process that have come with the same: each takes 10 kB of memory."""
    return kind(*pickle.loads(content))


def write(where: Placement, writer: Writer, block: Any, *about: Any) -> Json:
    """Judge and write a block while the worker's products go on. The task of a block of C; runs on workers."""
    cluster, worker = writer.plan.cluster, get_worker()
    # A GPU worker writes as many blocks beside its products as it has slots: where the disk is slower than the GPU,
    # products wait for it, and host memory holds no more blocks than the plan says. On CPU workers the plan counts all
    # finished blocks of a wave, but each write has a thread of its own.
    with slot_released("write", WRITERS if cluster.device == "cpu" else cluster.threads):
        worker.log_event(writer.topic, worker.get_current_task())
        return writer.write(where, block, *about)
