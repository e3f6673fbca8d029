"""A small job of four waves, and what happens to it half-way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

from distmm import job
from distmm.errors import InputError
from distmm.storage import open_matrix
from tests.exact_sums import in_panels, whole_numbers

SIZE, BLOCKS = 120, (30, 60, 30)

# Sixteen blocks of C in waves of four, each of which reads all of B. The grid is one row: waves have as many rows of
# blocks as the grid, or a multiple, and of the grid that is chosen for four workers there would be two waves of eight.
PLAN = "g1x4x1 b30x60x30 p1 w4x1 l1"


def operands(folder: Path) -> np.ndarray:
    """Write A and B; return their product, added panel by panel as the chains of a job add it."""
    a, b = in_panels(whole_numbers((SIZE, SIZE), "f8"), BLOCKS[1]), whole_numbers((SIZE, SIZE), "f8", 1)
    os.makedirs(folder)
    np.save(folder / "A.npy", a)
    zarr.create_array(folder / "B.zarr", data=b, chunks=(20, 30))
    depth = BLOCKS[1]
    return sum(a[:, p : p + depth] @ b[p : p + depth] for p in range(0, SIZE, depth))


def multiply(client: Client, out: str = "C.zarr", inputs: str = "in", **options: Any) -> job.Summary:
    return job.multiply(f"{inputs}/A.npy", f"{inputs}/B.zarr", out, client=client, plan=PLAN, **options)


def values(out: str = "C.zarr") -> np.ndarray:
    return open_matrix(out)[...]


def marked(out: str = "C.zarr") -> dict[str, int]:
    """Markers of finished blocks, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in Path(f"{out}.job").glob("*/*/done/*.json")}


class HalfWay(job.Stop):
    """Asks to stop once four blocks have their markers.

    Eight of sixteen are still to be sent then, whoever is how fast: the third wave waits until the client knows that
    the first one is on the disk, and before it sends a wave the client asks for a reason to stop.
    """

    def __init__(self, out: str = "C.zarr", enough: int = 4) -> None:
        super().__init__()
        self.out, self.enough = out, enough

    @property
    def reason(self) -> str | None:
        if len(marked(self.out)) >= self.enough:
            self.ask("enough")
        return super().reason


class Meanwhile(job.Stop):
    """Asks for nothing, but does something half-way."""

    def __init__(self, what: Callable[[], object], out: str) -> None:
        super().__init__()
        self.what, self.out, self.done = what, out, False

    @property
    def reason(self) -> str | None:
        if not self.done and len(marked(self.out)) >= 4:
            self.done = True
            self.what()
        return None


def mend(
    client: Client,
    cause: Callable[[], object],
    cure: Callable[[], object],
    message: str,
    out: str = "C.zarr",
    inputs: str = "in",
    state: str = "failed",
) -> np.ndarray:
    """A job that fails by `cause` half-way says so, keeps what it has, and ends after the `cure`; return C.

    Before it goes on, its `state` is "failed", or "stopped" if its folder could not be written when it failed.
    """
    kept = rf"(?s){message}.*kept in {out}\.job; continue with: distmm resume {out}, after the cause is removed"
    try:
        with pytest.raises(InputError, match=kept.replace(f"in {out}", f"in .*{out}")):
            multiply(client, out, inputs, stop=Meanwhile(cause, out))
    finally:
        cure()
    before = marked(out)
    assert 4 <= len(before) <= 8
    assert job.status(out).state == state
    again: dict[str, int] = {}
    assert job.resume(out, client=client, progress=lambda figures: again.update(marked(out))).kept == len(before)
    assert {name: again[name] for name in before} == before
    return values(out)
