"""What a job writes: named arrays, which are written by *units*. Each unit gets a marker.

- All of C is one array, with units ``(i, j)``: the blocks of C.
- `topk` has ``values`` and ``indices`` of k columns, in a Zarr group. Its units ``(i, 0)`` are reduced rows of blocks.
- `threshold` has three vectors in a Zarr group, whose lengths are known only at the end. So each of its units
  ``(i, 0)`` has a file for each vector (`Pieces`), and `Target.finish` joins the files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from distmm.checking.checksum import checksum
from distmm.errors import InputError
from distmm.job.folder import Folder, Json
from distmm.planning.blocks import slices
from distmm.storage import fsync
from distmm.storage.durability import fsync_tree, published, remove, write_all
from distmm.storage.output import Block, Region, TargetArray

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
        return os.path.join(self.output.draft, f"{rows.start // self.height}.{self.name}")

    def write(self, blocks: Iterable[tuple[slice, slice, np.ndarray]]) -> None:
        """Write the parts of units."""
        parts = {self.file(rows): values for rows, _, values in blocks}
        with published(list(parts), self.output.draft) as files:
            for file, values in zip(files, parts.values(), strict=True):
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

    def sync(self, regions: Collection[Region]) -> None:
        """Sync the names of the files. Their contents already are on the disk."""
        fsync(self.output.draft)

    def discard(self, rows: slice, cols: slice) -> None:
        """Remove the part of a unit."""
        with suppress(FileNotFoundError):
            os.unlink(self.file(rows))

    def keep_only(self, done: Collection[Unit]) -> None:
        """Remove drafts, and the parts of units that are not in `done`."""
        kept = {f"{i}.{self.name}" for i, _ in done}
        for name in set(os.listdir(self.output.draft)) - kept:
            if name.endswith((f".{self.name}", ".draft")):
                os.unlink(os.path.join(self.output.draft, name))

    def description(self) -> Any:
        """Return the type of the elements."""
        return [self.dtype.str]

    def _write(self, blocks: Sequence[Block]) -> None:
        raise NotImplementedError("a part has any length, so `write` writes it")


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

    def write(
        self, units: Mapping[Unit, Mapping[str, np.ndarray]], check: Callable[[], object]
    ) -> dict[Unit, dict[str, int]]:
        """Write and sync units.

        Parameters
        ----------
        units : dict
            The arrays of each unit, by name.
        check : callable
            Raises an error if the run has ended. Called before objects are replaced that were put before.

        Returns
        -------
        dict
            The CRC-32C of each array of each unit, computed after the write. If an array waited in memory for a slow
            disk, it may have changed there.
        """
        regions = [self.region(unit) for unit in units]
        for name, array in self.arrays.items() if units else ():
            blocks = [(*region, values[name]) for region, values in zip(regions, units.values(), strict=True)]
            try:
                array.write(blocks)
            except FileExistsError:  # in an object store: this task runs again, or its run has ended
                check()
                for region in regions:
                    array.discard(*region)
                array.write(blocks)
            array.sync(regions)
        return {unit: {name: checksum(one) for name, one in arrays.items()} for unit, arrays in units.items()}

    def evidence(self, unit: Unit) -> Json:
        """Return facts on a written unit for its marker: the tags of the objects of a block of C. A disk has none."""
        region = self.region(unit)
        empty = any(one.start == one.stop for one in region)
        return {} if empty or "C" not in self.arrays else self.arrays["C"].evidence(*region)

    def discard(self, unit: Unit) -> None:
        """Remove a unit that is wrong."""
        for array in self.arrays.values():
            array.discard(*self.region(unit))

    def keep_only(self, done: Collection[Unit]) -> None:
        """Remove drafts, and all units except those in `done`. In an object store also the C that is replaced."""
        for array in self.arrays.values():
            array.keep_only(done)

    def missing(self, markers: Mapping[Unit, Json]) -> list[Unit]:
        """Return the units of which a chunk is missing or too small. Elements are not read."""
        return sorted({unit for array in self.arrays.values() for unit in array.missing(markers)})

    @contextmanager
    def locked(self, units: Collection[Unit]) -> Iterator[None]:
        """Lock units against other processes until they have their markers."""
        regions = [self.region(unit) for unit in units]
        with ExitStack() as stack:
            for array in self.arrays.values():
                stack.enter_context(array.writing(regions))
            yield

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
