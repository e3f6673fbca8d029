"""Whether operands can be multiplied by each other, and a matrix with its own transpose as a pair of operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distmm.errors import InputError
from distmm.planning.plan import Plan
from distmm.planning.problem import Symmetry
from distmm.product.aliasing import same, transposes
from distmm.product.choices import Choices
from distmm.product.operand import Operand, wrap


def check_kinds(operands: Sequence[Any]) -> None:
    """Refuse operands, with a `name` and a `kind`, of which some have NumPy blocks and others CuPy blocks.

    Raises
    ------
    InputError
        With the names of two operands.
    """
    first = operands[0]
    for each in operands:
        if each.kind != first.kind:
            raise InputError(
                f"{first.name} has {first.kind} blocks and {each.name} {each.kind} blocks: convert one, for example "
                "with x.map_blocks(cupy.asarray) or x.map_blocks(cupy.asnumpy)"
            )


def _inner(operand: Operand, plain: str) -> str:
    """Say which dimension of an operand, as the user gave it, is summed over: `plain` if it is not transposed."""
    if len(operand.shape) < 2:
        return "only"
    return {"last": "last but one", "last but one": "last"}[plain] if operand.transposed else plain


def check_pair(a: Operand, b: Operand) -> None:
    """Check that two operands can be multiplied.

    Raises
    ------
    InputError
        If the inner dimensions differ, the batch dimensions do not broadcast, or one has CuPy blocks and the other
        NumPy blocks.
    """
    k_a, k_b = a.shape[-1], b.shape[-2] if len(b.shape) > 1 else b.shape[0]
    if k_a != k_b:
        raise InputError(
            f"{a.name} has shape {a.source.shape} and {b.name} {b.source.shape}: the {_inner(a, 'last')} dimension of "
            f"{a.name} ({k_a}) must equal the {_inner(b, 'last but one')} dimension of {b.name} ({k_b})"
        )
    try:
        np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise InputError(
            f"{a.name} has shape {a.shape} and {b.name} {b.shape}: "
            f"the batch dimensions {a.shape[:-2]} and {b.shape[:-2]} do not broadcast"
        ) from None
    check_kinds([a, b])


def with_itself(A: Any, trans: bool, hermitian: bool, name: str = "A") -> tuple[Operand, Operand, Symmetry]:
    """Return both operands of a symmetric product, and its kind of symmetry."""
    a = wrap(A, name, trans)
    if len(a.shape) < 2:
        raise InputError(f"{name} has shape {a.shape}: give a matrix, to multiply it by its own transpose")
    return a, replace(a, transposed=not trans), "hermitian" if hermitian and a.dtype.kind == "c" else "symmetric"


def pair(
    A: Any, B: Any, transa: bool, transb: bool, hermitian: bool = True, names: tuple[str, str] = ("A", "B")
) -> tuple[Operand, Operand, Symmetry | None]:
    """Return both operands of a product, and its kind of symmetry if B is None: A by its own transpose."""
    if B is None:
        return with_itself(A, transa, hermitian, names[0])
    a, b = wrap(A, names[0], transa), wrap(B, names[1], transb)
    check_pair(a, b)
    return a, b, None


def is_transpose(a: Operand, b: Operand) -> bool:
    """Whether B is the transpose of A, so that ``A @ B`` is symmetric."""
    return (same if a.transposed != b.transposed else transposes)(a.source, b.source)


def symmetry_of(a: Operand, b: Operand, choices: Choices) -> Symmetry | None:
    """Return "symmetric" for Dask's ``X.T @ X`` and ``X @ X.T`` on GPUs if C is one block, as for a tall X.

    Such products take half of the operations, which NumPy finds out by itself on CPUs. Not if the caller has chosen
    blocks, which need not be alike along m and n, and not with `reproducible`: the product of other arrays with the
    same elements would have other bits.
    """
    planned = choices.plan.problem.symmetry if isinstance(choices.plan, Plan) else choices.plan is None
    free = planned and choices.blocks is None and not choices.reproducible
    tall = a.kind == "cupy" and a.chunks is not None and len(a.shape) == 2 and len(a.chunks[0]) == 1
    return "symmetric" if free and tall and is_transpose(a, b) else None


def check_added(a: Operand, c: Operand | None, shape: tuple[int, ...]) -> None:
    """Refuse a C of ``beta * C`` that does not broadcast to the product's shape, or has other blocks than A."""
    if c is None:
        return
    check_kinds([a, c])
    try:
        fits = np.broadcast_shapes(c.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise InputError(f"C has shape {c.shape}, the product {shape}: give a C that broadcasts to the product's shape")
