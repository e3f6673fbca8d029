"""The reductions of jobs: the best k elements of each row of C, or the elements above a threshold."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from distmm.errors import InputError
from distmm.planning.plan import Plan
from distmm.planning.problem import accumulator_dtype
from distmm.product.operand import Operand
from distmm.product.reduced_product import check_metric, checked_k
from distmm.product.thresholds import bytes_of_entry, check_threshold, most_of_block
from distmm.worker import tasks

__all__ = ["Arrays", "Reduction", "Threshold", "TopK", "element_type", "from_json"]

Arrays = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]  # type of each array, and shape of one line, by name

# Bytes that a threshold may always keep of a block, and of a row of blocks, even if these are small. A job has the kept
# elements of one row of waves in memory, and not those of all of C.
ALWAYS, ALWAYS_OF_ROW = 16 << 20, 64 << 20

# A row of blocks may keep this multiple of what one block may keep. For large blocks that is half a block's bytes.
ROW = 2

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class TopK:
    """The k best elements of each row, and their columns.

    Attributes
    ----------
    k : int
    metric : {"inner", "cosine", "euclidean"} or None
        As in `distmm.nearest`. None: the largest elements, in NumPy's order.
    """

    k: int
    metric: tasks.Metric | None = None

    kind: ClassVar[str] = "topk"

    @property
    def needs_norms(self) -> bool:
        """Whether the norms of the rows of A and the columns of B count."""
        return self.metric in ("cosine", "euclidean")

    def dtype(self, c: np.dtype[Any]) -> np.dtype[Any]:
        """Type of the values, for a product of type `c`."""
        return c if self.metric is None else accumulator_dtype(c)

    def arrays(self, c: np.dtype[Any]) -> Arrays:
        """Return the type, and the shape of one line, of each array on the disk, by name."""
        return {"values": (_stored(self.dtype(c)), (self.k,)), "indices": (np.dtype(np.int64), (self.k,))}

    def check(self, a: Operand, b: Operand) -> None:
        """Refuse a k or a metric that the product does not allow.

        Raises
        ------
        InputError
            With the value, and the values that are allowed.
        """
        if self.metric is not None:
            check_metric(self.metric, a, b)
        checked_k(self.k, b.shape[1], "the product has rows of {n} elements")

    def on_worker(self, c: np.dtype[Any], plan: Plan) -> tasks.Reduction:
        """Return the reduction of blocks of type `c`, for the tasks on workers."""
        return tasks.Largest(self.k, self.dtype(c), self.metric)

    def bytes_of_parts(self, c: np.dtype[Any], plan: Plan) -> tuple[int, int]:
        """Return the largest number of bytes of a reduced block of C, and of a reduced row of blocks."""
        height, _, width = plan.block_shape
        line = np.dtype(np.int64).itemsize + self.dtype(c).itemsize
        return height * min(self.k, width) * line, height * self.k * line

    def bytes_on_disk(self, c: np.dtype[Any], rows: int) -> int:
        """Return the bytes of block rows and result, which are on the disk at the same time at the end."""
        return 2 * rows * sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.arrays(c).values())

    def on_disk(self, results: tuple[np.ndarray, ...], first: int, c: np.dtype[Any]) -> dict[str, np.ndarray]:
        """Return the arrays of a row of blocks, whose first row is `first`, as they are written."""
        return _typed(self.arrays(c), results)

    def json(self) -> dict[str, Any]:
        """Describe it for the manifest."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Threshold:
    """The elements that are at least `t`, with their rows and columns.

    Attributes
    ----------
    t : float
    metric : {"inner", "cosine", "euclidean"} or None
        As in `distmm.threshold`.
    """

    t: float
    metric: tasks.Metric | None = None

    kind: ClassVar[str] = "threshold"

    @property
    def needs_norms(self) -> bool:
        """Whether the norms of the rows of A and the columns of B count."""
        return self.metric in ("cosine", "euclidean")

    def dtype(self, c: np.dtype[Any]) -> np.dtype[Any]:
        """Type of the values, for a product of type `c`."""
        return c if self.metric is None else accumulator_dtype(c)

    def arrays(self, c: np.dtype[Any]) -> Arrays:
        """Return the type, and the shape of one line, of each array on the disk, by name."""
        index = np.dtype(np.int64)
        return {"rows": (index, ()), "columns": (index, ()), "values": (_stored(self.dtype(c)), ())}

    def check(self, a: Operand, b: Operand) -> None:
        """Refuse a threshold that is not a real number, and a metric that the product does not allow.

        Raises
        ------
        InputError
            With the value.
        """
        check_threshold(self.t, None, self.metric)
        if self.metric is not None:
            check_metric(self.metric, a, b)

    def on_worker(self, c: np.dtype[Any], plan: Plan) -> tasks.Reduction:
        """Return the reduction of blocks of type `c`, for the tasks on workers."""
        of_block, of_row = (nbytes // bytes_of_entry(self.dtype(c)) for nbytes in self.bytes_of_parts(c, plan))
        return tasks.Threshold(self.t, of_block, of_row, self.metric)

    def bytes_of_parts(self, c: np.dtype[Any], plan: Plan) -> tuple[int, int]:
        """Return the largest number of bytes of a reduced block of C, and of a reduced row of blocks."""
        each = bytes_of_entry(self.dtype(c))
        of_block = most_of_block(plan, self.dtype(c), ALWAYS) * each
        all_of_row = plan.block_shape[0] * plan.problem.n * each
        return of_block, min(all_of_row, max(ROW * of_block, ALWAYS_OF_ROW))

    def bytes_on_disk(self, c: np.dtype[Any], rows: int) -> int:
        """Return 0: the number of kept elements is not known before."""
        return 0

    def on_disk(self, results: tuple[np.ndarray, ...], first: int, c: np.dtype[Any]) -> dict[str, np.ndarray]:
        """Return the arrays of a row of blocks, whose first row is `first`, as they are written."""
        row, *others = results
        return _typed(self.arrays(c), (row + first, *others))

    def json(self) -> dict[str, Any]:
        """Describe it for the manifest."""
        return {"kind": self.kind, **asdict(self)}


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


def element_type(name: str) -> np.dtype[Any]:
    """Return the dtype with this name. NumPy itself does not know bfloat16."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type on the disk. bfloat16 is written as float32, which is exact, and which every program reads."""
    return np.dtype(np.float32) if dtype == BFLOAT16 else dtype


def _typed(arrays: Arrays, results: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    """Return results by name, in their types on the disk."""
    return {
        name: np.ascontiguousarray(values, dtype.newbyteorder("<"))
        for (name, (dtype, _)), values in zip(arrays.items(), results, strict=True)
    }
