"""What users call: `matmul`, `gemm`, `gram` and `plan`, on Dask, NumPy, CuPy and Zarr arrays and what is like them."""

from __future__ import annotations

import numbers
from dataclasses import replace
from typing import Any

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.base import tokenize
from distributed import Client

from distmm import graph, into
from distmm.errors import InputError
from distmm.geometry import Problem, Symmetry, Wave
from distmm.operands import Operand, as_matrix, check_pair, wrap
from distmm.plan import Plan
from distmm.planning import Chunks, Wishes, batch_chunks, plan_for
from distmm.runtime import cluster
from distmm.tasks import Epilogue, KernelChoice
from distmm.telemetry import client as telemetry

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
        blocks of the product.
    precision : {"highest", "high", "medium", "ieee"}
        Least accuracy of float32 products: "highest" is no worse than float32 arithmetic.
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
        that GPUs write to at full speed. A Dask array becomes the lazy product, as in NumPy's functions of Dask arrays,
        and keeps its type and its chunks.
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
    _check_scalars(alpha, beta, C)
    c = wrap(C, "C") if beta != 0 else None
    return _product(alpha, a, b, beta, c, None, Wishes(precision, kernel, device, blocks, plan), out, client)


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
    a, b, symmetry = _with_itself(A, trans, hermitian)
    _check_scalars(alpha, 0, None)
    if symmetry == "hermitian" and alpha.imag:
        raise InputError(
            f"alpha is {alpha}: a Hermitian product has a real one; hermitian=False multiplies A by its transpose"
        )
    wishes = Wishes(precision, kernel, device, _square(blocks), plan)
    return _product(alpha, a, b, 0, None, symmetry, wishes, out, client)


def _with_itself(A: Any, trans: bool, hermitian: bool) -> tuple[Operand, Operand, Symmetry]:
    """Return both operands of a symmetric product, and what it is."""
    a = wrap(A, "A", trans)
    if len(a.shape) < 2:
        raise InputError(f"A has shape {a.shape}: the product with its own transpose is that of a matrix")
    return a, replace(a, transposed=not trans), "hermitian" if hermitian and a.dtype.kind == "c" else "symmetric"


def _square(blocks: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Block edges (m, k, m) of a symmetric product."""
    if blocks is not None and len(blocks) != 2:
        raise InputError(f"blocks {blocks}: give two positive edges, those of m and k")
    return None if blocks is None else (blocks[0], blocks[1], blocks[0])


def _product(
    alpha: complex,
    a: Operand,
    b: Operand,
    beta: complex,
    c: Operand | None,
    symmetry: Symmetry | None,
    wishes: Wishes,
    out: Any,
    client: Client | None,
) -> Any:
    """Plan a product, and return it, or `out`."""
    vector_a, vector_b = len(a.shape) == 1, len(b.shape) == 1
    given = tuple(None if x is None else x.source for x in (a, b, c))
    a, b = as_matrix(a, 0), as_matrix(b, 1)
    dtype = _result_type(alpha, beta, a, b, c)
    problem = _problem(a, b, dtype, symmetry)
    if out is not None:
        into.check_out(out, _without_vectors(problem.shape, vector_a, vector_b), dtype, a.kind, given)
    written = out is not None and not isinstance(out, da.Array)
    client = client or cluster.current_client()
    plan = plan_for(problem, a, b, wishes, client, written, _chunks_of(out, vector_a, vector_b))
    if client is not None:
        if plan is not wishes.plan:
            plan.validate()
        cluster.install(client)
        telemetry.install(client)
    to = into.target(out, client) if written else None

    on, blocking = plan.cluster.device, plan.blocking
    choice = KernelChoice(on, dtype, plan.precision, plan.kernel)
    kind = "cupy" if on == "cuda" and into.takes_gpu_blocks(to) else a.kind
    epilogue = Epilogue(dtype, kind, alpha, beta, conjugate=symmetry == "hermitian" and a.transposed)
    chunks = (*blocking.batch, blocking.m, blocking.n)
    c_blocks = None if c is None else _added(c, problem.shape, chunks, a.kind, vector_a, vector_b)
    meta = meta_from_array(a.source if a.kind == "cupy" else None, ndim=len(chunks), dtype=dtype)
    name = None

    def product(wave: Wave | None = None) -> da.Array:
        """Return C, or, with only the blocks of one wave in its graph, a C of which just those can be computed."""
        nonlocal name
        # Operands that are read have new names each time: a wave does not keep the blocks that the next one reads.
        a_blocks = a.blocked((*batch_chunks(a, blocking), blocking.m, blocking.k), on, client)
        b_blocks = None
        if symmetry is None:
            b_blocks = b.blocked((*batch_chunks(b, blocking), blocking.k, blocking.n), on, client)
        if name is None:
            names = [x.name for x in (a_blocks, b_blocks, c_blocks) if x is not None]
            name = f"distmm-matmul-{tokenize(names, problem, plan.shape, choice, epilogue)}"
        layers = graph.build(name, plan, a_blocks, b_blocks, choice, epilogue, c_blocks, wave)
        c = da.Array(layers, name, chunks, meta=meta)
        c = c[..., 0, :] if vector_a else c
        return c[..., 0] if vector_b else c

    if out is None:
        return product()
    if not written:
        return into.become(out, product())
    if client is None or vector_a or vector_b or len(plan.waves) == 1:
        into.store([(product(), [None])], out, to, client)
    else:
        into.store(((product(wave), blocking.regions(wave)) for wave in plan.waves), out, to, client)
    return out


def _chunks_of(out: Any, vector_a: bool, vector_b: bool) -> Chunks | None:
    """Chunks of a Dask array as those of C, which has the dimensions that vectors lack."""
    if not isinstance(out, da.Array):
        return None
    chunks = list(out.chunks)
    if vector_b:
        chunks.append((1,))
    if vector_a:
        chunks.insert(-1, (1,))
    return tuple(chunks)


def _without_vectors(shape: tuple[int, ...], vector_a: bool, vector_b: bool) -> tuple[int, ...]:
    """Shape of the product as the user sees it: vectors add no dimension."""
    *batch, m, n = shape
    return (*batch, *(() if vector_a else (m,)), *(() if vector_b else (n,)))


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
    if B is None:
        a, b, symmetry = _with_itself(A, transa, hermitian)
        blocks = _square(blocks)
    else:
        a, b = wrap(A, "A", transa), wrap(B, "B", transb)
        check_pair(a, b)
    c_chunks = _chunks_of(out, len(a.shape) == 1, len(b.shape) == 1)
    a, b = as_matrix(a, 0), as_matrix(b, 1)
    client = client or cluster.current_client()
    problem = _problem(a, b, _result_type(1, 0, a, b, None), symmetry)
    written = out is not None and c_chunks is None
    return plan_for(problem, a, b, Wishes(precision, kernel, device, blocks, plan), client, written, c_chunks)


def _check_scalars(alpha: complex, beta: complex, C: Any) -> None:
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not isinstance(value, numbers.Number):
            raise InputError(f"{name} is {value!r}: it must be a number")
    if beta != 0 and C is None:
        raise InputError(f"beta is {beta}, but there is no C: give C, or leave beta at 0")


def _result_type(alpha: complex, beta: complex, a: Operand, b: Operand, c: Operand | None) -> np.dtype:
    """NumPy's result type. Python's scalars are weak, as in NumPy 2; alpha = 1 and beta = 0 or 1 change nothing."""
    scalars = [x for x in (alpha, beta) if x not in (0, 1)]
    return np.result_type(a.dtype, b.dtype, *([c.dtype] if c is not None else []), *scalars)


def _problem(a: Operand, b: Operand, dtype: np.dtype, symmetry: Symmetry | None) -> Problem:
    return Problem(a.shape[-2], a.shape[-1], b.shape[-1], dtype, a.shape[:-2], b.shape[:-2], symmetry)


def _added(
    c: Operand, shape: tuple[int, ...], chunks: tuple[tuple[int, ...], ...], kind: str, vector_a: bool, vector_b: bool
) -> da.Array:
    """Return the C of ``beta * C``, broadcast to the product's shape and cut like it."""
    if c.kind != kind:
        raise InputError(f"C has {c.kind} blocks, A and B have {kind} blocks: convert C with map_blocks")
    if c.shape == shape:
        return c.blocked(chunks, "cpu")
    source = c.source if isinstance(c.source, da.Array) else c.blocked(tuple((n,) for n in c.shape), "cpu")
    # C has the shape that the user sees: without the dimensions that a vector operand lacks.
    source = source[..., None] if vector_b else source
    source = source[..., None, :] if vector_a else source
    try:
        return da.broadcast_to(source, shape).rechunk(chunks)
    except ValueError:
        raise InputError(f"C has shape {c.shape}, the product {shape}: C must broadcast to it") from None
