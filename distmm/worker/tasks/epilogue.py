"""The epilogue of a chain of products: scale, add, cast, and make blocks of symmetric products symmetric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from distmm.planning.problem import Symmetry
from distmm.worker import gpu

Block = Any  # a NumPy or CuPy array


@dataclass(frozen=True)
class Epilogue:
    """What the last step of a chain does: ``alpha * D + beta * C0``, cast to `dtype`, as a NumPy or CuPy block.

    Two fields are for symmetric products. With `conjugate` the result is conjugated: ``A.conj().T @ A`` is made of
    blocks of ``A.T``, whose Hermitian product is its conjugate. On the diagonal, `symmetry` is the product's: the upper
    half of such a block becomes the mirror image of its lower half.

    `dropped` are the axes, -2 or -1, that C lacks because A or B is a vector. Finished blocks lack them, too.
    """

    dtype: np.dtype
    kind: Literal["numpy", "cupy"]
    alpha: complex = 1
    beta: complex = 0
    conjugate: bool = False
    symmetry: Symmetry | None = None
    dropped: tuple[int, ...] = ()


def of_c(by_dimension: tuple[Any, ...], dropped: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the values of ``(*batch, m, n)`` without those of the axes that C lacks (`Epilogue.dropped`)."""
    *batch, m, n = by_dimension
    return *batch, *(value for axis, value in ((-2, m), (-1, n)) if axis not in dropped)


def of_matrix(by_dimension: tuple[Any, ...], dropped: tuple[int, ...], one: Any) -> tuple[Any, ...]:
    """Return values of C's dimensions as those of ``(*batch, m, n)``, with `one` for each axis that C lacks."""
    values = list(by_dimension)
    for axis in sorted(dropped, reverse=True):
        values.insert(len(values) + 1 + axis, one)
    return tuple(values)


def applied(epilogue: Epilogue, step: Callable[..., Block], c0: Block | None) -> Block:
    """Return the new block of a chain's last step: that of `Kernel.multiply` or `Kernel.finish`, without the factors.

    The kernel applies the epilogue, in one launch where it can. What is added is conjugated before the sum is.
    """
    c0 = c0.conj() if epilogue.conjugate and c0 is not None else c0
    c0 = c0.reshape(of_matrix(c0.shape, epilogue.dropped, 1)) if epilogue.dropped and c0 is not None else c0
    block = step(alpha=epilogue.alpha, beta=epilogue.beta, c0=c0, dtype=epilogue.dtype, symmetry=epilogue.symmetry)
    if epilogue.conjugate:
        gpu.namespace(block).conjugate(block, out=block)
    if not epilogue.dropped:
        return block
    # of NumPy arrays an index without an ellipsis makes a scalar, as a product of two vectors is
    return block[of_matrix((slice(None),) * (block.ndim - len(epilogue.dropped)), epilogue.dropped, 0)]


def flipped(block: Block, symmetry: Symmetry) -> Block:
    """Return the transpose ``(*batch, n, m)`` of a block, as a view, or its conjugate transpose."""
    turned = block.swapaxes(-1, -2)
    return turned.conj() if symmetry == "hermitian" else turned
