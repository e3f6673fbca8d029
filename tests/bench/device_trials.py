"""A job on a recorded device, and what must hold when its power is lost; `device_states.py` draws the states."""

from __future__ import annotations

import itertools
import os
import posix
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr
from distributed import Client
from recorded_device import Device

from distmm import job
from distmm.errors import InputError
from distmm.job.folder import Folder
from distmm.job.records import read_manifest
from distmm.planning.blocks import even_edges, slices
from distmm.storage import locate, open_matrix
from distmm.storage.matrix import Matrix
from tests.exact_sums import whole_numbers

# Sixteen blocks of C, in waves of four; those at the edges are smaller, and no edge is that of a page.
SIZE, BLOCK, PLAN = 250, 64, "g1x2x1 b64x125x64 p1 w4x1 l1"
A, OTHER, B, BEFORE = (whole_numbers((SIZE, SIZE), "f8", seed) for seed in range(4))


@dataclass(frozen=True)
class Kind:
    """What a job makes.

    Attributes
    ----------
    out : str
        C, in the folder where the device is mounted.
    before : {"", "file", "job"}
        What has C's name before: nothing, a matrix, or the result of another job.
    options : dict
        Of `distmm.job.multiply`.
    """

    out: str
    before: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def expected(self) -> np.ndarray:
        """The right C."""
        c: np.ndarray = A @ B + (BEFORE if self.options.get("beta") else 0)
        return c

    @property
    def replaced(self) -> np.ndarray:
        """What has C's name before."""
        return OTHER @ B if self.before == "job" else BEFORE


KINDS = {
    f"{form}{', ' * bool(what)}{what}": Kind(out, before, options)
    for form, name, nested in (
        ("Zarr", "C.zarr", "C.zarr/outer/inner/C"),
        (".npy", "C.npy", ""),
        ("HDF5", "C.h5:/C", "C.h5:/outer/inner/C"),
    )
    for what, out, before, options in (
        ("", name, "", {}),
        ("--overwrite", name, "job", {"overwrite": True}),
        ("--beta", name, "file", {"beta": 1}),
        ("nested groups", nested, "", {}),
        ("nested groups, --overwrite", nested, "job", {"overwrite": True}),
    )
    if out
}


@dataclass
class Trial:
    """A job of one kind on one device.

    Attributes
    ----------
    device : Device
    kind : Kind
    inputs : Path
        Folder of A and B, on another disk.
    client : distributed.Client
    begin, end, last : int
        Moments of the record: before the job, after it, and after the last look.
    ended : float
        When the job had ended.
    """

    device: Device
    kind: Kind
    inputs: Path
    client: Client
    begin: int = 0
    end: int = 0
    last: int = 0
    ended: float = 0

    @property
    def path(self) -> str:
        return str(self.device.place / self.kind.out)

    @contextmanager
    def recorded(self, synced: bool = True) -> Iterator[None]:
        """Run the job on a new device, with or without fsync; the device is mounted until this ends."""
        self.device.make()
        with self.device.mounted():
            self._prepare()
        with self.device.recorded():
            self.begin = self.device.moment()
            self._set_fsync(synced)
            self.multiply()
            self._set_fsync(True)
            self.end, self.ended = self.device.moment(), time.monotonic()
            yield
            self.last = self.device.moment()

    def _prepare(self) -> None:
        file, _, dataset = self.path.partition(":")
        if "/outer/" in file:  # a job makes no groups on the way to an array
            zarr.open_group(file.removesuffix("/outer/inner/C"), mode="w").create_group("outer").create_group("inner")
        if self.kind.before == "job":
            self.multiply(self.inputs / "other.npy", overwrite=False)
        elif file.endswith(".npy") and self.kind.before:
            np.save(file, BEFORE)
        elif dataset and self.kind.before:
            with h5py.File(file, "w") as opened:
                opened[dataset] = BEFORE
        elif self.kind.before:
            zarr.create_array(file, data=BEFORE, chunks=(100, 80))

    def multiply(self, a: Path | None = None, **more: Any) -> None:
        """Make the call."""
        options = {"client": self.client, "plan": PLAN, "seed": 1, **self.kind.options, **more}
        job.multiply(a or self.inputs / "A.npy", self.inputs / "B.npy", self.path, **options)

    def _set_fsync(self, on: bool) -> None:
        set_fsync(on)
        self.client.run(set_fsync, on)

    def points(self, rng: random.Random, first: int) -> Iterator[int]:
        """Draw after how many requests power is lost: anywhere in the job, more often near its end, or later.

        These moments take turns; `first` says which begins.
        """
        begin, end, last = (self.device.count(moment) for moment in (self.begin, self.end, self.last))
        near = end - (end - begin) // 8
        for n in itertools.count(first):
            yield rng.randint(*((begin, end), (near, end), (begin, end), (end, last))[n % 4])

    def verdict(self, image: Path, ended: bool) -> tuple[str, str]:
        """Mount a state and go on from there; return the outcome, and what was seen."""
        with ExitStack() as held:
            try:
                held.enter_context(self.device.mounted(image))
            except subprocess.CalledProcessError as error:
                return "unreadable", str(error)
            try:
                return self._verdict(ended)
            except InputError as error:
                return "refused", str(error)

    def _verdict(self, ended: bool) -> tuple[str, str]:
        before = self._seen()
        if before not in ("right", "replaced" if self.kind.before else "absent"):
            return "wrong", f"C is {before}"
        if ended and (before != "right" or not os.path.exists(Folder.of(self.path).certificate)):
            return "gone", f"the job had ended, and C is {before}"
        if before != "absent" and self._verified() == "wrong":
            return "wrong", f"distmm verify says so, and C is {before}"
        bare = self._bare_markers()
        if bare:
            return "marker without a block", f"of {bare}"
        for lock in Path(Folder.of(self.path).path).glob("lock.*"):
            os.utime(lock, (0, 0))  # as old as it is when a machine has started again
        begun = Folder.of(self.path).exists()
        try:
            job.resume(self.path, client=self.client)
        except InputError as error:
            if begun or "there is no unfinished job" not in str(error):
                raise
        # If this job had not begun, nothing was to be done: C may be complete, as the result of the job before.
        if self._seen() != ("right" if begun else before):
            return "wrong", f"C was {before}, and after resume it is {self._seen()}"
        try:
            self.multiply()
        except InputError as error:
            if "is already the result of the same call" not in str(error):
                raise
        if self._seen() != "right":
            return "wrong", f"after the same call C is {self._seen()}"
        checked = job.recheck(self.path)
        if checked.outcome != ("cannot tell" if "beta" in self.kind.options else "right"):
            return "wrong", f"its certificate: {checked.message}"
        names = {Path(self.path).parts[len(self.device.place.parts)].partition(":")[0]}
        names |= {os.path.basename(name) for name in (Folder.of(self.path).certificate, Folder.of(self.path).report)}
        left = set(os.listdir(self.device.place)) - names - {"lost+found"}
        if left:
            return "wrong", f"left over: {sorted(left)}"
        return "right", before

    def _seen(self) -> str:
        """Say what has C's name."""
        if not self._there():
            return "absent"
        try:
            c = open_matrix(self.path)[...]
        except InputError as error:
            return f"unreadable: {error}"
        for name, value in (("right", self.kind.expected), ("replaced", self.kind.replaced)):
            if np.array_equal(c, value):
                return name
        return "neither the right one nor that before"

    def _verified(self) -> str:
        try:
            return job.recheck(self.path).outcome
        except InputError as error:
            if "there is no certificate" in str(error) or "is the result of a job that was killed" in str(error):
                return "without a certificate"
            raise

    def _there(self) -> bool:
        return os.path.lexists(locate(self.path)[0])

    def _bare_markers(self) -> list[tuple[int, int]]:
        """Blocks that have a marker, and are neither in the draft nor in C."""
        folder = Folder.of(self.path)
        if not folder.exists():
            return []
        folder = folder.of_job(read_manifest(folder)["id"])
        if not os.path.isdir(folder.done):
            return []
        # When C has its name, the draft is gone, or is what was there before. Blocks without a marker may be damaged.
        held = [open_matrix(path) for path in (folder.draft, folder.target) if os.path.lexists(path)]
        return [block for block in folder.markers() if not any(self._has(c, block) for c in held)]

    def _has(self, c: Matrix, block: tuple[int, int]) -> bool:
        edges = slices(even_edges(SIZE, BLOCK))
        region = edges[block[0]], edges[block[1]]
        try:
            return np.array_equal(c[region], self.kind.expected[region])
        except InputError:
            return False


def operands(folder: Path) -> None:
    """Write A, the A of the job before, and B."""
    folder.mkdir()
    for name, values in (("A", A), ("other", OTHER), ("B", B)):
        np.save(folder / f"{name}.npy", values)


def set_fsync(on: bool) -> None:
    """Let fsync do what it is for, or nothing. Runs here and on workers."""
    os.fsync = posix.fsync if on else lambda fd: None
