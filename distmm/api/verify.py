"""The public function `verify`: checks a product by Freivalds' test, or by a full comparison for small sizes."""

from __future__ import annotations

from typing import Any, Literal

from distmm.checking.verdict import Verdict
from distmm.planning.precision import Precision
from distmm.product.operand import wrap
from distmm.product.verification import verdict


def verify(
    A: Any,
    B: Any,
    C: Any,
    *,
    check: Literal["freivalds", "full"] = "freivalds",
    seed: int | None = None,
    transa: bool = False,
    transb: bool = False,
    alpha: complex = 1,
    precision: Precision | None = None,
) -> Verdict:
    """Check that ``C = alpha * op(A) @ op(B)``. Any program may have computed C.

    Parameters
    ----------
    A : array-like of shape (m, k), or (k, m) with `transa`
        A Dask, NumPy or CuPy array, or a Zarr-like object. Each matrix is read once, block by block. It is read twice
        if the columns of B differ much in size, or if elements are near the limits of float64's range. B is read once
        more if rows of C stand out.
    B : array-like of shape (k, n), or (n, k) with `transb`
        As `A`.
    C : array-like of shape (m, n)
        As `A`.
    check : {"freivalds", "full"}
        "freivalds": compare ``A (B x)`` with ``C x`` for random vectors x, in O(n^2) operations. "full": compare every
        element with a float64 product, for small sizes.
    seed : int, optional
        Seed of the random vectors, at least 0. By default a random one. The verdict names it, so that a check can be
        repeated.
    transa, transb : bool
        Use the transpose of A or B.
    alpha : scalar
        Factor of the product. With 0, A and B are not read, as in `distmm.gemm`.
    precision : {"highest", "ieee", "high", "medium"}, optional
        The precision that C was computed with. "high" and "medium" allow larger errors, because they round the
        operands. By default as in `matmul`.

    Returns
    -------
    Verdict
        ``bool(verdict)`` is True only if C is right. The outcome is "cannot tell" if C has inf or NaN, and the order
        of a sum decides whether the sum overflows.

    Raises
    ------
    InputError
        If the shapes do not match, a full check would be too large, or an argument has a value that is not allowed.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B = np.ones((30, 40)), np.ones((40, 50))
    >>> C = A @ B
    >>> distmm.verify(A, B, C).outcome
    'right'
    >>> C[2, 3] = 41
    >>> bool(distmm.verify(A, B, C))
    False
    """
    a, b, c = wrap(A, "A", transa), wrap(B, "B", transb), wrap(C, "C")
    return verdict(a, b, c, check=check, seed=seed, alpha=alpha, precision=precision)
