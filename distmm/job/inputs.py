"""Whether A, B and the C that is added were the same each time that a job read them.

A worker computes a checksum of each block of A and B that it has loaded, beside the sketches. The marker of C[i, j] has
those of A[i, :] and of B[:, j], folded over the panels, so that all blocks of a row of C must agree about A, and all of
a column about B, over all waves and runs.

A stamp tells at a glance that the files are what they were: it changes with any write, and with much else. So where
it has changed, at the beginning of a run or at its end, what the finished blocks were made from is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from distributed import Client

from distmm.api.operands import Operand
from distmm.checking.checksum import checksum_of_input
from distmm.errors import InputError
from distmm.job.folder import Json
from distmm.job.spec import Spec
from distmm.planning.blocks import Blocking, slices
from distmm.storage import Matrix

__all__ = ["Order", "Seen", "fold", "orders", "stamps", "unchanged"]

# Each sum is multiplied by this, modulo 2**64, before the next one is added: an odd number whose bits are mixed.
FOLD = np.uint64(0x9E3779B97F4A7C15)

Region = tuple[slice, slice]
Order = tuple[bool, bool]  # how a checksum is made: from sums of rows, column by column


def fold(before: np.ndarray | None, sums: Sequence[int]) -> np.ndarray:
    """Add checksums of the blocks of one more panel to those of the panels before."""
    new = np.array(sums, np.uint64)
    return new if before is None else before * FOLD + new


class Seen:
    """The sums of each row of blocks of A and column of blocks of B, as the markers of C's blocks have them."""

    def __init__(self, records: Iterable[Json] = ()) -> None:
        self.first: dict[tuple[str, int], Json] = {}  # of A and a row, or B and a column
        for record in records:
            self.add(record)

    def add(self, record: Json) -> None:
        """Take the marker of one more block.

        Raises
        ------
        InputError
            If another block has been made from something else.
        """
        for name, index, part in (("A", record["i"], "rows"), ("B", record["j"], "columns")):
            first = self.first.setdefault((name, index), record)
            if first["inputs"][name] != record["inputs"][name]:
                raise InputError(
                    f"{name} has changed while it was multiplied: its {part} for C[{first['i']}, {first['j']}] were "
                    f"not those for C[{record['i']}, {record['j']}]; begin anew with --overwrite (overwrite=True); a "
                    f"Dask array whose tasks do not give the same bits each time has to be persisted or stored before"
                )


@dataclass(frozen=True)
class _ReadAgain:
    """Sums up blocks of an operand as they are now. Runs on workers."""

    operand: Operand
    order: Order

    def __call__(self, regions: list[Region]) -> str:
        total = None
        for rows, columns in regions:
            source = self.operand.source
            block = source[columns, rows].T if self.operand.transposed else source[rows, columns]
            total = fold(total, [checksum_of_input(block, *self.order)])
        assert total is not None
        return f"{total[0]:016x}"


def orders(spec: Spec, device: str) -> dict[str, Order]:
    """How checksums of A, B and C0 are made, so that no block need be copied for it. C0 is in host memory always."""

    def columns_first(operand: Operand) -> bool:
        source = operand.source
        if isinstance(source, np.ndarray):
            return operand.transposed != (source.flags.f_contiguous and not source.flags.c_contiguous)
        return operand.transposed != (isinstance(source, Matrix) and source.columns_first)

    return {name: (device == "cuda" and name != "C0", columns_first(one)) for name, one in _operands(spec).items()}


def stamps(spec: Spec) -> dict[str, str]:
    """Stamps of the inputs that are files."""
    sources = {name: operand.source for name, operand in _operands(spec).items()}
    found = {name: source.stamp() for name, source in sources.items() if isinstance(source, Matrix)}
    return {name: stamp for name, stamp in found.items() if stamp is not None}


def unchanged(
    client: Client, spec: Spec, blocking: Blocking, device: str, before: dict[str, str], records: Iterable[Json]
) -> dict[str, str]:
    """Compare inputs with what they were; return their stamps.

    Parameters
    ----------
    client : distributed.Client
        Whose workers read again what may have changed.
    spec, blocking, device
        Of the job.
    before : dict
        Stamps at the beginning of the last run, or of this one.
    records : iterable of dict
        Markers of the blocks that are finished.

    Raises
    ------
    InputError
        If finished blocks were made from something else than what is there now.
    """
    records, now = list(records), stamps(spec)
    seen = Seen(records)
    for name in (name for name in now if before.get(name, now[name]) != now[name]):
        _compare(client, name, spec, blocking, orders(spec, device)[name], seen, records)
    if stamps(spec) != now:
        raise InputError("A, B or C is being written now: wait until it is complete")
    return now


def _compare(
    client: Client, name: str, spec: Spec, blocking: Blocking, order: Order, seen: Seen, records: list[Json]
) -> None:
    """Read again what the finished blocks were made from."""
    operand = _operands(spec)[name]
    m, k, n = map(slices, (blocking.m, blocking.k, blocking.n))
    if name == "C0":
        used, regions = records, [[(m[one["i"]], n[one["j"]])] for one in records]
    else:
        used = [one for (of, _), one in seen.first.items() if of == name]
        regions = [[(m[one["i"]], part) if name == "A" else (part, n[one["j"]]) for part in k] for one in used]
    found = client.gather(client.map(_ReadAgain(operand, order), regions, pure=False, batch_size=1000))
    for one, now in zip(used, found, strict=True):
        if one["inputs"][name] != now:
            raise InputError(
                f"{operand.source.path} has changed since C[{one['i']}, {one['j']}] was made from it: bring back what "
                f"was there, or begin anew with --overwrite (overwrite=True), which discards the finished blocks"
            )


def _operands(spec: Spec) -> dict[str, Operand]:
    named = {"A": spec.a, "B": spec.b, "C0": spec.c0}
    return {name: operand for name, operand in named.items() if operand is not None}
