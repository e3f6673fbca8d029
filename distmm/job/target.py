"""What a job writes: named arrays, which are written by *units*. Each unit gets a marker.

- All of C is one array, with units ``(i, j)``: the blocks of C.
- `topk` has ``values`` and ``indices`` of k columns, in a Zarr group. Its units ``(i, 0)`` are reduced rows of blocks.
- `threshold` has three vectors in a Zarr group, whose lengths are known only at the end. So each of its units
  ``(i, 0)`` has a file for each vector (`Pieces`), and `Target.finish` joins the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from distmm.checking.checksum import checksum
from distmm.errors import InputError
from distmm.job.folder import Folder, Json
from distmm.planning.blocks import slices
from distmm.storage import fsync
from distmm.storage.durability import fsync_tree, published, remove, write_all
from distmm.storage.output import Region, TargetArray

Unit = tuple[int, int]
Cuts = tuple[tuple[int, ...], ...]

# Bytes of a chunk of a vector: large enough for the full rate of a disk, small enough to read some rows.
CHUNK = 16 << 20


@dataclass(frozen=True)
class Units:
    """Units on the disk, which workers compare with their markers.

    Attributes
    ----------
    arrays : dict
        The arrays by name. ``array[region]`` reads a region, or raises `InputError`.
    cuts : tuple of tuple of int
        The edges of the units along the first dimensions of each array.
    """

    arrays: Mapping[str, Any]
    cuts: Cuts

    def read(self, marker: Json, name: str) -> np.ndarray:
        """Read one array of a unit.

        Raises
        ------
        InputError
            If it cannot be read.
        """
        at = zip(self.cuts, (marker["i"], marker["j"]), strict=False)
        return np.asarray(self.arrays[name][tuple(slices(edges)[n] for edges, n in at)])

    def check(self, marker: Json) -> str | None:
        """Return what is wrong with a unit. None if it is as it was written."""
        sums = marker.get("sums", {"C": marker["crc32c"]})
        if sums.keys() != self.arrays.keys():
            return "its marker lacks a checksum"
        for name, expected in sums.items():
            try:
                found = checksum(self.read(marker, name))
            except InputError as error:
                return str(error)
            if found != expected:
                what = "its checksum" if name == "C" else f"the checksum of its {name}"
                return f"{what} is {found:08x}, and was {expected:08x} when it was written"
        return None


@dataclass(frozen=True)
class Pieces(TargetArray):
    """A vector whose length is known only at the end. The part of each unit is in a file, without a header.

    Attributes
    ----------
    name : str
        Name of the vector.
    height : int
        Number of rows of C in a unit.
    """

    name: str
    height: int

    def file(self, rows: slice) -> str:
        """Return the path of a unit's part."""
        return os.path.join(self.output.draft, f"{rows.start // max(1, self.height)}.{self.name}")

    def __setitem__(self, region: Region, values: np.ndarray) -> None:
        with published([self.file(region[0])], self.output.draft) as (file,):
            write_all(file, values.view(np.uint8))

    def written(self) -> Pieces:
        """Return the parts themselves, which are read one at a time."""
        return self

    def __getitem__(self, region: tuple[slice, ...]) -> np.ndarray:
        path = self.file(region[0])
        try:
            return np.fromfile(path, self.dtype.newbyteorder("<"))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error}") from error

    def sync(self, rows: slice, cols: slice) -> None:
        """Sync the names of the files. Their contents already are on the disk."""
        fsync(self.output.draft)

    def discard(self, rows: slice, cols: slice) -> None:
        """Remove the part of a unit."""
        with suppress(FileNotFoundError):
            os.unlink(self.file(rows))

    def keep_only(self, done: Collection[Region]) -> None:
        """Remove drafts, and the parts of units that are not in `done`."""
        kept = {os.path.basename(self.file(rows)) for rows, _ in done}
        for name in set(os.listdir(self.output.draft)) - kept:
            if name.endswith((f".{self.name}", ".draft")):
                os.unlink(os.path.join(self.output.draft, name))

    def description(self) -> Any:
        """Return the type of the elements."""
        return [self.dtype.str]

    def _write(self, rows: slice, cols: slice, block: NDArray[Any]) -> None:
        raise NotImplementedError("a part has any length, so `__setitem__` writes it")


@dataclass(frozen=True)
class Target:
    """The arrays that workers write until the job is complete.

    Attributes
    ----------
    folder : Folder
    arrays : dict
        The arrays by name. C has the name ``C``.
    cuts : tuple of tuple of int
        The edges of the units along the rows and the columns.
    facts : dict or None
        The attribute ``distmm`` of the Zarr group of a reduced product.
    """

    folder: Folder
    arrays: Mapping[str, TargetArray]
    cuts: Cuts
    facts: Json | None = None

    def region(self, unit: Unit) -> tuple[slice, slice]:
        """Return the rows and the columns of a unit."""
        rows, columns = (slices(edges)[n] for edges, n in zip(self.cuts, unit, strict=True))
        return rows, columns

    def files(self, unit: Unit) -> int:
        """Return the number of files that are open while a unit is written."""
        return max(array.files(*self.region(unit)) for array in self.arrays.values())

    def write(self, unit: Unit, values: Mapping[str, np.ndarray], check: Callable[[], object]) -> dict[str, int]:
        """Write and sync a unit.

        Parameters
        ----------
        unit : tuple of int
        values : dict
            Its arrays, by name.
        check : callable
            Raises an error if the run has ended. Called before objects are replaced that were put before.

        Returns
        -------
        dict
            The CRC-32C of each array, computed after the write. If an array waited in memory for a slow disk, it may
            have changed there.
        """
        region = self.region(unit)
        for name, array in self.arrays.items():
            try:
                array[region] = values[name]
            except FileExistsError:  # in an object store: this task runs again, or its run has ended
                check()
                array.discard(*region)
                array[region] = values[name]
            array.sync(*region)
        return {name: checksum(one) for name, one in values.items()}

    def evidence(self, unit: Unit) -> Json:
        """Return facts on a written unit for its marker: the tags of the objects of a block of C. A disk has none."""
        return self.arrays["C"].evidence(*self.region(unit)) if "C" in self.arrays else {}

    def discard(self, unit: Unit) -> None:
        """Remove a unit that is wrong."""
        for array in self.arrays.values():
            array.discard(*self.region(unit))

    def keep_only(self, done: Collection[Unit]) -> None:
        """Remove drafts, and all units except those in `done`. In an object store also the C that is replaced."""
        for array in self.arrays.values():
            array.keep_only([self.region(unit) for unit in done])

    def missing(self, markers: Mapping[Unit, Json]) -> dict[Unit, str]:
        """Return the units of which a chunk is missing or too small, and the chunk. Elements are not read."""
        written = {unit: (self.region(unit), marker) for unit, marker in markers.items()}
        return {unit: name for array in self.arrays.values() for unit, name in array.missing(written).items()}

    def locked(self, unit: Unit) -> AbstractContextManager[None]:
        """Lock a block of C against other processes until it has its marker. Reduced rows appear as a whole."""
        return self.arrays["C"].writing(*self.region(unit)) if "C" in self.arrays else nullcontext()

    def detach(self) -> None:
        """Keep processes of earlier runs from completing a write that they have begun."""
        for array in self.arrays.values():
            array.detach()

    def description(self) -> Json:
        """Describe the files and folders by facts that do not change while units are written."""
        each = {name: array.description() for name, array in self.arrays.items()}
        return each.get("C", {"arrays": each})

    def written(self) -> Units:
        """Return the units that are written, to compare them with their markers."""
        return Units({name: array.written() for name, array in self.arrays.items()}, self.cuts)

    def finish(self, markers: Collection[Json]) -> None:
        """Join the parts of vectors to the result, a Zarr group under the name of the draft, and sync it.

        Parameters
        ----------
        markers : collection of dict
            The markers of all units.

        Raises
        ------
        InputError
            If a unit is not as it was written.
        """
        if not any(isinstance(array, Pieces) for array in self.arrays.values()):
            return
        draft, written = self.folder.draft, self.written()
        if os.path.lexists(draft):  # a leftover of a run that ended in this function
            remove(draft)
        markers = sorted(markers, key=lambda marker: marker["i"])
        total = sum(marker["count"] for marker in markers)
        group = zarr.create_group(draft, attributes={"distmm": self.facts})

        def parts(name: str) -> Iterator[np.ndarray]:
            for marker in markers:
                part = written.read(marker, name)
                if checksum(part) != marker["sums"][name]:
                    raise InputError(
                        f"{name} of block row {marker['i']} in {self.folder.rows} is not what was written; call again "
                        f"to compute it again"
                    )
                yield part

        for name, array in self.arrays.items():
            lines = max(1, min(total, CHUNK // array.dtype.itemsize))
            # Without the option, Zarr omits chunks of zeros, which would look like lost ones.
            joined = group.create_array(
                name, shape=(total,), chunks=(lines,), dtype=array.dtype, compressors=None,
                config={"write_empty_chunks": True},
            )  # fmt: skip
            first = 0
            for part in whole_chunks(parts(name), lines):
                joined[first : first + len(part)] = part
                first += len(part)
        fsync_tree(draft)
        fsync(self.folder.work)


def whole_chunks(pieces: Iterator[np.ndarray], lines: int) -> Iterator[np.ndarray]:
    """Join arrays so that the length of each but the last is a multiple of `lines`. No chunk is then written twice."""
    waiting: list[np.ndarray] = []
    for piece in pieces:
        waiting.append(piece)
        length = sum(map(len, waiting))
        if length >= lines:
            whole, full = np.concatenate(waiting), length - length % lines
            yield whole[:full]
            waiting = [whole[full:]]
    if waiting and sum(map(len, waiting)):
        yield np.concatenate(waiting)
