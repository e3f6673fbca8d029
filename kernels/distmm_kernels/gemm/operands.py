"""Operands in a kernel's own format, which `prepare_a` and `prepare_b` return in place of arrays.

Those of the Hopper kernel are matrices that the tensor memory accelerator reads, and panels of k in one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles import hopper_tiles
from distmm_kernels.tiles.hopper_tiles import MOST_PANELS


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared:
    """A prepared operand.

    Attributes
    ----------
    shape
        ``(*batch, m, k)`` or ``(*batch, k, n)``.
    format
        What tensor cores read, in a few words. A kernel takes operands of the formats that it ``reads``.
    made
        What has the numbers: an array, parts, residues, or an operand of another kernel. Broadcast matrices are kept
        once.
    batch
        Of parts and residues, the batch dimensions of the matrices that they have.
    """

    shape: tuple[int, ...]
    format: str
    made: Any
    batch: tuple[int, ...] = ()


class Shareable(Prepared):
    """A prepared A whose format is also that of its transpose as B."""

    @property
    def transposed(self) -> Self:
        """The transpose of a left operand as a right operand, in the same memory."""
        return replace(self, shape=(*self.shape[:-2], self.shape[-1], self.shape[-2]))


@dataclass(frozen=True, eq=False, kw_only=True)
class Operand(Shareable):
    """A prepared operand, made of the matrices, or of their transposes, with contiguous rows.

    ``made`` has one array, or one for each panel of k that one launch multiplies. All panels but the last have the
    same k.

    Attributes
    ----------
    format
        Type that the tensor cores read.
    major
        The axis that is contiguous: ``"m"``, ``"k"`` or ``"n"``.
    """

    format: hopper_tiles.OperandFormat
    major: Any

    @functools.cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """Memory layout of one matrix, or of each panel; empty for batches."""
        return tuple(Stack.for_tensor_map(panel) for panel in self.made) if len(self.shape) == 2 else ()

    @property
    def transposed(self) -> Operand:
        """See `Shareable.transposed`."""
        return replace(super().transposed, major="n" if self.major == "m" else "k")

    def rows(self, which: slice) -> Operand:
        """Return these rows of a left operand whose rows are contiguous."""
        parts = tuple(panel[..., which, :] for panel in self.made)
        return replace(self, shape=(*self.shape[:-2], parts[0].shape[-2], self.shape[-1]), made=parts)


Pair = tuple[Operand, Operand]


def joined(operands: Sequence[Pair], sliced: Callable[[Operand, Operand], bool]) -> list[Pair]:
    """Join consecutive panels of the same k; the last one may have a smaller k.

    ``sliced`` says whether a panel is multiplied in slices of k, at the same time. Such panels are not joined.
    """
    runs: list[list[Pair]] = []
    for pair in operands:
        if runs and _goes_on(runs[-1], pair) and not sliced(*runs[-1][0]):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _joined(run: Sequence[Pair]) -> Pair:
    k, (a, b) = sum(left.shape[1] for left, _ in run), run[0]
    lefts, rights = (tuple(panel for side in sides for panel in side.made) for sides in zip(*run, strict=True))
    return replace(a, shape=(a.shape[0], k), made=lefts), replace(b, shape=(k, b.shape[1]), made=rights)


def _goes_on(run: Sequence[Pair], pair: Pair) -> bool:
    """Whether a launch of the panels in ``run`` can take one more pair."""
    first, last = run[0], run[-1]
    k, after = last[0].shape[-1], pair[0].shape[-1]
    return (
        len(run) < MOST_PANELS
        and 0 < after <= k == first[0].shape[-1]
        and all(bool(new.stacks) and bool(old.stacks) for new, old in zip(pair, first, strict=True))
        and all(new.major == old.major for new, old in zip(pair, first, strict=True))
    )
