"""What users call: `matmul`, `gemm` and `plan`, on Dask, NumPy, CuPy and Zarr arrays and what is like them."""

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
from distmm.cost import Residence
from distmm.errors import InputError
from distmm.geometry import Blocking, Problem, Wave, even_edges
from distmm.operands import Operand, as_matrix, check_pair, wrap
from distmm.plan import TILE, Plan, make_plan
from distmm.runtime import cluster
from distmm.tasks import Epilogue, KernelChoice
from distmm.telemetry import client as telemetry

__all__ = ["gemm", "matmul", "plan", "storage_multiples", "users_blocking"]


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
    out : numpy.ndarray or Zarr-like array, optional
        Where the product goes, at once: blocks are written as they come, NumPy arrays by the workers themselves where
        they run on this machine; in waves, where C does not fit into the workers' memory. `distmm.empty` makes arrays
        that GPUs write to at full speed.
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
    vector_a, vector_b = len(a.shape) == 1, len(b.shape) == 1
    a, b = as_matrix(a, 0), as_matrix(b, 1)
    dtype = _result_type(alpha, beta, a, b, c)
    problem = _problem(a, b, dtype)
    client = client or cluster.current_client()
    if plan is None or isinstance(plan, str):
        plan = _plan(problem, a, b, client, device, blocks, precision, kernel, plan, out)
        if client is not None:
            plan.validate()
    elif plan.problem != problem:
        raise InputError(
            f"the plan is for {plan.problem}, the operands are {problem}: make a new plan with distmm.plan(A, B)"
        )
    if client is not None:
        cluster.install(client)
        telemetry.install(client)
    to = None
    if out is not None:
        into.check_out(out, _without_vectors(problem.shape, vector_a, vector_b), dtype, (A, B, C))
        to = into.target(out, client)

    on, blocking = plan.cluster.device, plan.blocking
    choice = KernelChoice(on, dtype, plan.precision, plan.kernel)
    kind = "cupy" if on == "cuda" and into.takes_gpu_blocks(to) else a.kind
    epilogue = Epilogue(dtype, kind, alpha, beta)
    chunks = (*blocking.batch, blocking.m, blocking.n)
    c_blocks = None if c is None else _added(c, problem.shape, chunks, a.kind, vector_a, vector_b)
    meta = meta_from_array(a.source if a.kind == "cupy" else None, ndim=len(chunks), dtype=dtype)
    name = None

    def product(wave: Wave | None = None) -> da.Array:
        """Return C, or, with only the blocks of one wave in its graph, a C of which just those can be computed."""
        nonlocal name
        # Operands that are read have new names each time: a wave does not keep the blocks that the next one reads.
        a_blocks = a.blocked((*_batch_chunks(a, blocking), blocking.m, blocking.k), on, client)
        b_blocks = b.blocked((*_batch_chunks(b, blocking), blocking.k, blocking.n), on, client)
        if name is None:
            names = a_blocks.name, b_blocks.name, None if c_blocks is None else c_blocks.name
            name = f"distmm-matmul-{tokenize(names, problem, plan.shape, choice, epilogue)}"
        layers = graph.build(name, plan, a_blocks, b_blocks, choice, epilogue, c_blocks, wave)
        c = da.Array(layers, name, chunks, meta=meta)
        c = c[..., 0, :] if vector_a else c
        return c[..., 0] if vector_b else c

    if out is None:
        return product()
    if client is None or vector_a or vector_b or len(plan.waves) == 1:
        into.store([(product(), None)], out, to, client)
    else:
        into.store(((product(wave), blocking.region(wave)) for wave in plan.waves), out, to, client)
    return out


def _without_vectors(shape: tuple[int, ...], vector_a: bool, vector_b: bool) -> tuple[int, ...]:
    """Shape of the product as the user sees it: vectors add no dimension."""
    *batch, m, n = shape
    return (*batch, *(() if vector_a else (m,)), *(() if vector_b else (n,)))


def plan(
    A: Any,
    B: Any,
    *,
    transa: bool = False,
    transb: bool = False,
    precision: str = "highest",
    kernel: str | None = None,
    device: cluster.Device = "auto",
    blocks: tuple[int, int, int] | None = None,
    plan: str | None = None,
    out: Any = None,
    client: Client | None = None,
) -> Plan:
    """Plan the product of two operands without doing it: blocks, owners, memory, bytes moved and time.

    Parameters are those of `matmul` and `gemm`; with anything as `out`, C is planned to be written as it is made, and
    not to stay in the workers' memory. `Plan.rows` is the plan as a table, in notebooks with a picture; `str` is one
    line that `matmul` takes back as its `plan`; `Plan.validate` refuses what cannot fit.
    """
    a, b = wrap(A, "A", transa), wrap(B, "B", transb)
    check_pair(a, b)
    a, b = as_matrix(a, 0), as_matrix(b, 1)
    client = client or cluster.current_client()
    problem = _problem(a, b, _result_type(1, 0, a, b, None))
    return _plan(problem, a, b, client, device, blocks, precision, kernel, plan, out)


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


def _problem(a: Operand, b: Operand, dtype: np.dtype) -> Problem:
    return Problem(a.shape[-2], a.shape[-1], b.shape[-1], dtype, a.shape[:-2], b.shape[:-2])


def _plan(
    problem: Problem,
    a: Operand,
    b: Operand,
    client: Client | None,
    device: cluster.Device,
    blocks: tuple[int, int, int] | None,
    precision: str,
    kernel: str | None,
    text: str | None,
    out: Any,
) -> Plan:
    on_gpu = a.kind == "cupy"
    if on_gpu and device == "cpu":
        raise InputError(
            "device is 'cpu', but A and B have CuPy blocks: convert them with x.map_blocks(cupy.asnumpy), or drop it"
        )
    spec = cluster.describe(
        client, problem.dtype, "gpu" if on_gpu else device, any_gpu=on_gpu, kernel=kernel, precision=precision
    )
    if spec.device == "cuda" and (a.pageable or b.pageable):
        spec = replace(spec, load=cluster.LOADS["cuda, pageable"])
    blocking = users_blocking(problem, a, b) if blocks is None else None
    cuts = ((blocking.m, blocking.k), (blocking.k, blocking.n)) if blocking and text is None else (None, None)
    multiples = storage_multiples(a, b)
    return make_plan(
        problem,
        spec,
        blocking=blocking,
        edges=blocks,
        multiples=multiples,
        precision=precision,
        kernel=kernel,
        text=text,
        result="out" if out is not None else "host" if spec.device == "cuda" and a.kind == "numpy" else "workers",
        operands=(_residence(a, cuts[0]), _residence(b, cuts[1])),
    )


def _residence(operand: Operand, cuts: tuple[tuple[int, ...], tuple[int, ...]] | None) -> Residence:
    """Where an operand is meanwhile; chunks that are cut anew are needed by several blocks, and stay until the last."""
    if operand.chunks is not None and cuts != operand.chunks[-2:]:
        return "whole"
    return "resident" if operand.resident else "streamed"


def users_blocking(problem: Problem, a: Operand, b: Operand) -> Blocking | None:
    """Blocks from the chunks of Dask operands; where k is chunked differently, the larger operand keeps its chunks.

    An operand without chunks is cut like the other: at its edges along k, at multiples of its largest edge elsewhere.
    """
    given = a.chunks or b.chunks
    if given is None:
        return None
    edge = max(1, *given[-2], *given[-1])
    a_chunks = a.chunks or (*((n,) for n in problem.a_batch), even_edges(problem.m, edge), given[-2])
    b_chunks = b.chunks or (*((n,) for n in problem.b_batch), given[-1], even_edges(problem.n, edge))
    k = a_chunks[-1] if problem.m >= problem.n else b_chunks[-2]
    return Blocking(a_chunks[-2], k, b_chunks[-1], _merged_batch(problem, a_chunks[:-2], b_chunks[:-2]))


def _merged_batch(
    problem: Problem, a: tuple[tuple[int, ...], ...], b: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """Batch chunks of C: A's where A has the dimension, else B's."""
    ndim = len(problem.batch)
    pad_a, pad_b = ((1,),) * (ndim - len(a)) + a, ((1,),) * (ndim - len(b)) + b
    return tuple(x if sum(x) == n else y for x, y, n in zip(pad_a, pad_b, problem.batch, strict=True))


def _batch_chunks(operand: Operand, blocking: Blocking) -> tuple[tuple[int, ...], ...]:
    own = operand.shape[:-2]
    return tuple(
        edges if sum(edges) == n else (n,)
        for n, edges in zip(own, blocking.batch[len(blocking.batch) - len(own) :], strict=True)
    )


def storage_multiples(a: Operand, b: Operand) -> tuple[int, int, int]:
    """Block edges follow the chunks of the files, so that each chunk is read once; else the kernel's tile."""
    m, k_a = a.storage_chunk[-2:] if a.storage_chunk else (TILE, TILE)
    k_b, n = b.storage_chunk[-2:] if b.storage_chunk else (TILE, TILE)
    return m, max(k_a, k_b), n


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
