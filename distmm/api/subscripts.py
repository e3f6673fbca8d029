"""Parses the subscripts of `einsum` by NumPy's rules, and checks them against the shapes of the operands."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from types import EllipsisType
from typing import Any, SupportsIndex

import numpy as np

from distmm.errors import InputError
from distmm.product.labelled import Label

__all__ = ["Subscripts", "as_written", "read"]

Labels = tuple[Label, ...]
Term = list["str | int | EllipsisType"]  # indices of one array, as the user wrote them


@dataclass(frozen=True)
class Subscripts:
    """Indices of the operands and of the result.

    Attributes
    ----------
    operands : tuple of tuple
        A label for each dimension: a letter, or a number of the interleaved form. Dimensions of an ellipsis have
        negative numbers; the last one has -1.
    output : tuple
    sizes : dict
        Length of each label. An operand's dimension has this length, or length 1 if it broadcasts.
    """

    operands: tuple[Labels, ...]
    output: Labels
    sizes: dict[Label, int]


def as_written(arguments: Sequence[Any]) -> tuple[list[Term], Term | None, list[Any]]:
    """Split the arguments of `einsum`: indices of the operands, indices of the result or None, and the operands.

    Raises
    ------
    InputError
        For invalid subscripts, and for another number of operands than the subscripts have.
    """
    if not arguments:
        raise InputError("einsum has no arguments: give subscripts such as 'ij,jk->ik', and the operands")
    if isinstance(arguments[0], str):
        text, operands = arguments[0], list(arguments[1:])
        left, arrow, right = text.partition("->")
        terms = [_letters(term, f"operand {number}", text) for number, term in enumerate(left.split(","))]
        output = _letters(right, "the output", text) if arrow else None
    else:
        operands = list(arguments[: len(arguments) // 2 * 2 : 2])
        terms = [_numbers(x, f"operand {number}") for number, x in enumerate(arguments[1::2])]
        output = _numbers(arguments[-1], "the output") if len(arguments) % 2 else None
    if len(terms) != len(operands):
        given = f"{len(operands)} operand{'' if len(operands) == 1 else 's'}"
        raise InputError(
            f"the subscripts {arguments[0]!r} are for {len(terms)} operands, and einsum got {given}: give one operand "
            "for each term between commas"
        )
    return terms, output, operands


def _letters(text: str, what: str, whole: str) -> Term:
    tokens = re.findall(r"\.\.\.|\S", text)
    for token in tokens:
        if token != "..." and not re.fullmatch("[A-Za-z]", token):
            raise InputError(
                f"{token!r} in the subscripts of {what}, {text!r} of {whole!r}: indices are letters, or ..."
            )
    return [... if token == "..." else token for token in tokens]


def _numbers(given: Any, what: str) -> Term:
    if not isinstance(given, (list, tuple)):
        raise InputError(
            f"the indices of {what} are {given!r}: give subscripts such as 'ij,jk->ik' first, or a list of whole "
            "numbers after each operand"
        )
    for label in given:
        whole = isinstance(label, SupportsIndex) and not isinstance(label, (bool, np.bool_))
        if label is not Ellipsis and not (whole and index(label) >= 0):
            raise InputError(f"{label!r} in the indices of {what}: they are whole numbers from 0, or Ellipsis")
    return [label if label is Ellipsis else index(label) for label in given]


def read(terms: Sequence[Term], output: Term | None, shapes: Sequence[tuple[int, ...]]) -> Subscripts:
    """Label each dimension, and check the lengths of the labels.

    Raises
    ------
    InputError
        With index, operand and shape.
    """
    operands = tuple(
        _labels(term, shape, number) for number, (term, shape) in enumerate(zip(terms, shapes, strict=True))
    )
    sizes = _sizes(operands, shapes)
    ellipsis = sorted({label for labels in operands for label in labels if isinstance(label, int) and label < 0})
    if output is None:
        counts = Counter(label for term in terms for label in term if label is not Ellipsis)
        once: list[Any] = [label for label, count in counts.items() if count == 1]
        return Subscripts(operands, (*ellipsis, *sorted(once)), sizes)
    for label, count in Counter(output).items():
        if count > 1:
            raise InputError(f"index {_name(label)} occurs {count} times in the output: use it once")
        if label is not Ellipsis and label not in sizes:
            have = ", ".join(
                f"operand {n} of shape {shape}: {_text(term)}"
                for n, (term, shape) in enumerate(zip(terms, shapes, strict=True))
            )
            raise InputError(f"index {_name(label)} of the output is in no operand ({have}): use an operand's index")
    if ellipsis and Ellipsis not in output:
        number = next(n for n, labels in enumerate(operands) if ellipsis[0] in labels)
        raise InputError(
            f"the ellipsis of operand {number}, of shape {shapes[number]}, stands for "
            f"{len(ellipsis)} dimension{'s' * (len(ellipsis) > 1)}, and the output {_text(output)} has no ...: add it"
        )
    return Subscripts(operands, tuple(_expanded(output, ellipsis)), sizes)


def _labels(term: Term, shape: tuple[int, ...], number: int) -> Labels:
    """Return a label for each dimension of an operand."""
    ellipses = term.count(Ellipsis)
    if ellipses > 1:
        raise InputError(
            f"operand {number}, of shape {shape}, has {ellipses} ellipses in {_text(term)}: one is allowed"
        )
    hidden = len(shape) - (len(term) - ellipses)
    if hidden < 0 or (hidden and not ellipses):
        raise InputError(
            f"operand {number} has shape {shape}, {len(shape)} dimensions, and its subscripts {_text(term)} name "
            f"{len(term) - ellipses}: give one index for each dimension, or an ellipsis"
        )
    return tuple(_expanded(term, range(-hidden, 0)))


def _expanded(term: Term, ellipsis: Sequence[int]) -> list[Label]:
    return [label for index in term for label in (ellipsis if index is Ellipsis else (index,))]


def _sizes(operands: Sequence[Labels], shapes: Sequence[tuple[int, ...]]) -> dict[Label, int]:
    """Return the length of each label: NumPy broadcasts dimensions of length 1 of different operands."""
    sizes: dict[Label, int] = {}
    origin: dict[Label, int] = {}
    for number, (labels, shape) in enumerate(zip(operands, shapes, strict=True)):
        own: dict[Label, int] = {}
        for label, n in zip(labels, shape, strict=True):
            if own.setdefault(label, n) != n:
                raise InputError(
                    f"index {_name(label)} occurs twice in operand {number}, of shape {shape}, with lengths "
                    f"{own[label]} and {n}: a diagonal needs dimensions of the same length"
                )
            if sizes.get(label, 1) == 1:
                sizes[label], origin[label] = n, number
            elif n not in (1, sizes[label]):
                first = origin[label]
                raise InputError(
                    f"index {_name(label)} has length {sizes[label]} in operand {first}, of shape {shapes[first]}, and "
                    f"{n} in operand {number}, of shape {shape}: the lengths must be equal, or 1"
                )
    return sizes


def _name(label: Any) -> str:
    return (
        "..."
        if label is Ellipsis
        else f"{label} of the ellipsis"
        if isinstance(label, int) and label < 0
        else repr(label)
    )


def _text(term: Term) -> str:
    """Write indices as the user wrote them."""
    if all(isinstance(index, str) or index is Ellipsis for index in term):
        return repr("".join("..." if index is Ellipsis else str(index) for index in term))
    return str(["..." if index is Ellipsis else index for index in term])
