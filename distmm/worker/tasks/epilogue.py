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
    """

    dtype: np.dtype
    kind: Literal["numpy", "cupy"]
    alpha: complex = 1
    beta: complex = 0
    conjugate: bool = False
    symmetry: Symmetry | None = None


def applied(epilogue: Epilogue, step: Callable[..., Block], c0: Block | None) -> Block:
    """Return the new block of a chain's last step: that of `Kernel.multiply` or `Kernel.finish`, without the factors.

    The kernel applies the epilogue, in one launch where it can. What is added is conjugated before the sum is.
    """
    c0 = c0.conj() if epilogue.conjugate and c0 is not None else c0
    block = step(alpha=epilogue.alpha, beta=epilogue.beta, c0=c0, dtype=epilogue.dtype, symmetry=epilogue.symmetry)
    if epilogue.conjugate:
        gpu.namespace(block).conjugate(block, out=block)
    return block


def flipped(block: Block, symmetry: Symmetry) -> Block:
    """Return the transpose ``(*batch, n, m)`` of a block, as a view, or its conjugate transpose."""
    turned = block.swapaxes(-1, -2)
    return turned.conj() if symmetry == "hermitian" else turned
