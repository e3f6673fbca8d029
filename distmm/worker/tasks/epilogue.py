"""The epilogue of a chain of products: scale, add, cast, and make blocks of symmetric products symmetric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distmm.planning.problem import Symmetry
from distmm.worker import gpu

if TYPE_CHECKING:
    from distmm_kernels.kernel import Kernel

__all__ = ["DIAGONAL_TILE", "Block", "Epilogue", "finish", "flipped", "last_product"]

# Edge of the tiles on the diagonal whose upper half is chosen element by element, with a mask; the rest is copied.
DIAGONAL_TILE = 256

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
    return _symmetric(kernel.multiply(a, b, c, **factors, c0=c0, dtype=epilogue.dtype, wait=False), epilogue)


def finish(kernel: Kernel, d: Block, epilogue: Epilogue, c0: Block | None) -> Block:
    """Apply the epilogue to a block of accumulators, into a new block."""
    c0 = _addend(epilogue, c0)
    return _symmetric(kernel.finish(d, epilogue.alpha, epilogue.beta, c0, epilogue.dtype), epilogue)


def _addend(epilogue: Epilogue, c0: Block | None) -> Block | None:
    """Return what is added before the sum is conjugated."""
    return c0.conj() if epilogue.conjugate and c0 is not None else c0


def flipped(block: Block, symmetry: Symmetry) -> Block:
    """Return the transpose ``(*batch, n, m)`` of a block, as a view, or its conjugate transpose."""
    turned = block.swapaxes(-1, -2)
    return turned.conj() if symmetry == "hermitian" else turned


def _symmetric(block: Block, epilogue: Epilogue) -> Block:
    """Do to a new block, in its own memory, what an epilogue says of symmetric products."""
    if epilogue.conjugate:
        gpu.namespace(block).conjugate(block, out=block)
    if epilogue.symmetry is not None:
        # Real numbers as words of their size: the libraries need not know how to choose between bfloat16 values.
        _symmetrize(block if block.dtype.kind == "c" else block.view(f"u{block.itemsize}"), epilogue.symmetry)
    return block


def _symmetrize(block: Block, symmetry: Symmetry) -> None:
    """Overwrite the upper half of a new block ``(*batch, m, m)`` by its lower half.

    ``A[i] @ A[i].T`` is symmetric, but kernels need not add the terms of its two halves in the same way: the bits would
    differ. The diagonal of ``A[i] @ A[i].conj().T`` is real, but rounding may leave imaginary parts: they are set to 0,
    as BLAS's HERK does.
    """
    size = block.shape[-1]
    if size > DIAGONAL_TILE:
        half = size // 2
        block[..., :half, half:] = flipped(block[..., half:, :half], symmetry)
        _symmetrize(block[..., :half, :half], symmetry)
        _symmetrize(block[..., half:, half:], symmetry)
        return
    library = gpu.namespace(block)
    below = library.tri(size, k=-1, dtype=bool)
    diagonal = block.real if symmetry == "hermitian" else block
    block[...] = library.where(below, block, library.where(below.T, flipped(block, symmetry), diagonal))
