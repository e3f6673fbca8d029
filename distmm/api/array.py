"""What users call: `matmul`, `gemm`, `gram` and `plan`, on Dask, NumPy, CuPy and Zarr arrays and what is like them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distributed import Client

from distmm.api.operands import Operand, check_pair, wrap
from distmm.api.plan_request import Wishes
from distmm.api.product import Gemm
from distmm.api.scalars import check_flags, check_scalars
from distmm.clusters import cluster
from distmm.errors import InputError
from distmm.planning.plan import Plan
from distmm.planning.problem import Symmetry

__all__ = ["gemm", "gram", "matmul", "plan"]


def matmul(
    A: Any,
    B: Any,
    *,
    precision: str = "highest",
    kernel: str | None = None,
    device: cluster.Device = "auto",
    blocks: tuple[int, int, int] | None = None,
    plan: Plan | str | None = None,
    out: Any = None,
    client: Client | None = None,
) -> Any:
    """Matrix product of two arrays, blocked, lazy, on all the workers there are.

    Shapes, broadcasting of batch dimensions, vectors and result types follow `numpy.matmul`.

    Parameters
    ----------
    A : array-like of shape (*batch, m, k) or (k,)
    B : array-like of shape (*batch, k, n) or (k,)
        Dask arrays with NumPy or CuPy chunks, NumPy or CuPy arrays, or objects with ``shape``, ``dtype`` and
        ``__getitem__`` such as Zarr arrays, which the workers read block by block. Chunks of Dask arrays become the
        blocks of the product. All are read when the product is computed, and not before: leave them as they are until
        then. Of memory maps the file is read again, and refused if it was replaced by another one meanwhile. NumPy
        arrays with gaps between the elements of their rows and of their columns alone are copied at the call.
    precision : {"highest", "high", "medium", "ieee"}
        Least accuracy of float32 products: "highest" is no worse than float32 arithmetic. "ieee": float32 and float64
        products by chains of multiply-adds, with bits that depend on no cuts.
    kernel : str, optional
        Name of a kernel to use, for example "tiled" or "cublas"; by default the best one for the worker's device.
    device : {"auto", "cpu", "gpu"}
        Where to multiply. "auto": on GPUs where the chunks are CuPy's or every worker owns a GPU.
    blocks : tuple of int, optional
        Block edges (m, k, n); by default the chunks of Dask arrays, else chosen by the plan.
    plan : Plan or str, optional
        A plan made before, by `distmm.plan`, for operands of these shapes; or how to cut, as a plan's ``str`` says it:
        ``"g2x1x1 b8192x8192x8192 p1 w1 l2"``.
    out : numpy.ndarray, Zarr-like or Dask array, optional
        Where the product goes, at once: blocks are written as they come, NumPy arrays by the workers themselves where
        they run on this machine; in waves, where C does not fit into the workers' memory. `distmm.empty` makes arrays
        that GPUs write to at full speed. Objects say by ``chunks`` (or ``shards``), as Zarr arrays do, what workers may
        write at the same time; without, and for HDF5 datasets, this process writes one block after the other. When the
        call has ended, by Ctrl-C or an error too, nothing is written any more. A Dask array becomes the lazy product,
        as in NumPy's functions of Dask arrays, and keeps its type and its chunks.
    client : distributed.Client, optional
        Cluster to plan for; by default Dask's current one. Without any, the result computes on Dask's local schedulers.

    Returns
    -------
    dask.array.Array of shape (*batch, m, n)
        Lazy; its chunks are of the inputs' kind (NumPy or CuPy). With `out`, that array, filled.

    Raises
    ------
    InputError
        For operands that cannot be multiplied, before any work.
    DoesNotFitError
        If the workers lack the memory.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B = np.ones((3, 4)), np.ones((4, 5))
    >>> distmm.matmul(A, B).compute()[0]
    array([4., 4., 4., 4., 4.])
    """
    how: dict[str, Any] = {"precision": precision, "kernel": kernel, "device": device, "blocks": blocks, "plan": plan}
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
    precision: str = "highest",
    kernel: str | None = None,
    device: cluster.Device = "auto",
    blocks: tuple[int, int, int] | None = None,
    plan: Plan | str | None = None,
    out: Any = None,
    client: Client | None = None,
) -> Any:
    """General matrix product ``alpha * op(A) @ op(B) + beta * C``, as in BLAS but returning a new array.

    Parameters
    ----------
    alpha, beta : scalars
        With ``beta == 0``, C is not read.
    A, B : array-like
        As in `matmul`.
    C : array-like that broadcasts to shape (*batch, m, n), optional
    transa, transb : bool
        Use the transpose (of the last two dimensions) of A or B, without a copy.
    precision, kernel, device, blocks, plan, out, client
        As in `matmul`.

    Returns
    -------
    dask.array.Array of shape (*batch, m, n), or `out`

    Raises
    ------
    InputError, DoesNotFitError
        As in `matmul`.
    """
    a, b = wrap(A, "A", transa), wrap(B, "B", transb)
    check_pair(a, b)
    check_scalars(alpha=alpha, beta=beta)
    if beta != 0 and C is None:
        raise InputError(f"beta is {beta}, but there is no C: give C, or leave beta at 0")
    c = wrap(C, "C") if beta != 0 else None
    product = Gemm.of(a, b, alpha=alpha, beta=beta, c=c)
    return product.array(Wishes(precision, kernel, device, blocks, plan), out, client)


def gram(
    A: Any,
    *,
    alpha: complex = 1,
    trans: bool = False,
    hermitian: bool = True,
    precision: str = "highest",
    kernel: str | None = None,
    device: cluster.Device = "auto",
    blocks: tuple[int, int] | None = None,
    plan: Plan | str | None = None,
    out: Any = None,
    client: Client | None = None,
) -> Any:
    """Product of a matrix with its own transpose, ``alpha * A @ A.conj().T``: BLAS's SYRK and HERK.

    Only the blocks on and below the diagonal are multiplied, which takes half of the operations; each block of A is
    read once, and sent to a worker once. The blocks above the diagonal are views of the others on the same workers
    (conjugates, for complex numbers). C is symmetric, or Hermitian, to the bit.

    Parameters
    ----------
    A : array-like of shape (*batch, m, k)
        As in `matmul`.
    alpha : scalar
        Real, where C is Hermitian.
    trans : bool
        The product is ``A.conj().T @ A``, of shape (*batch, k, k).
    hermitian : bool
        Of complex numbers: use the conjugate transpose, as HERK does and as Gram matrices are defined; False: use the
        transpose, as SYRK does. Real numbers have one product.
    precision, kernel, device, plan, out, client
        As in `matmul`; the plan is made by ``distmm.plan(A)``.
    blocks : tuple of int, optional
        Block edges along m and k, those of A, or of its transpose with `trans`; by default the chunks of a Dask array,
        else chosen by the plan.

    Returns
    -------
    dask.array.Array of shape (*batch, m, m), or `out`

    Raises
    ------
    InputError, DoesNotFitError
        As in `matmul`; for a vector; for a complex alpha of a Hermitian product.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> X = np.arange(6.0).reshape(3, 2)
    >>> distmm.gram(X, trans=True).compute()
    array([[20., 26.],
           [26., 35.]])
    """
    check_flags(trans=trans, hermitian=hermitian)
    a, b, symmetry = _with_itself(A, trans, hermitian)
    check_scalars(alpha=alpha)
    if symmetry == "hermitian" and alpha.imag:
        raise InputError(
            f"alpha is {alpha}: a Hermitian product has a real one; hermitian=False multiplies A by its transpose"
        )
    product = Gemm.of(a, b, alpha=alpha, symmetry=symmetry)
    return product.array(Wishes(precision, kernel, device, _square(blocks), plan), out, client)


def _with_itself(A: Any, trans: bool, hermitian: bool) -> tuple[Operand, Operand, Symmetry]:
    """Return both operands of a symmetric product, and what it is."""
    a = wrap(A, "A", trans)
    if len(a.shape) < 2:
        raise InputError(f"A has shape {a.shape}: the product with its own transpose is that of a matrix")
    return a, replace(a, transposed=not trans), "hermitian" if hermitian and a.dtype.kind == "c" else "symmetric"


def _square(blocks: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Block edges (m, k, m) of a symmetric product."""
    if blocks is None:
        return None
    if not isinstance(blocks, Sequence) or len(blocks) != 2:
        raise InputError(f"blocks {blocks!r}: give two positive edges, those of m and k")
    return blocks[0], blocks[1], blocks[0]


def plan(
    A: Any,
    B: Any = None,
    *,
    transa: bool = False,
    transb: bool = False,
    hermitian: bool = True,
    precision: str = "highest",
    kernel: str | None = None,
    device: cluster.Device = "auto",
    blocks: tuple[int, ...] | None = None,
    plan: str | None = None,
    out: Any = None,
    client: Client | None = None,
) -> Plan:
    """Plan the product of two operands without doing it: blocks, owners, memory, bytes moved and time.

    Parameters are those of `matmul` and `gemm`; with an array that is written to as `out`, C is planned to be written
    as it is made, and not to stay in the workers' memory. Without B it is the plan of ``distmm.gram(A)``, whose `trans`
    is `transa` here. `Plan.rows` is the plan as a table, in notebooks with a picture; `str` is one line that `matmul`
    takes back as its `plan`; `Plan.validate` refuses what cannot fit.
    """
    symmetry: Symmetry | None = None
    check_flags(hermitian=hermitian)
    if B is None:
        a, b, symmetry = _with_itself(A, transa, hermitian)
        blocks = _square(blocks)
    else:
        a, b = wrap(A, "A", transa), wrap(B, "B", transb)
        check_pair(a, b)
    product = Gemm.of(a, b, symmetry=symmetry)
    return product.plan(Wishes(precision, kernel, device, blocks, plan), out, cluster.usable(client))
