"""Checks finished blocks of C on workers.

A block is in the memory of the device that computed it. A GPU checks its block, while one copy of what the job keeps of
it is made in host memory: all of the block, or its reduction.
"""

from __future__ import annotations

import math
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from distributed import get_worker

from distmm.checking import sketch
from distmm.checking.checksum import checksum, checksum_of_input
from distmm.errors import InputError
from distmm.graph.placement import Placement
from distmm.job.contents import Contents
from distmm.job.folder import Json
from distmm.job.inputs import Order
from distmm.planning.blocks import slices
from distmm.planning.plan import Plan
from distmm.transfer import loaded_blocks
from distmm.worker import gpu
from distmm.worker.gpu_copies import to_host
from distmm.worker.tasks.metrics import exponents
from distmm.worker.tasks.reductions import BlockReduction, Reduction, on_host
from distmm_kernels.tolerance import Tolerance

Kept = tuple[list[Json], Any]  # records of blocks, and what the job keeps of them: None if one of them is wrong


class RowOfA(NamedTuple):
    """What is known of the inputs of a row of blocks of C.

    Attributes
    ----------
    sketch : Sketch or None
        None if blocks are not checked.
    sums : array of uint64
        The folded checksums of the row of A, and of each column of B.
    norms : list of array or None
        The squared norms of the rows of A, and of the columns of each column of blocks of B, if a reduction needs them.
    changed : dict
        Blocks that have changed in memory: of B by column, of A by None.
    """

    sketch: sketch.Sketch | None
    sums: np.ndarray
    norms: list[np.ndarray] | None
    changed: dict[int | None, Json]


def summed(block: Any, order: Order, changed: dict[int | None, Json], column: int | None, name: str) -> int:
    """Return the checksum of a block. If it has changed in memory since this worker loaded it, add that to `changed`.

    Called after the sketches are made. A bit that flips later only changes the product, which the sketches detect.
    """
    crc, (by_rows, columns_first) = checksum_of_input(block, *order), order
    in_memory = not by_rows and (block.T if columns_first else block).flags.c_contiguous
    if loaded_blocks.has_changed(block, crc if in_memory else None):
        changed.setdefault(column, change(name, "loaded"))
    return crc


def change(name: str, since: str) -> Json:
    """Describe a changed block: its name, this worker and host, and since when."""
    return {"block": name, "since": since, **here()}


def here() -> Json:
    """Return the names of this host and worker, for a record."""
    return {"host": socket.gethostname(), "worker": str(get_worker().name)}


@dataclass(frozen=True)
class Judge:
    """Checks blocks of C.

    Attributes
    ----------
    job : str
        Id of the job.
    contents : Contents
        What the job keeps of C.
    plan : Plan
    tolerance : Tolerance or None
        None: blocks are not compared with sketches.
    seed : int
        Seed of the random vectors.
    alpha, beta : scalars
    orders : dict
        How checksums of A, B and C0 are computed.
    attempt : int
        How often the unit was rejected before.
    rejected : tuple of dict
        The records of its blocks that the previous attempt rejected. If inf or NaN make the comparison impossible, or a
        row is only an outlier, a block with the same bits as in the previous attempt is accepted.
    """

    job: str
    contents: Contents
    plan: Plan
    tolerance: Tolerance | None
    seed: int
    alpha: complex
    beta: complex
    orders: dict[str, Order]
    attempt: int = 0
    rejected: tuple[Json, ...] = ()

    @property
    def reduction(self) -> Reduction | None:
        """The reduction of a block."""
        reduction = self.contents.reduction
        return None if reduction is None else reduction.on_worker(self.contents.dtype, self.plan)

    def judged(
        self,
        where: Placement,
        block: Any,
        row: RowOfA,
        position: int,
        added: np.ndarray | None,
        weights: dict[int, sketch.Weights] | None,
    ) -> Kept:
        """Check one block of C.

        Parameters
        ----------
        where : Placement
        block : NumPy or CuPy array of shape (m, n)
        row : RowOfA
            The sketch of the row of blocks, and the checksums of its inputs.
        position : int
            Position of the block's column in `row`.
        added : array or None
            The block of C0.
        weights : dict or None
            The weights of each block column.

        Returns
        -------
        records : list of dict
            The record of the block, in which ``"accepted"`` is the outcome.
        kept : Any
            The block in host memory, or its reduction. None if the block is wrong.
        """
        inputs = {"A": f"{row.sums[0]:016x}", "B": f"{row.sums[1 + position]:016x}"}
        norms, judged = self._norms(row, position), None
        with ThreadPoolExecutor(1) as copying:
            copied: Future[tuple[Any, int]] = Future()
            if gpu.namespace(block) is np:  # same memory: if the block changes after the checksum, the test detects it
                copied.set_result(self._kept(where, block, norms))
            else:
                copied = copying.submit(self._kept, where, block, norms)
            if self.tolerance is not None and row.sketch is not None and weights is not None:
                x = sketch.vectors(self.seed, where.j, block.shape[1], self.tolerance.exact)
                about = self.tolerance, row.sketch, position, block, x, self.alpha, self.beta, added
                judged = sketch.judge(*about, by=weights[where.j])
        kept, crc = copied.result()
        changed = dict(row.changed)
        if added is not None:
            of_c0 = summed(added, self.orders["C0"], changed, where.j, f"C0[{where.i}, {where.j}]")
            inputs["C0"] = f"{of_c0:016x}"
        record: Json = {
            "job": self.job, "i": where.i, "j": where.j, "crc32c": crc, "inputs": inputs,
            "attempt": self.attempt, "accepted": True, **here(),
        }  # fmt: skip
        if judged is not None:
            before = next((one for one in self.rejected if one["j"] == where.j), None)
            same = judged.residual <= 1 and before is not None and before["crc32c"] == crc
            record |= {
                "accepted": judged.ok or same,
                # JSON has no infinity, which is the residual of integers that differ.
                "residual": judged.residual if math.isfinite(judged.residual) else None,
                "how": "sketch" if judged.ok else _same_bits(before, record["worker"]) if same else "rejected",
                "row": judged.row,
            }
        found = changed.get(None) or changed.get(where.j)
        if found is not None:  # block and sketches agree, because both were made from the changed block
            record |= {"accepted": False, "residual": None, "how": "rejected", "row": 0, "changed": found}
        return [record], kept if record["accepted"] else None

    def _norms(self, row: RowOfA, position: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the squared norms of a block's rows of A, and of its columns of B, if the reduction needs them."""
        if row.norms is None:
            return None
        norms = row.norms[0][:, 0], row.norms[1 + position][:, 0]
        if exponents(norms, self.plan.problem.dtype) is not None:
            squares = np.concatenate(norms)
            least, most = np.sqrt([squares[squares > 0].min(), squares[np.isfinite(squares)].max()])
            raise InputError(
                f"rows that are compared have norms from {least:.2g} to {most:.2g}, and float32 cannot hold their "
                "products: divide A and B by a number near their norms, or store them as float64, and start over"
            )
        return norms

    def _kept(self, where: Placement, block: Any, norms: Any) -> tuple[Any, int]:
        """Return what the job keeps of a block, in host memory, and a checksum of the block."""
        if self.reduction is None:
            whole = np.ascontiguousarray(to_host(block))
            return whole, checksum(whole)
        first = slices(self.plan.blocking.m)[where.i].start, slices(self.plan.blocking.n)[where.j].start
        reduction = BlockReduction(self.reduction, *first)
        if gpu.namespace(block) is np:
            return reduction(block, norms)[0], checksum_of_input(block)

        what = f"the reduction of a block, {block.shape[0]} x {block.shape[1]} {block.dtype},"
        return on_host(gpu.completed(lambda: reduction(block, norms)[0], what)), checksum_of_input(block)

    def arrays(self, i: int, kept: Any) -> dict[str, np.ndarray]:
        """Return the arrays of a unit in row i, as they are written."""
        reduction = self.contents.reduction
        if reduction is None or self.reduction is None:
            return {"C": kept}
        first = slices(self.plan.blocking.m)[i].start
        return reduction.on_disk(self.reduction.finish(kept), first, self.contents.dtype)


def _same_bits(before: Json | None, worker: str) -> str:
    """Return a text on who has computed the same bits. A second worker is a stronger confirmation."""
    elsewhere = before is not None and before["worker"] != worker
    return "same bits on two workers" if elsewhere else "same bits twice on one worker"
