"""The public functions `matmul`, `gemm` and `gram`, for Dask, NumPy, CuPy, Zarr and similar arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distributed import Client

from distmm.api.operands import Operand, check_pair, wrap
from distmm.api.product import Gemm
from distmm.api.scalars import check_flags, check_scalars
from distmm.api.wishes import Wishes
from distmm.clusters import cluster
from distmm.errors import InputError
from distmm.planning.plan import Plan
from distmm.planning.precision import Precision
from distmm.planning.problem import Symmetry

__all__ = ["gemm", "gram", "matmul", "square", "with_itself"]


def matmul(
    A: Any,
    B: Any,
    *,
    precision: Precision | None = None,
    kernel: str | None = None,
    reproducible: bool | None = None,
    device: cluster.Device | None = None,
    blocks: tuple[int, int, int] | None = None,
    plan: Plan | str | None = None,
    out: Any = None,
    client: Client | None = None,
) -> Any:
    """Multiply two arrays of any size, block by block, on all workers.

    Shapes, broadcasting of batch dimensions, vectors and result types follow `numpy.matmul`. The product is lazy unless
    `out` is given. If C does not fit into the memory of the workers, it can still be read block by block, for example
    by ``C.sum()`` or ``da.topk(C, 10)``: blocks leave when they have been read, and further ones are made then.

    Parameters
    ----------
    A : array-like of shape (..., m, k) or (k,)
        A Dask array with NumPy or CuPy chunks, a NumPy or CuPy array, a memory map, or an object with ``shape``,
        ``dtype`` and ``__getitem__`` such as a Zarr array, which the workers read block by block. Chunks of a Dask
        array become blocks of the product. Operands are read when the product is computed: do not change them before.
        Arrays of other packages that lend their memory by DLPack (PyTorch, JAX) are taken where they lie, on the host
        or on a GPU, without a copy. Of an xarray object its ``data`` are taken, NumPy's or Dask's; names of dimensions
        and coordinates count for nothing. A lazily opened variable is read as a whole: open it with ``chunks={}``.
        A memory map is read from its file, and refused if another file has taken its place. A NumPy array with gaps
        between the elements of its rows and also of its columns is copied at the call.
    B : array-like of shape (..., k, n) or (k,)
        As `A`.
    precision : {"highest", "high", "medium", "ieee"}, optional
        Least accuracy of the product. "highest": no less accurate than arithmetic in the type of the operands.
        "high", "medium": float32 operands may be rounded to TF32 or bfloat16. "ieee": float32, float64 and complex
        products by chains of fused multiply-adds for each element, whose bits depend on no cuts. By default "highest",
        or what Dask's configuration has as ``distmm.precision``; the same holds for `kernel`, `reproducible` and
        `device`.
    kernel : str, optional
        Name of a kernel, such as "tiled" or "cublas"; by default the fastest one of the worker's device that keeps the
        precision.
    reproducible : bool, optional
        True: use a kernel that promises its bits, so that those of C do not depend on chunks, on the number of GPUs or
        on failures; refused where there is none, as for float products on CPUs. By default False: the fastest kernel,
        NVIDIA's library among them. The plan says which one that is, and whether its bits are promised.
    device : {"auto", "cpu", "gpu"}, optional
        Where to multiply; by default "auto": on GPUs where the chunks are CuPy's or every worker has a GPU.
    blocks : tuple of int, optional
        Block edges (m, k, n); by default the chunks of Dask arrays, else the plan chooses.
    plan : Plan or str, optional
        A plan that `distmm.plan` made for operands of these shapes, or the text of one:
        ``"g2x1x1 b8192x8192x8192 p1 w1 l2"``.
    out : numpy.ndarray, Zarr-like, DLPack or Dask array, optional
        Array that receives the product during this call, of its shape, in waves where C does not fit into the memory of
        the workers. Workers of this machine write into a NumPy array directly; `distmm.empty` makes arrays that GPUs
        write at full speed. Workers write whole ``chunks`` (or ``shards``) of a Zarr-like object in parallel; into an
        object without chunks, and into an HDF5 dataset, this process writes block after block. An array of another
        package is filled in its own memory, if that may be written. After the call, also after an error or Ctrl-C,
        nothing writes to it. A Dask array becomes the lazy product, and keeps its type and
        its chunks.
    client : distributed.Client, optional
        Cluster to plan for; by default Dask's current client. Without one the product runs on Dask's local schedulers.

    Returns
    -------
    dask.array.Array of shape (..., m, n)
        Lazy; its chunks are of the operands' kind (NumPy or CuPy). ``compute()`` makes a NumPy array, into which
        workers of this machine write as they do with `out`. With `out`: that array.

    Raises
    ------
    InputError
        If the operands cannot be multiplied, or an argument is none of those above; before any work.
    DoesNotFitError
        If the workers lack the memory; names the missing figure. Where C could only be read block by block, this error
        is raised when C is to stay on the workers (``persist``).

    See Also
    --------
    gemm : The product with factors, an addend and transposes.
    gram : The product of a matrix with its own transpose.
    multiply : The product of matrices on disk, as a job that can be resumed.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B = np.ones((3, 4)), np.ones((4, 5))
    >>> distmm.matmul(A, B).compute()[0]
    array([4., 4., 4., 4., 4.])
    """
    how: dict[str, Any] = {
        "precision": precision, "kernel": kernel, "reproducible": reproducible, "device": device, "blocks": blocks,
        "plan": plan,
    }  # fmt: skip
    return gemm(1, A, B, out=out, client=client, **how)


def gemm(
    alpha: complex,
    A: Any,
    B: Any,
    beta: complex = 0,
    C: Any = None,
    *,
    transa: bool = False,
    transb: bool = False,
    precision: Precision | None = None,
    kernel: str | None = None,
    reproducible: bool | None = None,
    device: cluster.Device | None = None,
    blocks: tuple[int, int, int] | None = None,
    plan: Plan | str | None = None,
    out: Any = None,
    client: Client | None = None,
) -> Any:
    """Compute ``alpha * op(A) @ op(B) + beta * C`` as BLAS's GEMM does, into a new array.

    Parameters
    ----------
    alpha : scalar
        Factor of the product.
    A : array-like of shape (..., m, k), or (..., k, m) with `transa`
        As in `matmul`.
    B : array-like of shape (..., k, n), or (..., n, k) with `transb`
        As in `matmul`.
    beta : scalar
        Factor of `C`. With 0, `C` is not read.
    C : array-like, optional
        Addend; it must broadcast to shape (..., m, n). A NumPy array in memory may be `out`, too. Workers of a cluster
        then read a copy, made at the call: a task that runs again after a failure must find what was there before.
    transa, transb : bool
        Use the transpose of A or B (of the last two dimensions), without a copy.
    precision, kernel, reproducible, device, blocks, plan, out, client
        As in `matmul`.

    Returns
    -------
    dask.array.Array of shape (..., m, n)
        Lazy; with `out`: that array.

    Raises
    ------
    InputError
        As in `matmul`, and for a `beta` without `C`.
    DoesNotFitError
        As in `matmul`.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B, C = np.ones((4, 3)), np.ones((4, 5)), np.ones((3, 5))
    >>> distmm.gemm(2, A, B, -1, C, transa=True).compute()[0]
    array([7., 7., 7., 7., 7.])
    """
    a, b = wrap(A, "A", transa), wrap(B, "B", transb)
    check_pair(a, b)
    check_scalars(alpha=alpha, beta=beta)
    product = Gemm.of(a, b, alpha=alpha, beta=beta, c=_addend(beta, C))
    return product.array(Wishes.chosen(precision, kernel, device, blocks, plan, reproducible=reproducible), out, client)


def _addend(beta: complex, C: Any) -> Operand | None:
    """Return C where it counts."""
    if beta != 0 and C is None:
        raise InputError(f"beta is {beta}, but there is no C: give C, or leave beta at 0")
    return wrap(C, "C") if beta != 0 else None


def gram(
    A: Any,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    C: Any = None,
    trans: bool = False,
    hermitian: bool = True,
    precision: Precision | None = None,
    kernel: str | None = None,
    reproducible: bool | None = None,
    device: cluster.Device | None = None,
    blocks: tuple[int, int] | None = None,
    plan: Plan | str | None = None,
    out: Any = None,
    client: Client | None = None,
) -> Any:
    """Multiply a matrix by its own transpose, ``alpha * A @ A.conj().T + beta * C``, as BLAS's SYRK and HERK do.

    Only the blocks on and below the diagonal are multiplied, which takes half of the operations. Each block of A is
    read once, and sent to a worker once. The blocks above the diagonal are views of the others on the same workers (for
    complex numbers, conjugates). C is symmetric, or Hermitian, to the bit.

    Parameters
    ----------
    A : array-like of shape (..., m, k)
        As in `matmul`.
    alpha : scalar
        Factor of the product; real where it is Hermitian.
    beta : scalar
        Factor of `C`; real where the product is Hermitian. With 0, `C` is not read.
    C : array-like of shape (..., m, m), optional
        Addend, symmetric or Hermitian as the product is: as in BLAS, only its elements on and below the diagonal count.
        It may be `out`, as in `gemm`: ``gram(X, trans=True, beta=1, C=S, out=S)`` adds ``X.conj().T @ X`` to S.
    trans : bool
        Compute ``A.conj().T @ A``, of shape (..., k, k).
    hermitian : bool
        For complex numbers: True uses the conjugate transpose, as HERK does; False the transpose, as SYRK does.
    precision, kernel, reproducible, device
        As in `matmul`.
    blocks : tuple of int, optional
        Block edges (m, k) of A, or of its transpose with `trans`; by default the chunks of a Dask array, else the plan
        chooses.
    plan : Plan or str, optional
        A plan that ``distmm.plan(A)`` made, or the text of one.
    out, client
        As in `matmul`.

    Returns
    -------
    dask.array.Array of shape (..., m, m)
        Lazy; with `out`: that array.

    Raises
    ------
    InputError
        As in `gemm`, for a vector, for a `C` that is not square, and for a complex `alpha` or `beta` of a Hermitian
        product.
    DoesNotFitError
        As in `matmul`.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> X = np.arange(6.0).reshape(3, 2)
    >>> distmm.gram(X, trans=True).compute()
    array([[20., 26.],
           [26., 35.]])
    """
    check_flags(trans=trans, hermitian=hermitian)
    a, b, symmetry = with_itself(A, trans, hermitian)
    check_scalars(alpha=alpha, beta=beta)
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if symmetry == "hermitian" and factor.imag:
            raise InputError(
                f"{name} is {factor}: a Hermitian product has a real one; hermitian=False multiplies A by its transpose"
            )
    c, size = _addend(beta, C), a.shape[-2]
    if c is not None and c.shape[-2:] != (size, size):
        raise InputError(f"C has shape {c.shape}, the product is {size} x {size}: give a symmetric C of that size")
    product = Gemm.of(a, b, alpha=alpha, beta=beta, c=c, symmetry=symmetry)
    return product.array(
        Wishes.chosen(precision, kernel, device, square(blocks), plan, reproducible=reproducible), out, client
    )


def with_itself(A: Any, trans: bool, hermitian: bool) -> tuple[Operand, Operand, Symmetry]:
    """Return both operands of a symmetric product, and what it is."""
    a = wrap(A, "A", trans)
    if len(a.shape) < 2:
        raise InputError(f"A has shape {a.shape}: the product with its own transpose is that of a matrix")
    return a, replace(a, transposed=not trans), "hermitian" if hermitian and a.dtype.kind == "c" else "symmetric"


def square(blocks: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Block edges (m, k, m) of a symmetric product."""
    if blocks is None:
        return None
    if not isinstance(blocks, Sequence) or len(blocks) != 2:
        raise InputError(f"blocks {blocks!r}: give two positive edges, those of m and k")
    return blocks[0], blocks[1], blocks[0]
