"""A small product of whole numbers on disk, and jobs that keep the best of its rows, or what is above a threshold."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from distributed import Client

from distmm import job

# Five block rows of C, 70 x 90, of three blocks each, the last ones ragged; two waves make each pair of block rows.
SHAPE, PLAN = (70, 20, 90), "g1x2x1 b16x10x32 p1 w3x2 l2"


def operands(folder: Path) -> np.ndarray:
    """Write A and B of small whole numbers, so that many elements of C are equal; return C."""
    rng = np.random.default_rng(3)
    m, k, n = SHAPE
    a, b = rng.integers(-2, 3, (m, k)).astype("f4"), rng.integers(-2, 3, (k, n)).astype("f4")
    os.makedirs(folder, exist_ok=True)
    np.save(folder / "A.npy", a)
    zarr.create_array(folder / "B.zarr", data=b, chunks=(10, 32))
    return a @ b


def best(c: np.ndarray, k: int) -> np.ndarray:
    """Columns of the k largest elements of each row, the first of equal ones first."""
    return np.argsort(-c, axis=1, kind="stable")[:, :k]


def arrays(out: str) -> dict[str, np.ndarray]:
    group = zarr.open_group(out, mode="r")
    return {name: np.asarray(array) for name, array in group.arrays()}


def same(one: str, other: str) -> bool:
    left, right = arrays(one), arrays(other)
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


def topk(client: Client, out: str = "out.zarr", k: int = 7, **options: Any) -> job.Summary:
    return job.topk("A.npy", "B.zarr", k, out, client=client, **{"plan": PLAN, **options})


def threshold(client: Client, out: str = "out.zarr", t: float = 6, **options: Any) -> job.Summary:
    return job.threshold("A.npy", "B.zarr", t, out, client=client, **{"plan": PLAN, **options})


def marked(out: str = "out.zarr") -> dict[str, int]:
    """Markers of finished block rows, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in Path(f"{out}.job").glob("*/*/done/*.json")}


class HalfWay(job.Stop):
    """Does something once two block rows are finished: at least one of five is not sent then."""

    def __init__(self, what: Callable[[HalfWay], object] = lambda stop: stop.ask("enough")) -> None:
        super().__init__()
        self.what = what

    @property
    def reason(self) -> str | None:
        if len(marked()) >= 2:
            self.what(self)
        return super().reason
