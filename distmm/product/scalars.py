"""Checks of scalars and flags, and the result type of operands and scalars."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from distmm.errors import InputError
from distmm.planning.problem import result_type
from distmm.units import whole


def check_flags(**flags: Any) -> None:
    """Refuse flags that are neither True nor False. BLAS's letter "N" would otherwise count as true.

    Raises
    ------
    InputError
        With the name and the value of the flag.
    """
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise InputError(f"{name} is {value!r}: give True or False (BLAS's 'T' is True, its 'N' False)")


def check_scalars(**scalars: Any) -> None:
    """Refuse scalars that are not numbers of Python or NumPy.

    Raises
    ------
    InputError
        With the name, the value and the type of the scalar.
    """
    for name, value in scalars.items():
        if not isinstance(value, (int, float, complex, np.number, np.bool_)):
            raise InputError(
                f"{name} is {value!r}, a {type(value).__name__}: it must be a number, int, float or complex; convert "
                f"it, for example with float({name})"
            )


def checked_seed(seed: Any) -> int:
    """Check the seed of a check, and return it as an int.

    Raises
    ------
    InputError
        If it is not a whole number of 0 or more.
    """
    if (found := whole(seed)) is None or found < 0:
        raise InputError(f"seed is {seed!r}: give a whole number of 0 or more")
    return found


def plain(value: Any) -> Any:
    """Return a NumPy scalar as Python's number of the same value. Other values are returned unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def common_type(operands: Mapping[str, np.dtype[Any]], **scalars: Any) -> np.dtype[Any]:
    """Return NumPy's result type of operands and scalars. Both have names, for messages.

    Python's scalars are weak, as in NumPy 2 (NEP 50). That also holds for bfloat16. NumPy itself returns float64 there,
    because it does not recognise bfloat16 as a floating-point type. The scalars 0 and 1 do not change the type. 8-bit
    floats count as float32.

    Raises
    ------
    InputError
        For scalars that are not numbers, and for types without a common type in NumPy.
    """
    check_scalars(**scalars)
    try:
        return _common_type(tuple(operands.values()), *(x for x in scalars.values() if x not in (0, 1)))
    except TypeError:
        types = ", ".join(f"{name} is {given}" for name, given in operands.items())
        raise InputError(
            f"{types}: NumPy has no type for the product; convert one first, for example with .astype('float32')"
        ) from None


@lru_cache(maxsize=256, typed=True)
def _common_type(operands: tuple[np.dtype[Any], ...], *scalars: Any) -> np.dtype[Any]:
    weak = {type(x) for x in scalars} & {int, float, complex}  # not subclasses: numpy.float64 is one of float
    strong = result_type(*operands, *(x for x in scalars if type(x) not in weak))
    if strong == ml_dtypes.bfloat16:
        return np.result_type(strong, np.complex64) if complex in weak else strong
    return np.result_type(strong, *(x for x in scalars if type(x) in weak))


def check_represents(dtype: np.dtype[Any], **scalars: Any) -> None:
    """Refuse Python integers that this type cannot represent, as NumPy does. They would wrap around.

    Raises
    ------
    InputError
        With the name and the value of the scalar.
    """
    for name, value in scalars.items():
        if type(value) is not int:
            continue
        try:
            np.asarray(value, dtype if dtype.kind in "iu" else np.float64)  # larger floats become infinite
        except OverflowError:
            raise InputError(
                f"{name} is {value}, and the product {dtype}, which cannot represent it: convert an operand to a wider "
                f"type first, for example with .astype('int64')"
            ) from None
