"""The epilogue of a chain of products: scale, add, cast, and make blocks of symmetric products symmetric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distmm.planning.problem import Symmetry
from distmm.worker import gpu

if TYPE_CHECKING:
    from distmm_kernels.kernel import Kernel

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


def last_product(kernel: Kernel, a: Any, b: Any, c: Block | None, epilogue: Epilogue, c0: Block | None) -> Block:
    """Add the product of two prepared operands to `c`, and apply the epilogue, in one launch where the kernel can."""
    c0, factors = _addend(epilogue, c0), {"alpha": epilogue.alpha, "beta": epilogue.beta}
    d = kernel.multiply(a, b, c, **factors, c0=c0, dtype=epilogue.dtype, symmetry=epilogue.symmetry, wait=False)
    return _conjugated(d, epilogue)


def finish(kernel: Kernel, d: Block, epilogue: Epilogue, c0: Block | None) -> Block:
    """Apply the epilogue to a block of accumulators, into a new block."""
    factors = epilogue.alpha, epilogue.beta
    d = kernel.finish(d, *factors, _addend(epilogue, c0), epilogue.dtype, epilogue.symmetry)
    return _conjugated(d, epilogue)


def _addend(epilogue: Epilogue, c0: Block | None) -> Block | None:
    """Return what is added before the sum is conjugated."""
    return c0.conj() if epilogue.conjugate and c0 is not None else c0


def flipped(block: Block, symmetry: Symmetry) -> Block:
    """Return the transpose ``(*batch, n, m)`` of a block, as a view, or its conjugate transpose."""
    turned = block.swapaxes(-1, -2)
    return turned.conj() if symmetry == "hermitian" else turned


def _conjugated(block: Block, epilogue: Epilogue) -> Block:
    """Conjugate a new block in its own memory, if the epilogue says so."""
    if epilogue.conjugate:
        gpu.namespace(block).conjugate(block, out=block)
    return block
