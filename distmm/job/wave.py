"""The graph of one wave of a job: chains, the sketches of their certificate, and a task that writes each block.

Beside the chains of `distmm.graph.layer.ProductLayer`, on the workers where the blocks are anyway::

    w[j]     weights by B[0,j]            at their home, one task for all j that have the same
    Y[p,j]   sketches of B[p,j]           at their home, likewise
    S[i,p]   S[i,p-1] + A[i,p] Y[p,:]     at the home of A[i,p]; Y and S with checksums of what they have read
    W[i,j]   judge C[i,j] by S[i,last], write it, sync it, mark it    at the owner of C[i,j]

Only the results of W come to the client: some hundred bytes a block.
"""

from __future__ import annotations

import itertools
import math
import pickle
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from dask._task_spec import List, TaskRef
from dask.highlevelgraph import Layer
from distributed import get_worker

from distmm.checking import sketch
from distmm.checking.checksum import checksum, checksum_of_input
from distmm.checking.tolerance import Tolerance
from distmm.graph.layer import Placed, Placement
from distmm.job.folder import Folder, Json, write_json
from distmm.job.inputs import Order, fold
from distmm.job.lock import Lock
from distmm.planning.blocks import Wave, slices
from distmm.planning.plan import Plan
from distmm.storage import Target
from distmm.worker.worker_slots import beside_products

__all__ = ["Writer", "WritingLayer"]

# Blocks that a CPU worker writes beside its products. No disk gets faster with more requests at a time, and where one
# hangs products wait for it: without a bound there were 2,505 threads.
WRITERS = 32

Key = tuple[Any, ...]

Right = tuple[list[sketch.Sketch], list[int]]  # sketches of blocks of B, and their checksums
Left = tuple[sketch.Sketch | None, np.ndarray]  # S[i], and the folded checksums of A[i, :] and of each B[:, j]


@dataclass(frozen=True)
class Writer:
    """What a worker needs to judge, write and mark blocks of C.

    Attributes
    ----------
    folder : Folder
    lock : str
        Token of the lock under which blocks may be written.
    target : Target
    plan : Plan
    tolerance : Tolerance or None
        None: blocks are not judged.
    seed : int
        Of the random vectors.
    alpha, beta : scalars
    orders : dict
        How checksums of A, B and C0 are made.
    attempt : int
        0, or how often the block has been rejected before.
    before : dict or None
        What was said of the same block when it was made before, and rejected: with the same bits it is accepted where
        inf or NaN leave nothing else to judge by, or a row that only stands out has turned out the same.
    """

    folder: Folder
    lock: str
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
        return _shared, (pickle.dumps(tuple(getattr(self, one.name) for one in fields(self))),)

    @property
    def topic(self) -> str:
        """Dask's name for the events that tell the client which blocks are made, and have only to be written."""
        return f"distmm-made-{self.folder.path}"

    def region(self, i: int, j: int) -> tuple[slice, slice]:
        """Rows and columns of a block."""
        return slices(self.plan.blocking.m)[i], slices(self.plan.blocking.n)[j]

    def write(
        self,
        where: Placement,
        block: np.ndarray,
        left: Left,
        position: int,
        added: np.ndarray | None,
        weights: dict[int, sketch.Weights] | None,
    ) -> Json:
        """Judge one block; write and mark it if it is right. Runs on workers.

        Returns
        -------
        dict
            What the certificate says of the block; ``"written"`` is whether it was right and has been written.
        """
        sketches, sums = left
        inputs = {"A": f"{sums[0]:016x}", "B": f"{sums[1 + position]:016x}"}
        if added is not None:
            order = self.orders["C0"]
            inputs["C0"] = f"{checksum_of_input(added, *order):016x}"
        with ThreadPoolExecutor(1) as beside:
            crc = beside.submit(checksum, block)
            judged = None
            if self.tolerance is not None and sketches is not None and weights is not None:
                x = sketch.vectors(self.seed, where.j, block.shape[1], self.tolerance.exact)
                about = self.tolerance, sketches, position, block, x, self.alpha, self.beta, added
                judged = sketch.judge(*about, on_gpu=self.plan.cluster.device == "cuda", by=weights[where.j])
        record: Json = {
            "job": self.folder.id,
            "i": where.i,
            "j": where.j,
            "crc32c": crc.result(),
            "inputs": inputs,
            "host": socket.gethostname(),
            "worker": str(get_worker().name),
            "attempt": self.attempt,
        }
        accepted = True
        if judged is not None:
            confirmed = judged.residual <= 1 and self.before is not None and self.before["crc32c"] == record["crc32c"]
            accepted = judged.ok or confirmed
            # JSON has no infinity: an integer that differs has no residual to speak of.
            record["residual"] = judged.residual if math.isfinite(judged.residual) else None
            record["how"] = "sketch" if judged.ok else self._same_bits(record["worker"]) if confirmed else "rejected"
            record["row"] = judged.row
        if accepted:
            self._store(block, record)
        return {**record, "written": accepted}

    def _store(self, block: np.ndarray, record: Json) -> None:
        """Write a block, and its marker once it is on the disk, as long as the lock is still that of this run."""
        i, j = record["i"], record["j"]
        rows, columns = self.region(i, j)
        Lock.check(self.folder.path, self.lock)
        self.target[rows, columns] = block
        if block.size:
            self.target.sync(rows, columns)
        record["time"] = time.time()
        Lock.check(self.folder.path, self.lock)  # again: to reach the disk takes long, and a stopped worker longer
        write_json(self.folder.marker(i, j), record)

    def _same_bits(self, worker: str) -> str:
        """Say who has made the same bits: a worker that makes a block twice is no second opinion."""
        elsewhere = self.before is not None and self.before["worker"] != worker
        return "same bits on two workers" if elsewhere else "same bits twice on one worker"


@lru_cache(maxsize=4)
def _shared(content: bytes) -> Writer:
    """Return one writer for all tasks of a process that have come with the same: each takes 10 kB of memory."""
    return Writer(*pickle.loads(content))


def _write(where: Placement, writer: Writer, block: np.ndarray, *about: Any) -> Json:
    """Judge and write a block beside the worker's products."""
    cluster = writer.plan.cluster
    # On GPU workers, whose blocks are in host memory by then, as many write beside products as there are slots:
    # where the disk is slower than the GPU, products wait for it, and the host holds no more blocks than the plan
    # says. On CPU workers the plan counts all finished blocks of a wave, but each write has a thread of its own.
    with beside_products("write", WRITERS if cluster.device == "cpu" else cluster.threads):
        get_worker().log_event(writer.topic, [where.product, where.i, where.j])
        return writer.write(where, np.ascontiguousarray(block), *about)


def _of_b(
    where: object,
    order: Order,
    blocks: list[Any],
    seed: int,
    columns: tuple[int, ...],
    work: np.dtype | None,
    weights: dict[int, sketch.Weights] | None,
) -> Right:
    """Sketches, if blocks are judged, and checksums of blocks of a panel of B at one home."""
    sums = [checksum_of_input(block, *order) for block in blocks]
    if work is None or weights is None:
        return [], sums
    return sketch.of_b(where, blocks, seed, columns, work, weights), sums


def _of_a(
    where: object, order: Order, before: Left | None, block: Any, right: list[Right], work: np.dtype | None
) -> Left:
    """Add the sketch of one block of A, if blocks are judged, and the checksums of the panel to those before."""
    sketches, sums = before or (None, None)
    new = checksum_of_input(block, *order), *itertools.chain.from_iterable(of_b for _, of_b in right)
    sums = fold(sums, new)
    if work is None:
        return None, sums
    return sketch.of_a(where, sketches, block, [made for made, _ in right], work), sums


@dataclass(frozen=True)
class Names:
    """Names of the keys that a wave's tasks read: A, B and C, and the C that was there before."""

    a: str
    b: str
    c: str
    c0: str | None


class WritingLayer(Layer):  # type: ignore[misc]
    """Sketches and writing tasks for some blocks of a wave; like the product's layer it travels as its parameters."""

    def __init__(
        self, name: str, names: Names, writer: Writer, wave: Wave, blocks: tuple[tuple[int, int], ...]
    ) -> None:
        super().__init__()
        self.name, self.names, self.writer, self.wave, self.blocks = name, names, writer, wave, blocks

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.names, self.writer, self.wave, self.blocks)

    def is_materialized(self) -> bool:
        """Whether the tasks have been made."""
        return "made" in self.__dict__

    def get_output_keys(self) -> set[Key]:
        """Keys of the writing tasks."""
        return {self.key(i, j) for i, j in self.blocks}

    def key(self, i: int, j: int) -> Key:
        """Key of the task that writes a block."""
        return (self.name, i, j)

    def __len__(self) -> int:
        return len(self.made)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.made)

    def __getitem__(self, key: Key) -> Placed:
        return self.made[key]

    @cached_property
    def made(self) -> dict[Key, Placed]:
        """The tasks."""
        return {task.key: task for tasks in (self._sketches(), self._writing()) for task in tasks}

    @cached_property
    def groups(self) -> list[tuple[int, ...]]:
        """Block columns that are sketched, in one task those whose blocks of B have one home: tasks cost more."""
        homes: dict[int, list[int]] = {}
        for j in sorted({j for _, j in self.blocks}):
            homes.setdefault(self.writer.plan.grid.owner(0, j), []).append(j)
        return [tuple(columns) for columns in homes.values()]

    @cached_property
    def columns(self) -> list[int]:
        """Block columns in the order of their sketches."""
        return list(itertools.chain.from_iterable(self.groups))

    @cached_property
    def steps(self) -> dict[int, tuple[int, int]]:
        """Layer of the grid and step of the chain to which each panel belongs."""
        plan = self.writer.plan
        parts = plan.blocking.parts(plan.grid.layers)
        return {p: (layer, s) for layer, part in enumerate(parts) for s, panels in enumerate(part) for p in panels}

    def _place(self, i: int, j: int, panel: int) -> Placement:
        layer, step = self.steps[panel]
        order = self.wave.index * (1 + max(step for _, step in self.steps.values())) + step
        return Placement(self.names.c, self.writer.plan.grid, (), i, j, step, order, layer)

    def _sketches(self) -> Iterator[Placed]:
        writer, names, panels = self.writer, self.names, range(len(self.writer.plan.blocking.k))
        work = None if writer.tolerance is None else writer.tolerance.work
        for p in panels:
            for columns in self.groups:
                blocks = List(*(TaskRef((names.b, p, j)) for j in columns))
                where, weights = self._place(p, columns[0], p), (f"{self.name}-weights", columns[0])
                if p == 0 and work is not None:
                    yield Placed(weights, sketch.weigh, where, blocks, columns, work)
                yield Placed(
                    (f"{self.name}-b", p, columns[0]),
                    _of_b,
                    where,
                    writer.orders["B"],
                    blocks,
                    writer.seed,
                    columns,
                    work,
                    TaskRef(weights) if work is not None else None,
                )
            right = List(*(TaskRef((f"{self.name}-b", p, columns[0])) for columns in self.groups))
            for i in sorted({i for i, _ in self.blocks}):
                before = TaskRef((f"{self.name}-a", i, p - 1)) if p else None
                yield Placed(
                    (f"{self.name}-a", i, p),
                    _of_a,
                    self._place(i, p, p),
                    writer.orders["A"],
                    before,
                    TaskRef((names.a, i, p)),
                    right,
                    work,
                )

    def _writing(self) -> Iterator[Placed]:
        last = len(self.writer.plan.blocking.k) - 1
        judged = self.writer.tolerance is not None
        weights = {j: TaskRef((f"{self.name}-weights", columns[0])) for columns in self.groups for j in columns}
        for i, j in self.blocks:
            yield Placed(
                self.key(i, j),
                _write,
                self._place(i, j, 0),  # before any product of the wave: it makes room
                self.writer,
                TaskRef((self.names.c, i, j)),
                TaskRef((f"{self.name}-a", i, last)),
                self.columns.index(j),
                TaskRef((self.names.c0, i, j)) if self.names.c0 is not None else None,
                weights[j] if judged else None,
            )
