"""The public functions `matmul`, `gemm` and `gram`, for Dask, NumPy, CuPy, Zarr and similar arrays."""

from __future__ import annotations

from typing import Any, Unpack

from distmm.errors import InputError
from distmm.product.choices import BlockKeywords, Choices, takes
from distmm.product.operand import Operand, wrap
from distmm.product.operand_pair import check_pair, symmetry_of, with_itself
from distmm.product.out_target import is_written
from distmm.product.product import Gemm
from distmm.product.scalars import check_flags, check_scalars


@takes(BlockKeywords)
def matmul(A: Any, B: Any, *, out: Any = None, **choices: Unpack[BlockKeywords]) -> Any:
    """Multiply two arrays of any size, block by block, on all workers.

    Shapes, broadcasting of batch dimensions, vectors and result types follow `numpy.matmul`. The product is lazy unless
    `out` is given. A C that does not fit into the memory of the workers can still be reduced or stored block by block,
    for example by ``C.sum()`` or ``da.topk(C, 10)``. Workers free each block after its last use, and then compute
    further blocks.

    Parameters
    ----------
    A : array-like of shape (..., m, k) or (k,)
        One of these. Operands are read when the product is computed: do not change them before.

        - A Dask array with NumPy or CuPy chunks. The chunks become blocks of the product.
        - A NumPy or CuPy array, which workers on this machine read in its own memory. An array with gaps between the
          elements of its rows and of its columns is copied at the call. Work of the current stream on a CuPy array is
          waited for.
        - An object with ``shape``, ``dtype`` and ``__getitem__``, such as a Zarr array. Workers read it block by block.
          Zarr arrays and HDF5 datasets are opened again by their absolute path.
        - A memory map. Workers read its file. It is refused if another file has replaced that file.
        - An array of another package with DLPack (PyTorch, JAX), on the host or on a GPU, or of Numba on a GPU. It is
          used like NumPy's and CuPy's.
        - An xarray object, of which ``data`` is used. Names of dimensions and coordinates are ignored. A lazily opened
          variable would be read as a whole: open it with ``chunks={}``.
    B : array-like of shape (..., k, n) or (k,)
        As `A`.
    out : numpy.ndarray, Zarr-like, DLPack or Dask array, optional
        Array of the product's shape that receives the product during this call. A product that does not fit into the
        memory of the workers is computed in waves. No task writes to `out` after the call, nor after an error or
        Ctrl-C.

        - NumPy or CuPy array: workers on this machine write directly into its memory. `distmm.empty` makes arrays that
          GPUs write at full speed.
        - Zarr-like object: workers write whole ``chunks`` (or ``shards``) in parallel. For an object without chunks,
          for an HDF5 dataset, and for elements that workers do not reach (in memory, in a folder that they do not see),
          this process writes one block after the other.
        - Array of another package with DLPack, or of Numba: it is filled in its own memory, which must be writable.
        - Dask array: it becomes the lazy product, and keeps its type and its chunks.
        - xarray object: its ``data`` is filled, or becomes the lazy product.
    precision : {"highest", "high", "medium", "ieee"}, optional
        Minimum accuracy of the product. "highest": within the error bound of arithmetic in the type of the operands,
        for each element. "high", "medium": float32 operands may be rounded to TF32 or bfloat16. "ieee": each element of
        a float32, float64 or complex product is a chain of fused multiply-adds, so that its bits do not depend on
        blocks. By default the value of ``distmm.precision`` in Dask's configuration, which is "highest" unless it is
        changed. The defaults of `kernel`, `reproducible` and `device` are configured in the same way.
    kernel : str, optional
        Name of a kernel, such as "tiled" or "cublas". By default the fastest kernel of the worker's device that has the
        precision.
    reproducible : bool, optional
        True: use a kernel with reproducible bits. The bits of C then do not depend on chunks, on the number of GPUs or
        on failures. The product is refused if there is no such kernel, as for float products on CPUs. False (default):
        use the fastest kernel, which may be NVIDIA's library. The plan names the kernel, and says whether its bits are
        reproducible.
    device : {"auto", "cpu", "gpu"}, optional
        Where to multiply. "auto" (default) uses GPUs if the chunks are CuPy's or every worker has a GPU.
    client : distributed.Client, optional
        Cluster to use. By default the one with which Dask's ``compute`` would compute here: the ``scheduler`` of its
        configuration, the cluster of the task that calls this, or the current client. Without a client the product runs
        on Dask's local scheduler. If no client is named here, and nothing is annotated (`dask.annotate`), this process
        itself computes short products (up to 10 ms) of its own NumPy or CuPy arrays into `out` or by ``compute()``,
        because the cluster's messages take longer.
    blocks : tuple of int, optional
        Block edges (m, k, n). By default the chunks of Dask arrays; else the planner chooses.
    plan : Plan or str, optional
        A plan that `distmm.plan` made for operands of these shapes, or its text, such as
        ``"g2x1x1 b8192x8192x8192 p1 w1 l2"``. A `Plan` keeps the precision, kernel and device that it was made with.
        Other arguments that contradict the plan are refused.

    Returns
    -------
    dask.array.Array of shape (..., m, n)
        Lazy. Its chunks are of the operands' kind (NumPy or CuPy). ``compute()`` returns an array of the operands'
        package (NumPy, CuPy, PyTorch, JAX) on their device; workers on this machine write directly into its memory.
        With `out`: that array.

    Raises
    ------
    InputError
        If the operands cannot be multiplied, or an argument has a value that is not allowed. Raised before any work.
    DoesNotFitError
        If the workers have too little memory. The error says how much is missing. For a C that fits only block by
        block, ``persist`` raises it.

    See Also
    --------
    gemm : The product with alpha, beta, an addend C and transposes.
    gram : The product of a matrix with its own transpose.
    multiply : The product of matrices on disk, as a job that can be resumed.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B = np.ones((3, 4)), np.ones((4, 5))
    >>> distmm.matmul(A, B).compute()[0]
    array([4., 4., 4., 4., 4.])
    """
    return gemm(1, A, B, out=out, **choices)


@takes(BlockKeywords)
def gemm(
    alpha: complex,
    A: Any,
    B: Any,
    beta: complex = 0,
    C: Any = None,
    *,
    transa: bool = False,
    transb: bool = False,
    out: Any = None,
    **choices: Unpack[BlockKeywords],
) -> Any:
    """Compute ``alpha * op(A) @ op(B) + beta * C`` as BLAS's GEMM does, into a new array.

    Parameters
    ----------
    alpha : scalar
        Factor of the product. With 0, `A` and `B` are not read.
    A : array-like of shape (..., m, k), or (..., k, m) with `transa`
        As in `matmul`.
    B : array-like of shape (..., k, n), or (..., n, k) with `transb`
        As in `matmul`.
    beta : scalar
        Factor of `C`. With 0, `C` is not read.
    C : array-like, optional
        Addend. It must broadcast to shape (..., m, n). It may be the same NumPy array as `out`, as in BLAS. Workers of
        a cluster then read a copy that is made at the call, so that a task that runs again after a failure reads the
        old values.
    transa, transb : bool
        Use the transpose of the last two dimensions of A or B, without a copy.
    out
        As in `matmul`.
    precision, kernel, reproducible, device, client, blocks, plan
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
    check_scalars(alpha=alpha, beta=beta)  # first: BLAS's order of arguments is not that of matmul
    a, b = wrap(A, "A", transa), wrap(B, "B", transb)
    check_pair(a, b)
    c, chosen = _addend(beta, C), Choices.of(now=is_written(out), **choices)
    symmetry = symmetry_of(a, b, chosen) if c is None else None
    return Gemm.of(a, b, alpha=alpha, beta=beta, c=c, symmetry=symmetry).array(chosen, out)


def _addend(beta: complex, C: Any) -> Operand | None:
    """Return C where it counts."""
    if beta != 0 and C is None:
        raise InputError(f"beta is {beta}, but there is no C: give C, or leave beta at 0")
    return wrap(C, "C") if beta != 0 else None


@takes(BlockKeywords)
def gram(
    A: Any,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    C: Any = None,
    trans: bool = False,
    hermitian: bool = True,
    out: Any = None,
    **choices: Unpack[BlockKeywords],
) -> Any:
    """Multiply a matrix by its own transpose, ``alpha * A @ A.conj().T + beta * C``, as BLAS's SYRK and HERK do.

    Only the blocks on and below the diagonal are computed, which takes half of the operations. Each block of A is read
    once, and sent at most once to each worker. The blocks above the diagonal are transposed views of the others on the
    same workers, or conjugated copies of a Hermitian product. C is exactly symmetric, or Hermitian, bit for bit.

    Parameters
    ----------
    A : array-like of shape (..., m, k)
        As in `matmul`.
    alpha : scalar
        Factor of the product. It must be real if the product is Hermitian. With 0, `A` is not read.
    beta : scalar
        Factor of `C`. It must be real if the product is Hermitian. With 0, `C` is not read.
    C : array-like of shape (..., m, m), optional
        Addend, symmetric or Hermitian like the product. As in BLAS, only its elements on and below the diagonal are
        used. It may be the same array as `out`, as in `gemm`: ``gram(X, trans=True, beta=1, C=S, out=S)`` adds
        ``X.conj().T @ X`` to S.
    trans : bool
        Compute ``A.conj().T @ A``, of shape (..., k, k).
    hermitian : bool
        For complex numbers. True: use the conjugate transpose, as HERK does. False: use the transpose, as SYRK does.
    out
        As in `matmul`.
    precision, kernel, reproducible, device, client
        As in `matmul`.
    blocks : tuple of int, optional
        Block edges (m, k) of A, or of its transpose with `trans`. By default the chunks of a Dask array; else the
        planner chooses.
    plan : Plan or str, optional
        A plan that ``distmm.plan(A)`` made, or its text.

    Returns
    -------
    dask.array.Array of shape (..., m, m)
        Lazy; with `out`: that array.

    Raises
    ------
    InputError
        As in `gemm`. Also for a vector, for a `C` that is not square, and for a complex `alpha` or `beta` of a
        Hermitian product.
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
                f"{name} is {factor}, and a Hermitian product needs a real {name}: give a real number, or "
                "hermitian=False, which multiplies A by its transpose"
            )
    c, size = _addend(beta, C), a.shape[-2]
    if c is not None and c.shape[-2:] != (size, size):
        raise InputError(f"C has shape {c.shape}, the product is {size} x {size}: give a symmetric C of that size")
    product = Gemm.of(a, b, alpha=alpha, beta=beta, c=c, symmetry=symmetry)
    return product.array(Choices.of(now=is_written(out), symmetric=True, **choices), out)
