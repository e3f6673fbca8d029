"""What a reduction asks of its product, and the memory that its results take. Needs no Dask array and no cluster."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from distmm.errors import InputError
from distmm.planning.plan import Plan
from distmm.product.operand import Operand
from distmm.product.scalars import check_scalars
from distmm.units import whole
from distmm.worker.tasks.metrics import METRICS

# The elements kept of a block may take this share of the block's bytes, and more of a small block.
SHARE = 1 / 4


def check_ordered(dtype: np.dtype[Any], wanted: str) -> None:
    """Refuse a product of complex numbers. `wanted` names the result that needs an order.

    Raises
    ------
    InputError
        With the type of the product.
    """
    if dtype.kind == "c":
        raise InputError(
            f"the product is {dtype}, and complex numbers have no order, so no {wanted}: give real operands"
        )


def check_metric(metric: Any, *operands: Operand) -> None:
    """Refuse unknown metrics, and integer operands, whose products may wrap around.

    Raises
    ------
    InputError
        With the metric, or with the type of the operand.
    """
    if not isinstance(metric, str) or metric not in METRICS:
        raise InputError(f"metric {metric!r} is not one of {', '.join(METRICS)}")
    for x in operands:
        if x.dtype.kind in "biuc":
            raise InputError(
                f"{x.name} is {x.dtype}: a metric needs real floating-point numbers, as {x.name}.astype('float32')"
            )


def checked_k(k: Any, n: int, what: str) -> int:
    """Check the caller's k against n, and return it as an int.

    Parameters
    ----------
    k : Any
    n : int
        Largest allowed value.
    what : str
        Text for the message that says where ``{n}`` comes from.

    Raises
    ------
    InputError
        With k and n.
    """
    if (found := whole(k)) is None or not 1 <= found <= n:
        allowed = f"give a whole number from 1 to {n}" if n else "there is nothing to choose from"
        raise InputError(f"k is {k!r}, and {what.format(n=n)}: {allowed}")
    return found


def check_threshold(t: Any, most: Any, metric: str | None) -> None:
    """Check the arguments of `threshold`.

    Raises
    ------
    InputError
        For a `t` that is not a real number, for a negative distance, and for a `most` that is not a number of elements.
    """
    check_scalars(t=t)
    if isinstance(t, (complex, np.complexfloating)) or t != t:
        raise InputError(f"t is {t!r}: give a real number")
    try:
        float(t)
    except OverflowError:
        raise InputError(
            f"t is an integer of {t.bit_length()} bits, beyond all types of elements: give one below 1.7e308"
        ) from None
    if metric == "euclidean" and t < 0:
        raise InputError(f"t is {t!r}, and no Euclidean distance is negative: give 0 or more")
    if most is not None and ((found := whole(most)) is None or found < 0):
        raise InputError(f"most is {most!r}: give the largest number of elements to keep, a whole number of 0 or more")


def bytes_of_entry(dtype: np.dtype[Any]) -> int:
    """Return the bytes of one kept element: its row, its column and its value of this type."""
    return 2 * np.dtype(np.int64).itemsize + dtype.itemsize


def most_of_block(plan: Plan, dtype: np.dtype[Any], always: int) -> int:
    """Return how many elements of type `dtype` may be kept of a block; a small block may always keep `always` bytes."""
    each, elements = bytes_of_entry(dtype), math.prod(plan.block_shape[::2])
    return int(max(elements * dtype.itemsize * SHARE, min(always, elements * each))) // each


def bytes_widened(plan: Plan) -> int:
    """Return the bytes by which the blocks of a wave exceed those planned, if they have the accumulator's type."""
    more = plan.problem.accumulator_bytes - plan.problem.dtype.itemsize
    return max(wave.c_blocks for wave in plan.waves) * math.prod(plan.block_shape[::2]) * more
