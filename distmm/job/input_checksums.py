"""Whether A, B and the C that is added were the same each time that a job read them.

A worker computes a checksum of each block of A and B that it has loaded. The marker of C[i, j] has those of A[i, :] and
of B[:, j], folded over the panels. All blocks of a row of C must agree about A, and all blocks of a column about B,
over all waves and runs.

A *stamp* of a file says without reading it whether it may have changed: it changes with any write, and with other
things such as a copy. Stamps are compared when a run begins and when it ends. Where one has changed, what the finished
blocks were made from is read again, and the checksums decide (`unchanged`).

Where markers disagree although the stamp is what it was when the job began, the file was read wrong once. It is read
again, and the blocks that do not agree with it are made again (`misread`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from distributed import Client

from distmm.api.operands import Operand
from distmm.checking.checksum import checksum_of_input
from distmm.errors import InputError
from distmm.job.folded_checksums import Order, fold, folded
from distmm.job.folder import Json
from distmm.job.spec import Spec
from distmm.planning.blocks import Blocking, slices
from distmm.storage import Matrix

__all__ = ["Seen", "misread", "orders", "stamps", "unchanged"]

Region = tuple[slice, slice]


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
                    f"not those for C[{record['i']}, {record['j']}]. If {name} is a file that was only read wrong "
                    f"once, go on with distmm resume: it reads {name} again, and makes the blocks anew that do not "
                    f"agree with it, as long as nobody has written to {name} since the job began. If it was written, "
                    f"begin anew with --overwrite (overwrite=True). A Dask array whose tasks do not give the same bits "
                    f"each time has to be persisted or stored before"
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


def misread(
    client: Client, spec: Spec, blocking: Blocking, device: str, before: dict[str, str], records: Iterable[Json]
) -> list[Json]:
    """Return the markers of blocks that were made from something else than A and B, which have not been written since.

    A file whose stamp is what it was cannot have become another one: that a row of its blocks was read in two ways is
    an error of the disk or the network. It is read once more. Where that agrees with none of the markers, it cannot be
    told which are right, and none is returned.

    Parameters are those of `unchanged`.
    """
    rows: defaultdict[tuple[str, int], dict[str, list[Json]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for name, index in (("A", record["i"]), ("B", record["j"])):
            rows[name, index][record["inputs"][name]].append(record)
    doubtful = {at: markers for at, markers in rows.items() if len(markers) > 1}
    if not doubtful:
        return []
    now, found = stamps(spec), {}
    for name in now.keys() & {name for name, _ in doubtful}:
        if before.get(name) == now[name]:
            indices = [index for of, index in doubtful if of == name]
            sums = _read_again(client, name, spec, blocking, orders(spec, device)[name], indices)
            found.update({(name, index): one for index, one in zip(indices, sums, strict=True)})
    wrong = {}
    for at, markers in doubtful.items():
        if found.get(at) in markers:
            for record in (record for value, made in markers.items() if value != found[at] for record in made):
                wrong[record["i"], record["j"]] = record
    return list(wrong.values())


def _read_again(
    client: Client, name: str, spec: Spec, blocking: Blocking, order: Order, indices: Sequence[int]
) -> list[str]:
    """Checksums of rows of blocks of A, or of columns of blocks of B, as they are now."""
    m, k, n = map(slices, (blocking.m, blocking.k, blocking.n))
    # A block row is made from all columns of B.
    groups = [[at] if name == "A" else spec.result.columns(at, len(n)) for at in indices]
    lines = [at for group in groups for at in group]
    regions = [[(m[at], part) if name == "A" else (part, n[at]) for part in k] for at in lines]
    task = _ReadAgain(_operands(spec)[name], order)
    sums = iter(client.gather(client.map(task, regions, pure=False, batch_size=1000)))
    return [folded(list(islice(sums, len(group)))) for group in groups]


def _compare(
    client: Client, name: str, spec: Spec, blocking: Blocking, order: Order, seen: Seen, records: list[Json]
) -> None:
    """Read again what the finished blocks were made from."""
    operand = _operands(spec)[name]
    if name == "C0":
        m, n = slices(blocking.m), slices(blocking.n)
        used, regions = records, [[(m[one["i"]], n[one["j"]])] for one in records]
        found = client.gather(client.map(_ReadAgain(operand, order), regions, pure=False, batch_size=1000))
    else:
        used = [one for (of, _), one in seen.first.items() if of == name]
        indices = [one["i" if name == "A" else "j"] for one in used]
        found = _read_again(client, name, spec, blocking, order, indices)
    for one, now in zip(used, found, strict=True):
        if one["inputs"][name] != now:
            raise InputError(
                f"{operand.source.path} has changed since C[{one['i']}, {one['j']}] was made from it: bring back what "
                f"was there, or begin anew with --overwrite (overwrite=True), which discards the finished blocks"
            )


def _operands(spec: Spec) -> dict[str, Operand]:
    named = {"A": spec.a, "B": spec.b, "C0": spec.c0}
    return {name: operand for name, operand in named.items() if operand is not None}
