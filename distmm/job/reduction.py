"""The reductions of jobs: the best k elements of each row of C, or the elements above a threshold.

A threshold has a limit on the elements that it keeps: the job ends before the disk is full (`Entries`).
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np

from distmm.errors import DoesNotFitError, InputError
from distmm.job.folder import Folder, Json
from distmm.planning.plan import Plan
from distmm.planning.problem import accumulator_dtype
from distmm.product.operand import Operand
from distmm.product.reduction_limits import bytes_of_entry, check_metric, check_threshold, checked_k, most_of_block
from distmm.worker.tasks import reductions, threshold
from distmm.worker.tasks.metrics import Metric
from distmm.worker.tasks.reductions import Largest

# Bytes that a threshold may always keep of a block, and of a row of blocks, even if these are small. A job has the kept
# elements of one row of waves in memory, and not those of all of C.
ALWAYS, ALWAYS_OF_ROW = 16 << 20, 64 << 20

# Share of the free disk that finished block rows may take by default. The result needs as much again.
MOST = 0.4

# A row of blocks may keep this multiple of what one block may keep. For large blocks that is half a block's bytes.
ROW = 2

INDEX = np.dtype(np.int64)


class _OfRows:
    """What both reductions have in common. `c` is the type of the product.

    Attributes
    ----------
    names : tuple of str
        Names of the arrays on the disk, in the order of the reduction's results. The others than ``values`` are int64.
    """

    kind: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    metric: Metric | None

    def dtype(self, c: np.dtype[Any]) -> np.dtype[Any]:
        """Type of the values."""
        return c if self.metric is None else accumulator_dtype(c)

    def arrays(self, c: np.dtype[Any]) -> dict[str, np.dtype[Any]]:
        """Return the type of each array on the disk. bfloat16 is written as float32, which is exact."""
        values = np.dtype(np.float32) if self.dtype(c) == ml_dtypes.bfloat16 else self.dtype(c)
        return {name: values if name == "values" else INDEX for name in self.names}

    def check(self, a: Operand, b: Operand) -> None:
        """Refuse a metric that the product does not allow.

        Raises
        ------
        InputError
            With the value, and the values that are allowed.
        """
        if self.metric is not None:
            check_metric(self.metric, a, b)

    def on_disk(self, results: tuple[np.ndarray, ...], first: int, c: np.dtype[Any]) -> dict[str, np.ndarray]:
        """Return the arrays of a row of blocks, whose first row is `first`, as they are written."""
        found = dict(zip(self.names, results, strict=True))
        if "rows" in found:
            found["rows"] = found["rows"] + first
        types = self.arrays(c)
        return {name: np.ascontiguousarray(one, types[name].newbyteorder("<")) for name, one in found.items()}

    def json(self) -> Json:
        """Describe it for the manifest."""
        return {"kind": self.kind, **vars(self)}


@dataclass(frozen=True)
class TopK(_OfRows):
    """The k best elements of each row, and their columns.

    Attributes
    ----------
    k : int
    metric : {"inner", "cosine", "euclidean"} or None
        As in `distmm.nearest`. None: the largest elements, in NumPy's order.
    """

    k: int
    metric: Metric | None = None

    kind = "topk"
    names = ("values", "indices")

    @property
    def width(self) -> int:
        """Number of columns of the arrays."""
        return self.k

    def check(self, a: Operand, b: Operand) -> None:
        """Refuse a metric, or a k, that the product does not allow."""
        super().check(a, b)
        checked_k(self.k, b.shape[1], "the product has rows of {n} elements")

    def on_worker(self, c: np.dtype[Any], plan: Plan) -> reductions.Reduction:
        """Return the reduction of blocks, for the tasks on workers."""
        return Largest(self.k, self.dtype(c), self.metric)

    def bytes_of_parts(self, c: np.dtype[Any], plan: Plan) -> tuple[int, int]:
        """Return the largest number of bytes of a reduced block of C, and of a reduced row of blocks."""
        height, _, width = plan.block_shape
        line = INDEX.itemsize + self.dtype(c).itemsize
        return height * min(self.k, width) * line, height * self.k * line


@dataclass(frozen=True)
class Threshold(_OfRows):
    """The elements that are at least `t`, with their rows and columns.

    Attributes
    ----------
    t : float
    metric : {"inner", "cosine", "euclidean"} or None
        As in `distmm.threshold`.
    """

    t: float
    metric: Metric | None = None

    kind = "threshold"
    names = ("rows", "columns", "values")
    width = 1

    def check(self, a: Operand, b: Operand) -> None:
        """Refuse a threshold that is not a real number, and a metric that the product does not allow."""
        check_threshold(self.t, None, self.metric)
        super().check(a, b)

    def on_worker(self, c: np.dtype[Any], plan: Plan) -> reductions.Reduction:
        """Return the reduction of blocks, for the tasks on workers."""
        of_block, of_row = (nbytes // bytes_of_entry(self.dtype(c)) for nbytes in self.bytes_of_parts(c, plan))
        return threshold.Threshold(self.t, of_block, of_row, self.metric)

    def bytes_of_parts(self, c: np.dtype[Any], plan: Plan) -> tuple[int, int]:
        """Return the largest number of bytes of a reduced block of C, and of a reduced row of blocks."""
        each = bytes_of_entry(self.dtype(c))
        of_block = most_of_block(plan, self.dtype(c), ALWAYS) * each
        all_of_row = plan.block_shape[0] * plan.problem.n * each
        return of_block, min(all_of_row, max(ROW * of_block, ALWAYS_OF_ROW))


Reduction = TopK | Threshold


def from_json(content: Any) -> Reduction | None:
    """Return the reduction that `json` has described. None for a job that keeps all of C.

    Raises
    ------
    InputError
        For content of another form.
    """
    match content:
        case None:
            return None
        case {"kind": "topk", "k": int(k), "metric": None | str() as metric}:
            return TopK(k, metric)  # type: ignore[arg-type]
        case {"kind": "threshold", "t": int() | float() as t, "metric": None | str() as metric}:
            return Threshold(t, metric)  # type: ignore[arg-type]
    raise InputError(f"{str(content)[:60]} is not a reduction that this version of distmm supports")


@dataclass
class Entries:
    """Counts the kept elements of finished block rows.

    Attributes
    ----------
    plan : Plan
    most : float
        Number of elements that may be kept. Infinity without a threshold.
    count, seen : int
        Number of elements kept so far, and number of elements of C examined so far.
    """

    plan: Plan
    most: float = math.inf
    count: int = 0
    seen: int = 0

    @classmethod
    def of(cls, reduction: Reduction | None, c: np.dtype[Any], plan: Plan, folder: Folder, most: int | None) -> Self:
        """Return the counter of a job with the caller's limit `most`, or as many elements as fit on the free disk."""
        if not isinstance(reduction, Threshold):
            return cls(plan)
        if most is None:
            used = sum(entry.stat().st_size for entry in os.scandir(folder.rows))
            free = shutil.disk_usage(folder.path).free + used
            most = int(free * MOST) // bytes_of_entry(reduction.dtype(c))
        return cls(plan, most)

    def take(self, record: Json) -> None:
        """Count a block row: a finished one, or one with too many elements for the planned memory of a worker.

        Raises
        ------
        DoesNotFitError
            If the block row has too many elements, or more than `most` elements are kept.
        """
        if self.most == math.inf:
            return
        too_many = record.get("too_many")
        self.count += too_many or record["count"]
        self.seen += self.plan.blocking.m[record["i"]] * self.plan.problem.n
        if too_many is not None:
            why = (
                f"and block row {record['i']} alone {too_many:,}, more than fit into a worker's memory: choose a "
                f"stricter threshold, or compute all of C with distmm.multiply"
            )
        elif self.count > self.most:
            why = (
                f"and at most {int(self.most):,} may be kept: choose a stricter threshold, or continue with a higher "
                f"limit (the same command with --most, or most=)"
            )
        else:
            return
        whole = math.prod(self.plan.problem.shape)
        raise DoesNotFitError(
            f"the threshold keeps {self.count:,} of the {self.seen:,} elements seen so far, of {whole:,}, {why}"
        )
