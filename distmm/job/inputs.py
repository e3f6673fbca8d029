"""Checks that A, B and C0 were the same each time that a job read them.

A worker computes a checksum of each block of A and B that it has loaded. The marker of C[i, j] has the checksums of
A[i, :] and of B[:, j], folded over the panels in ascending k. All blocks of a row of C must have the same checksum of
A, and all blocks of a column the same checksum of B, over all waves and runs.

The *stamp* of a file is computed without reading the file. It changes with any write, but also for example with a copy.
Stamps are compared when a run begins and when it ends. If a stamp has changed, the inputs of the finished blocks are
read again, and their checksums are compared (`Inputs.unchanged`).

If markers disagree, but the stamp is the same as when the job began, the file was read wrong once. The blocks of that
row or column are computed again (`Inputs.misread`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
from distributed import Client

from distmm.checking.checksum import checksum_of_input
from distmm.errors import InputError
from distmm.job.folder import Json
from distmm.job.spec import Spec
from distmm.planning.blocks import Blocking, cut, slices
from distmm.product.operand import Operand
from distmm.storage import open_matrix
from distmm.storage.matrix import Matrix

Region = tuple[slice, slice]

# The sum so far is multiplied by this odd number, modulo 2**64, before the next checksum is added.
FOLD = np.uint64(0x9E3779B97F4A7C15)

# How the checksum of a block is computed: from sums of rows or from all elements, and column by column or not
# (`by_rows` and `columns_first` of `distmm.checking.checksum.checksum_of_input`).
Order = tuple[bool, bool]


NO_PANEL = np.zeros(1, np.uint64)  # the sum before the first panel, of each column


def fold(before: np.ndarray, sums: Sequence[int]) -> np.ndarray:
    """Fold the checksums of the blocks of one more panel into those of the panels before."""
    return before * FOLD + np.array(sums, np.uint64)


def folded(sums: Sequence[str]) -> str:
    """Fold the checksums of several columns of B, as they are in markers, to one. A single one is not changed."""
    total = NO_PANEL
    for one in sums:
        total = fold(total, [int(one, 16)])
    return f"{total[0]:016x}"


def orders(spec: Spec, device: str) -> dict[str, Order]:
    """Return how checksums of A, B and C0 are computed without copying blocks. C0 is always in host memory."""

    def columns_first(operand: Operand) -> bool:
        source = operand.source
        if isinstance(source, np.ndarray):
            return operand.transposed != (source.flags.f_contiguous and not source.flags.c_contiguous)
        return operand.transposed != (isinstance(source, Matrix) and source.columns_first)

    return {name: (device == "cuda" and name != "C0", columns_first(one)) for name, one in spec.operands.items()}


def stamps(spec: Spec) -> dict[str, str]:
    """Return the stamps of the inputs that are files."""
    found = {name: one.source.stamp() for name, one in spec.operands.items() if isinstance(one.source, Matrix)}
    return {name: stamp for name, stamp in found.items() if stamp is not None}


def written(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the names of the inputs whose stamps have changed: their files were written, or are copies."""
    return [name for name in now if before.get(name, now[name]) != now[name]]


class Seen:
    """The checksum of each row of blocks of A, and of each column of blocks of B, in the markers of C's blocks."""

    def __init__(self, records: Iterable[Json] = ()) -> None:
        self.first: dict[tuple[str, int], Json] = {}  # first marker of each row of A, and of each column of B
        for record in records:
            self.add(record)

    def add(self, record: Json) -> None:
        """Add the marker of a block.

        Raises
        ------
        InputError
            If another marker has a different checksum of the same row of A, or column of B.
        """
        for name, index, part in (("A", record["i"], "rows"), ("B", record["j"], "columns")):
            first = self.first.setdefault((name, index), record)
            if first["inputs"][name] != record["inputs"][name]:
                raise InputError(
                    f"{name} has changed while it was multiplied: its {part} for C[{first['i']}, {first['j']}] were "
                    f"not those for C[{record['i']}, {record['j']}]. If {name} is a file that was only read wrong "
                    f"once, continue with distmm resume: it computes these {part} of C again, provided that {name} "
                    f"was not written since the job began. If it was written, start over with --overwrite "
                    f"(overwrite=True). A Dask array whose tasks do not give the same bits each time has to be "
                    f"persisted or stored first"
                )


def _read_again(operand: Operand, order: Order, regions: list[Region]) -> str:
    """Read blocks of an operand, and return their folded checksum. Runs on workers."""
    return folded([f"{checksum_of_input(operand.region(*region), *order):016x}" for region in regions])


@dataclass(frozen=True)
class Inputs:
    """The inputs of the finished blocks. Workers of `client`, or else this process, read them again if necessary."""

    client: Client | None
    spec: Spec
    blocking: Blocking
    device: Literal["cpu", "cuda"]

    @classmethod
    def of(cls, content: Json, spec: Spec, client: Client | None) -> Inputs:
        """Return the inputs of a complete result, by its certificate."""
        return cls(client, spec, cut(spec.problem, content["blocks"]), content["runs"][0]["device"])

    def unchanged(self, before: dict[str, str], markers: Iterable[Json]) -> dict[str, str]:
        """Check that inputs have not changed since the finished blocks were computed. Return the inputs' stamps.

        Parameters
        ----------
        before : dict
            Stamps at the beginning of the last run, or of this one.
        markers : iterable of dict
            Of the finished blocks.

        Raises
        ------
        InputError
            If an input has changed since a finished block was computed from it, or is being written.
        """
        markers, now = list(markers), stamps(self.spec)
        seen = Seen(markers)
        for name in written(before, now):
            source = self.spec.operands[name].source
            _refuse_lost(source)
            used = markers if name == "C0" else [one for (of, _), one in seen.first.items() if of == name]
            lines = [self._lines(name, one["i"], one["j"]) for one in used]
            read = partial(_read_again, self.spec.operands[name], orders(self.spec, self.device)[name])
            regions, client = list(chain(*lines)), self.client
            again = map(read, regions) if client is None else client.map(read, regions, pure=False, batch_size=1000)
            sums = again if client is None else iter(client.gather(again))
            for one, own in zip(used, lines, strict=True):
                if one["inputs"][name] != folded(list(islice(sums, len(own)))):
                    raise InputError(
                        f"{source.path} has changed since C[{one['i']}, {one['j']}] was made from it: restore the "
                        f"original, or start over with --overwrite (overwrite=True), which discards the finished blocks"
                    )
        if stamps(self.spec) != now:
            raise InputError("another program is writing A, B or C: wait until it has ended, and call again")
        return now

    def misread(self, before: dict[str, str], markers: Iterable[Json]) -> list[Json]:
        """Return the markers of blocks for which A or B may have been read wrong, although the file has not changed.

        A file with the same stamp has not changed. If it has different checksums in the markers of a row or column of
        blocks, disk or network made an error. Which of them are right is unknown, so all of them are returned.

        The parameters are those of `unchanged`.
        """
        now = stamps(self.spec)
        lines: defaultdict[tuple[str, int], list[Json]] = defaultdict(list)
        for marker in markers:
            lines["A", marker["i"]].append(marker)
            lines["B", marker["j"]].append(marker)
        found: dict[Any, Json] = {}
        for (name, _), made in lines.items():
            same = name in now and before.get(name) == now[name]
            if same and len({marker["inputs"][name] for marker in made}) > 1:
                found |= {(marker["i"], marker["j"]): marker for marker in made}
        return list(found.values())

    def _lines(self, name: str, i: int, j: int) -> list[list[Region]]:
        """Return the regions of an operand that a unit was computed from, by row of A, column of B, or block of C0."""
        m, k, n = map(slices, (self.blocking.m, self.blocking.k, self.blocking.n))
        if name == "C0":
            return [[(m[i], n[j])]]
        if name == "A":
            return [[(m[i], part) for part in k]]
        return [[(part, n[at]) for part in k] for at in self.spec.contents.columns(j, len(n))]


def _refuse_lost(source: Matrix) -> None:
    """Raise `InputError` if other chunks of an input are missing than when this call opened it."""
    before, now = (matrix.fingerprint().get("missing") for matrix in (source, open_matrix(source.path)))
    if before != now:
        raise InputError(
            f"{source.path} has changed: {now or 'no chunk is missing'}; when this call opened it: "
            f"{before or 'no chunk was missing'}; restore the original"
        )
