"""Outputs of products: they are written as a draft, which gets its final name when it is complete and checked."""

from __future__ import annotations

import os
import shlex
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from distmm import units
from distmm.errors import InputError
from distmm.storage.durability import exchange, fsync, remove
from distmm.storage.matrix import normalise

Region = tuple[slice, slice]  # rows and columns
Written = Mapping[tuple[int, int], tuple[Region, Mapping[str, Any]]]  # by block: its region, and its marker

APPEARED = (
    "{}: was created by another program while the product was computed, and is not replaced: move it away, and resume "
    "the job"
)


@dataclass(frozen=True)
class Output:
    """A file or folder that gets its final name when it is complete.

    Attributes
    ----------
    path : str
        Final name, absolute.
    draft : str
        Name until then, on the same file system and with the same suffix: a hidden name in the same folder, or the name
        that the job gives.
    overwrite : bool
        Whether an existing file or folder with the final name may be replaced. `commit` replaces it.
    """

    path: str
    draft: str
    overwrite: bool

    @classmethod
    def reserve(cls, path: str, nbytes: int, overwrite: bool, draft: str | None = None) -> Self:
        """Check that ``nbytes`` can be written to `path`, and choose the draft's name. Nothing is written.

        Raises
        ------
        InputError
            If the output exists, its folder is missing or read-only, or there is too little space.
        """
        folder = os.path.dirname(path)
        if os.path.lexists(path) and not overwrite:
            raise InputError(f"{path}: exists; give another name, or --overwrite (overwrite=True) to replace it")
        check_folder(path, folder)
        free = shutil.disk_usage(folder).free
        if nbytes > free:
            raise InputError(
                f"{path}: needs {units.size(nbytes)}, and {folder} has {units.size(free)} free: short by "
                f"{units.size(nbytes - free)}; free some space, or choose another disk"
            )
        return cls(path, draft or cls._sibling(path, f"draft-{uuid.uuid4().hex[:8]}", hidden=True), overwrite)

    @staticmethod
    def _sibling(path: str, word: str, hidden: bool) -> str:
        """Return a name in the same folder, with `word` inserted before the suffix."""
        folder, name = os.path.split(path)
        stem, suffix = os.path.splitext(name)
        return os.path.join(folder, f"{'.' * hidden}{stem}.{word}{suffix}")

    def commit(self) -> str:
        """Rename the draft to its final name, sync that, and return the name. It can be repeated after a kill."""
        old = f"{self.draft}.old"
        if not os.path.lexists(self.path):
            os.rename(self.draft, self.path)
        elif not self.overwrite:
            raise InputError(APPEARED.format(self.path))
        elif os.path.isfile(self.path) and os.path.isfile(self.draft):
            os.replace(self.draft, self.path)
        elif exchange(self.draft, self.path):  # a folder cannot replace another folder by a rename
            old = self.draft
        else:  # rename the old folder first, and back if the second rename fails
            os.rename(self.path, old)
            try:
                os.rename(self.draft, self.path)
            except OSError:
                os.rename(old, self.path)
                raise
        # Sync the new name first. If power fails between the two syncs, C has both names, and not none.
        fsync(os.path.dirname(self.path))
        fsync(os.path.dirname(self.draft))
        if os.path.lexists(old):
            remove(old)
        return self.path

    def set_aside(self) -> str:
        """Rename a draft that failed its check to a visible name with "wrong" in it, and return that name."""
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


def check_folder(path: str, folder: str) -> None:
    """Raise `InputError` if the folder that an output is written to is missing or read-only."""
    if os.path.isfile(folder):
        raise InputError(f"{path}: {folder} is a file, not a folder; choose another name")
    if not os.path.isdir(folder):
        raise InputError(f"{path}: there is no folder {folder}; make it first (mkdir -p {shlex.quote(folder)})")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path}: the folder {folder} is read-only for you; choose another one")


@dataclass(frozen=True)
class TargetArray(ABC):
    """A matrix that is written block by block: ``target[i0:i1, j0:j1] = block``. Then `sync` is called.

    Many processes may write at the same time, but no two to the same storage chunk.

    Attributes
    ----------
    output : Output
        Its names.
    shape : tuple of int
        ``(rows, columns)``.
    dtype : numpy.dtype
        Type of the elements. Blocks are cast to it.
    """

    output: Output
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __setitem__(self, key: Any, block: Any) -> None:
        (rows, cols), rest = normalise(key, self.shape)
        if rest != (slice(None, None, 1),) * 2 or (rows.step, cols.step) != (1, 1):
            raise IndexError(f"give a range of rows and a range of columns for a block, not {key!r}")
        cast = np.asarray(block).astype(self.dtype, copy=False)
        expected = (rows.stop - rows.start, cols.stop - cols.start)
        if cast.shape != expected:
            raise ValueError(f"{self.output.path}: a block of shape {cast.shape} does not fill the region {expected}")
        if cast.size:
            self._write(rows, cols, cast)

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Describe the draft, as JSON, by facts that do not change while blocks are written."""

    def files(self, rows: slice, cols: slice) -> int:
        """Return the number of files that are open while a block is written."""
        return 1

    def missing(self, written: Written) -> dict[tuple[int, int], str]:
        """Return the blocks of which a file is missing or too small, and its name. Formats without chunks return none.

        The marker of each written block contains the block's `evidence`.
        """
        return {}

    def evidence(self, rows: slice, cols: slice) -> dict[str, Any]:
        """Return the facts of a written block for its marker: the tags of its objects. A disk has none."""
        return {}

    def discard(self, rows: slice, cols: slice) -> None:  # noqa: B027 - formats that are written in place do nothing
        """Remove the block that an earlier run or another worker wrote, before it is written again."""

    def written(self) -> Any:
        """Return an object that reads what is written: ``written[rows, cols]`` is an array, or an `InputError`."""
        from distmm.storage import open_matrix  # late: it knows all formats

        return open_matrix(self.output.draft)

    def detach(self) -> None:  # noqa: B027 - formats whose unfinished chunks have no name do nothing
        """Keep processes of earlier runs from completing a write that they have begun."""

    def keep_only(self, done: Collection[Region]) -> None:  # noqa: B027 - formats written in place do nothing
        """Remove all blocks except those in `done`."""

    def writing(self, rows: slice, cols: slice) -> AbstractContextManager[None]:
        """Lock a block against other processes until it is written and has its marker."""
        return nullcontext()

    @abstractmethod
    def sync(self, rows: slice, cols: slice) -> None:
        """Return when a written block is on the disk, and survives a loss of power."""

    @abstractmethod
    def _write(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        """Write a block that exactly fills its region, which is not empty."""
