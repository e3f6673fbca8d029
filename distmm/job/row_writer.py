"""The tasks of a job that reduces C: they check and reduce finished blocks, and write block rows.

The whole block is checked by the same sketches as in other jobs, on its GPU or in host memory. At the same time it is
reduced there, and only the reduced block, a *part*, is copied to host memory. A block row is written when all of its
blocks are right. Until then its parts are in the memory of workers.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import get_worker

from distmm.checking import sketch
from distmm.checking.checksum import checksum_of_input
from distmm.errors import InputError
from distmm.graph.placement import Placement
from distmm.job import made_blocks
from distmm.job.block_rows import RowFolder, sum_of
from distmm.job.block_writer import WRITERS, Left, Writer
from distmm.job.folded_checksums import folded
from distmm.job.folder import Json, write_json
from distmm.job.lock import Lock
from distmm.worker import gpu, tasks
from distmm.worker.tasks.reductions import on_host
from distmm.worker.worker_slots import slot_released

__all__ = ["RowWriter", "gather"]

Made = tuple[list[Json], Any]  # records of blocks, and their merged part, which is None if a block is wrong


@dataclass(frozen=True)
class RowWriter(Writer):
    """Checks and reduces blocks of C on a worker, and writes block rows and their markers to the folder `target`."""

    target: RowFolder  # type: ignore[assignment]

    @property
    def needs_norms(self) -> bool:
        """Whether the norms of rows of A and columns of B are computed, too."""
        return self.target.reduction.needs_norms

    @property
    def reduction(self) -> tasks.Reduction:
        """The reduction of a block."""
        return self.target.reduction.on_worker(self.target.dtype, self.plan)

    def part(
        self,
        where: Placement,
        block: Any,
        left: Left,
        position: int,
        added: None,
        weights: dict[int, sketch.Weights] | None,
    ) -> Made:
        """Check and reduce one block. The parameters are those of `write`.

        Returns
        -------
        records : list of dict
            The record of the block.
        part : Any
            The reduced block. None if the block is wrong.
        """
        norms = left[2]
        of_block = None if norms is None else (norms[0][:, 0], norms[1 + position][:, 0])
        if of_block is not None and tasks.exponents(of_block, self.plan.problem.dtype) is not None:
            squares = np.concatenate(of_block)
            least, most = np.sqrt([squares[squares > 0].min(), squares[np.isfinite(squares)].max()])
            raise InputError(
                f"rows that are compared have norms from {least:.2g} to {most:.2g}, and float32 cannot hold their "
                "products: divide A and B by a number near their norms, or store them as float64, and start over"
            )
        record, part = self.judged(where, block, left, position, added, weights, of_block)
        return [record], part if record["right"] else None

    def kept(self, where: Placement, block: Any, norms: Any) -> tuple[Any, int]:
        """Return the reduced block, and a checksum of the block."""
        rows, columns = self.region(where.i, where.j)
        reduce = tasks.BlockReduction(self.reduction, rows.start, columns.start)
        if gpu.namespace(block) is np:
            (part,) = reduce(block, norms)
            return part, checksum_of_input(block)

        def on_gpu() -> Any:
            with gpu.working("product"):
                return reduce(block, norms)[0]

        part = gpu.retrying(on_gpu, f"the reduction of a block, {block.shape[0]} x {block.shape[1]} {block.dtype},")
        return on_host(part), checksum_of_input(block)

    def previous(self, i: int, j: int) -> Json | None:
        """Return the record of a block in the previous attempt, if it was rejected then."""
        return None if self.before is None else next((x for x in self.before["bad"] if x["j"] == j), None)

    def store(self, i: int, records: list[Json], part: Any) -> Json:
        """Write a block row and its marker, if all of its blocks are right. Return its record."""
        records = sorted(records, key=lambda record: record["j"])
        bad = [record for record in records if not record["right"]]
        changed = next((record["changed"] for record in bad if "changed" in record), None)
        if changed is not None:  # before the comparison of inputs, which then differ
            return {**bad[0], "changed": changed, "bad": bad, "written": False}
        of_a = {record["inputs"]["A"] for record in records}
        if len(of_a) > 1:
            raise InputError(
                f"A has changed while it was multiplied: blocks of row {i} of C were made from different rows of it. "
                f"If A was only read wrong once, continue with distmm resume; if A was written, start over with "
                f"--overwrite"
            )
        inputs = {"A": of_a.pop(), "B": folded([record["inputs"]["B"] for record in records])}
        if bad:
            return {**bad[0], "inputs": inputs, "bad": bad, "written": False}
        residuals = [record["residual"] for record in records if record.get("residual") is not None]
        how = sorted({record["how"] for record in records if "how" in record} - {"sketch"})
        common = {
            "job": self.folder.id, "i": i, "j": 0, "inputs": inputs, "host": socket.gethostname(),
            "worker": str(get_worker().name), "attempt": self.attempt,
        }  # fmt: skip
        if self.tolerance is not None:
            common |= {"residual": max(residuals, default=None), "how": how[0] if how else "sketch"}
        if isinstance(part[0], int) and part[1] is None:  # of a threshold: a count of too many elements
            return {**common, "too_many": part[0], "written": False}
        rows, _ = self.region(i, 0)
        arrays = self.target.reduction.on_disk(self.reduction.finish(part), rows.start, self.target.dtype)
        with self.run.writing(), self.while_owned():
            Lock.check(self.folder.path, self.run.id)
            record = self.marked(i, 0) or self._written(i, arrays, common)
        again = [record for record in records if self.previous(i, record["j"]) is not None]
        return {**record, "again": again, "written": True}

    def _written(self, i: int, arrays: dict[str, np.ndarray], common: Json) -> Json:
        """Write a block row and its marker. Return its record."""
        sums = self.target.write(i, arrays)
        count = len(next(iter(arrays.values())))
        record = {**common, "count": count, "sums": sums, "crc32c": sum_of(sums), "time": time.time()}
        self.run.check()
        Lock.check(self.folder.path, self.run.id)
        write_json(self.folder.marker(i, 0), record)
        return record


def reduce(where: Placement, writer: RowWriter, block: Any, *about: Any) -> Made:
    """Check and reduce a block while the worker's products continue. The task of a block of C. Runs on workers."""
    cluster = writer.plan.cluster
    with slot_released("write", WRITERS if cluster.device == "cpu" else cluster.threads):
        return writer.part(where, block, *about)


def gather(writer: RowWriter, i: int, made: Sequence[Made], last: bool) -> Made | Json:
    """Merge the parts of blocks of one row. The `last` task of a row writes the block row, and returns its record.

    Parts are merged in the order of blocks, so that the bits of a block row do not depend on which task ends first.
    """
    records = list(itertools.chain.from_iterable(each for each, _ in made))
    parts = [part for _, part in made]
    part = None
    if all(each is not None for each in parts):
        part = tasks.merge(writer.reduction, parts, None, False, writer.plan.cluster.device)
    if not last:
        return records, part
    # The task keeps its slot, so that no more rows are merged at a time than planned. The write is short.
    made_blocks.report(writer.run.id)
    return writer.store(i, records, part)
