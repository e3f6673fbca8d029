"""The public functions `matmul` and `gram`, for arrays of any package: each goes to the module of its package."""

from __future__ import annotations

from typing import Any

from distmm_kernels.arrays import packages
from distmm_kernels.arrays.products import Options


def matmul(
    a: Any,
    b: Any,
    out: Any = None,
    *,
    precision: str = "highest",
    alpha: complex = 1,
    beta: complex | None = None,
    c: Any = None,
    reproducible: bool = False,
    device: Any = None,
) -> Any:
    """Compute ``alpha * a @ b + beta * c`` for arrays of this process, at once.

    Shapes, broadcasting of batch dimensions and vectors follow `numpy.matmul`; strides are any. Arrays on a GPU are
    multiplied there, in the current stream of their package: PyTorch's, or CuPy's for CuPy, Numba, JAX and others. The
    call returns when the work is enqueued. A kernel that chooses its algorithm by the data (large float32, float64 and
    complex products at "highest") waits until the GPU has looked at the operands, and not for the product.

    Parameters
    ----------
    a : array of shape (..., m, k) or (k,)
        Of PyTorch, CuPy, NumPy, JAX or Numba, or of another package with DLPack and ``__array_namespace__``.
    b : array of shape (..., k, n) or (k,)
        Of the same package, on the same device.
    out : array, optional
        Receives the product and is returned. It may have a wider type: a product of int8 in an int32 `out` does not
        wrap around, and one of bfloat16 in a float32 `out` is not rounded. It may be `c`, and may share memory with `a`
        and `b`.
    precision : {"highest", "high", "medium", "ieee"}
        As in `distmm_kernels.select.select`.
    alpha, beta : scalars
        `beta` is 1 by default if `c` is given.
    c : array, optional
        Broadcasts to the product. A product of integers takes no floats, and one of real numbers no complex ones.
    reproducible : bool
        Whether bits must not depend on cuts of k, nor the kernel on sizes.
    device : str or Device, optional
        For NumPy arrays: "cpu" (default), "cuda" or "cuda:1".

    Returns
    -------
    array
        Of the package of `a`, on its device, contiguous unless it is `out`. PyTorch computes its gradients, and
        ``torch.compile`` traces it as the operator ``distmm::matmul``.

    Raises
    ------
    TypeError
        If the arrays are of different packages, if `out` or the product cannot hold the numbers, and if alpha or beta
        is no number.
    ValueError
        If shapes or devices do not match, or a keyword has a value that is not allowed.

    Examples
    --------
    >>> import numpy as np
    >>> from distmm_kernels import matmul
    >>> matmul(np.eye(2), np.array([[1.0, 2.0], [3.0, 4.0]]), alpha=2)
    array([[2., 4.],
           [6., 8.]])
    """
    multiply = packages.multiply_of(a, b, c, out, device)
    return multiply(a, b, out, c, Options(alpha, _beta(beta, c), precision, reproducible))


def gram(
    a: Any,
    out: Any = None,
    *,
    precision: str = "highest",
    alpha: complex = 1,
    beta: complex | None = None,
    c: Any = None,
    reproducible: bool = False,
    device: Any = None,
) -> Any:
    """Compute ``alpha * a @ a.conj().T + beta * c`` for an array of this process, at once.

    The result is exactly symmetric, or Hermitian: it is computed on and below the diagonal, and mirrored. As in BLAS's
    SYRK and HERK, the elements of `c` above the diagonal are not used.

    Parameters
    ----------
    a : array of shape (..., m, k)
        As in `matmul`. For ``a.T @ a`` give the transpose, which is a view.
    out, precision, alpha, beta, c, reproducible, device
        As in `matmul`.

    Returns
    -------
    array of shape (..., m, m)
        As in `matmul`.

    Raises
    ------
    ValueError
        As in `matmul`, and for an array of fewer than two dimensions.

    Examples
    --------
    >>> import numpy as np
    >>> from distmm_kernels import gram
    >>> gram(np.array([[1.0, 2.0], [3.0, 4.0]]))
    array([[ 5., 11.],
           [11., 25.]])
    """
    turned = packages.adjoint(a)
    multiply = packages.multiply_of(a, turned, c, out, device)
    return multiply(a, turned, out, c, Options(alpha, _beta(beta, c), precision, reproducible, "hermitian"))


def _beta(beta: complex | None, c: Any) -> complex:
    """Return beta, which is 1 by default if there is a C."""
    if beta is None:
        return 0 if c is None else 1
    if c is None and beta != 0:
        raise ValueError(f"beta is {beta}, but there is no c: give c, or leave beta out")
    return beta
