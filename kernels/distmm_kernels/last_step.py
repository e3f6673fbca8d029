"""The last step of a chain, ``alpha * (c + a @ b) + beta * c0``: its factors and their checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from distmm_kernels.config import FLOAT8
from distmm_kernels.symmetric import Array, Symmetry


class Last(NamedTuple):
    """The last step of a chain, whose result is ``alpha * (c + a @ b) + beta * c0``.

    ``c0`` is None, or broadcasts to the result, and has any type, strides and values. ``dtype`` is the result's type.
    """

    alpha: Any
    beta: Any
    c0: Array | None
    dtype: np.dtype[Any]

    @classmethod
    def of(
        cls,
        alpha: complex,
        beta: complex,
        c0: Array | None,
        dtype: np.dtype[Any],
        accumulator: np.dtype[Any],
        symmetry: Symmetry | None = None,
    ) -> Last:
        """Make the step, with factors of the accumulator's type, after the checks of `Kernel.finish`."""
        factors = ("alpha", alpha), ("beta", beta)
        for name, factor in factors:
            if not isinstance(factor, (int, float, complex, np.number, np.bool_)):
                raise TypeError(f"{name} is {factor!r}: give a number")
            if symmetry == "hermitian" and factor.imag:
                raise ValueError(f"{name} is {factor}, and a Hermitian product needs a real {name}: give a real number")
        if dtype in FLOAT8:
            raise TypeError(f"a result cannot be {dtype}: ask for float32, float16 or bfloat16, and convert it")
        first, second = (_scalar(*each, dtype, accumulator) for each in factors)
        if second != 0 and c0 is None:
            raise ValueError(f"beta is {second}, so c0 is needed: give it, or beta=0")
        if c0 is not None and second != 0 and not np.can_cast(c0.dtype, accumulator, "same_kind"):
            raise TypeError(f"c is {c0.dtype}, the product {dtype}, which would lose a part of it: convert c first")
        return cls(first, second, c0, dtype)

    @property
    def plain(self) -> bool:
        """Whether nothing is multiplied or added."""
        return bool(self.alpha == 1 and self.beta == 0)


def _scalar(name: str, value: complex, out_dtype: np.dtype[Any], dtype: np.dtype[Any]) -> Any:
    """Return the factor in the accumulator's type; raise ValueError if that could change the result."""
    if dtype.kind == "c":
        return dtype.type(value)
    if isinstance(value, (complex, np.complexfloating)):
        raise ValueError(f"{name} is {value}, but the product is {dtype}: give a real number")
    if dtype.kind == "f":
        return dtype.type(value)
    ranges = [np.iinfo(dtype)] + ([np.iinfo(out_dtype)] if out_dtype.kind in "iu" else [])
    if value % 1 != 0 or not any(r.min <= value <= r.max for r in ranges):  # NaN and infinity fail the first
        raise ValueError(f"{name} is {value}, but the product is {out_dtype}: give an integer in its range")
    return np.array(int(value) & 2 ** (8 * dtype.itemsize) - 1).astype(dtype)[()]  # modulo 2^bits
