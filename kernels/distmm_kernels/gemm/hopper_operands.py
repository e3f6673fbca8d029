"""Operands of the Hopper kernel: matrices that the tensor memory accelerator reads, and panels of k in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from distmm_kernels.gemm.prepared import Prepared
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles import hopper_tiles
from distmm_kernels.tiles.hopper_tiles import MOST_PANELS


@dataclass(frozen=True, eq=False, kw_only=True)
class HopperOperand(Prepared):
    """A prepared operand, made of the matrices, or of their transposes, with contiguous rows.

    Attributes
    ----------
    format
        Type that the tensor cores read.
    major
        The axis that is contiguous: ``"m"``, ``"k"`` or ``"n"``.
    stack
        Memory layout, if there is one matrix only; None for batches.
    """

    format: hopper_tiles.OperandFormat
    major: Any
    stack: Stack | None

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Memory layout of one matrix; empty for batches."""
        return () if self.stack is None else (self.stack,)

    @property
    def transposed(self) -> HopperOperand:
        """A left operand's transpose as a right operand, in the same memory."""
        return replace(super().transposed, major="n" if self.major == "m" else "k")

    def rows(self, which: slice) -> HopperOperand:
        """Return these rows of a left operand."""
        part = self.made[..., which, :]
        stack = Stack.for_tensor_map(part) if part.ndim == 2 else None
        return replace(self, shape=(*self.shape[:-2], *part.shape[-2:]), made=part, stack=stack)


@dataclass(frozen=True, eq=False)
class HopperPanels:
    """Prepared panels of k, one matrix each, that one launch multiplies. All but the last have the same k."""

    panels: tuple[HopperOperand, ...]
    side: Literal["A", "B"]

    @property
    def shape(self) -> tuple[int, ...]:
        """``(m, k)`` or ``(k, n)``, with the k of all panels."""
        (rows, columns), axis = self.panels[0].shape, 1 if self.side == "A" else 0
        k = sum(panel.shape[axis] for panel in self.panels)
        return (rows, k) if self.side == "A" else (k, columns)

    @property
    def major(self) -> Any:
        """The axis that is contiguous."""
        return self.panels[0].major

    @property
    def format(self) -> hopper_tiles.OperandFormat:
        """Type that the tensor cores read."""
        return self.panels[0].format

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Memory layout of each panel."""
        return tuple(stack for panel in self.panels for stack in panel.stacks)

    def rows(self, which: slice) -> HopperPanels:
        """Return these rows of left operands."""
        return HopperPanels(tuple(panel.rows(which) for panel in self.panels), self.side)


Side: TypeAlias = HopperOperand | HopperPanels


def joined(
    operands: Sequence[tuple[HopperOperand, HopperOperand]], sliced: Callable[[HopperOperand, HopperOperand], bool]
) -> list[tuple[Side, Side]]:
    """Join consecutive panels of the same k; the last one may have a smaller k.

    ``sliced`` says whether a panel is multiplied in slices of k, at the same time. Such panels are not joined.
    """
    runs: list[list[tuple[HopperOperand, HopperOperand]]] = []
    for pair in operands:
        if runs and _goes_on(runs[-1], pair) and not sliced(*runs[-1][0]):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return [
        run[0] if len(run) == 1 else (HopperPanels(lefts, "A"), HopperPanels(rights, "B"))
        for run in runs
        for lefts, rights in (tuple(zip(*run, strict=True)),)
    ]


def _goes_on(run: Sequence[tuple[HopperOperand, HopperOperand]], pair: tuple[HopperOperand, HopperOperand]) -> bool:
    """Whether a launch of the panels in ``run`` can take one more pair."""
    first, last = run[0], run[-1]
    k, after = last[0].shape[-1], pair[0].shape[-1]
    return (
        len(run) < MOST_PANELS
        and 0 < after <= k == first[0].shape[-1]
        and all(bool(new.stacks) and bool(old.stacks) for new, old in zip(pair, first, strict=True))
        and all(new.major == old.major for new, old in zip(pair, first, strict=True))
    )
