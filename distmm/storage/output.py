"""Where a product goes: written under a draft name beside its final one, and renamed when it is done and checked."""

from __future__ import annotations

import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from distmm.errors import InputError
from distmm.storage.durability import exchange, fsync, remove
from distmm.storage.matrix import normalise

__all__ = ["Output", "Target"]


@dataclass(frozen=True)
class Output:
    """A file or folder that exists under its final name only once it is complete.

    Attributes
    ----------
    path : str
        Final name, absolute.
    draft : str
        Where blocks are written until then, on the same file system and with the same suffix: a hidden sibling, or the
        name that the job gives.
    overwrite : bool
        Whether something under the final name may be replaced. It is left alone until the very end.
    """

    path: str
    draft: str
    overwrite: bool

    @classmethod
    def reserve(cls, path: str, nbytes: int, overwrite: bool, draft: str | None = None) -> Self:
        """Check that ``nbytes`` can be written under a name, and choose a draft if none is given; nothing is written.

        Raises
        ------
        InputError
            For an output that exists, a folder that is missing or read-only, or too little space.
        """
        folder = os.path.dirname(path)
        if os.path.lexists(path) and not overwrite:
            raise InputError(f"{path}: exists; give another name, or --overwrite (overwrite=True) to replace it")
        if not os.path.isdir(folder):
            raise InputError(f"{path}: there is no folder {folder}; make it first (mkdir -p {folder})")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"{path}: the folder {folder} is read-only for you; choose another one")
        free = shutil.disk_usage(folder).free
        if nbytes > free:
            raise InputError(
                f"{path}: needs {nbytes / 1e9:.3g} GB, and {folder} has {free / 1e9:.3g} GB free: short by "
                f"{(nbytes - free) / 1e9:.3g} GB; free some space, or choose another disk"
            )
        return cls(path, draft or cls._sibling(path, f"draft-{uuid.uuid4().hex[:8]}", hidden=True), overwrite)

    @staticmethod
    def _sibling(path: str, word: str, hidden: bool) -> str:
        folder, name = os.path.split(path)
        stem, suffix = os.path.splitext(name)
        return os.path.join(folder, f"{'.' * hidden}{stem}.{word}{suffix}")

    def commit(self) -> str:
        """Give the draft its final name, sync that to the disk, and return it; it can be repeated after a kill."""
        old = f"{self.draft}.old"
        if not os.path.lexists(self.path):
            os.rename(self.draft, self.path)
        elif not self.overwrite:
            raise InputError(f"{self.path}: appeared while the product was computed; it is not replaced")
        elif os.path.isfile(self.path) and os.path.isfile(self.draft):
            os.replace(self.draft, self.path)
        elif exchange(self.draft, self.path):  # a folder cannot be renamed onto another one
            old = self.draft
        else:  # the old one is renamed, and renamed back if that fails
            os.rename(self.path, old)
            try:
                os.rename(self.draft, self.path)
            except OSError:
                os.rename(old, self.path)
                raise
        # The new name is synced first: if power fails between the two, C has both names, not none.
        fsync(os.path.dirname(self.path))
        fsync(os.path.dirname(self.draft))
        if os.path.lexists(old):
            remove(old)
        return self.path

    def set_aside(self) -> str:
        """Give a draft that failed its check a visible name that says so, and return that."""
        name, count = self._sibling(self.path, "wrong", hidden=False), 1
        while os.path.lexists(name):
            count += 1
            name = self._sibling(self.path, f"wrong-{count}", hidden=False)
        os.rename(self.draft, name)
        return name

    def discard(self) -> None:
        """Remove the draft, if there is one."""
        if os.path.lexists(self.draft):
            remove(self.draft)


@dataclass(frozen=True)
class Target(ABC):
    """A matrix that is being written, block by block: ``target[i0:i1, j0:j1] = block``.

    Attributes
    ----------
    output : Output
        Its names.
    shape : tuple of int
        ``(rows, columns)``.
    dtype : numpy.dtype
        What blocks are cast to.

    Many processes may write at the same time, no two to one storage chunk.
    """

    output: Output
    shape: tuple[int, int]
    dtype: np.dtype[Any]

    def __setitem__(self, key: Any, block: Any) -> None:
        (rows, cols), rest = normalise(key, self.shape)
        if rest != (slice(None, None, 1),) * 2 or (rows.step, cols.step) != (1, 1):
            raise IndexError(f"blocks are written to ranges of rows and columns, not to {key!r}")
        block = np.asarray(block).astype(self.dtype, copy=False)
        expected = (rows.stop - rows.start, cols.stop - cols.start)
        if block.shape != expected:
            raise ValueError(f"{self.output.path}: a block of shape {block.shape} does not fill the region {expected}")
        if block.size:
            self._write(rows, cols, block)

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Describe, as JSON, what of the draft does not change while blocks are written."""

    def missing(self, markers: Mapping[tuple[int, int], Any] | None = None) -> list[tuple[int, int]]:
        """Return the blocks (row, column) that are missing or too small; none if the format has no chunks.

        `markers` are those of the blocks that were written, with the `evidence` of each.
        """
        return []

    def evidence(self, rows: slice, cols: slice) -> dict[str, Any]:
        """Return the store's evidence of a written block (tags of objects) for its marker; a disk has none."""
        return {}

    def discard(self, rows: slice, cols: slice) -> None:  # noqa: B027 - what is written in place needs no room
        """Make room for a block that was written before, or by another worker, and is written again."""

    def detach(self) -> None:  # noqa: B027 - nobody has to, where what is not whole has no name
        """Keep processes of earlier runs from ending a write that they are in the middle of."""

    def make_room(self, done: Collection[tuple[int, int]]) -> None:  # noqa: B027 - see `detach`
        """Remove blocks that are not `done`, by their row and column."""

    def writing(self, rows: slice, cols: slice) -> AbstractContextManager[None]:
        """Keep a block from all others, until it is written and has its marker."""
        return nullcontext()

    @abstractmethod
    def sync(self, rows: slice, cols: slice) -> None:
        """Return once a block that was written is on the disk, and will outlive a loss of power."""

    @abstractmethod
    def _write(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        """Write one block, not empty, that exactly fills the region."""
