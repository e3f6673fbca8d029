"""The functions that replace Dask's: each computes with distmm, or calls Dask's own function."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.utils import parse_bytes

from distmm import config
from distmm.accelerate import dask_names
from distmm.api import array as products
from distmm.api import einsum as contractions
from distmm.api.tensordot import labelled
from distmm.errors import InputError
from distmm.graph.parametric_layer import with_copies
from distmm.graph.product_graph import ProductLayer
from distmm.product.array_types import package_of
from distmm.product.labelled import Label
from distmm.worker.tasks.tall_qr import block_qr, rows_times, stack_factors

log = logging.getLogger("distmm.accelerate")

# MIN_FLOPS sets which products are too small for distmm. SETTINGS are all settings that products read.
MIN_FLOPS = "accelerate.min-flops"
SETTINGS = ("precision", "kernel", "reproducible", "device", MIN_FLOPS)

# In a batch of products whose k has one chunk, each chunk of C is one task in Dask, too. Dask fuses it with the tasks
# before and after it, and on a GPU worker a task takes about 1 ms. So distmm takes such a batch only if a chunk of C
# has so many times `MIN_FLOPS`. Attention of 16 x 2048 x 128 in float32, 1e9 operations a chunk, took distmm 1.1 to 1.4
# times as long as Dask (H200, 2026-11-29).
TIMES_FOR_BATCHES = 20


class StaysDasks(Exception):  # noqa: N818  a decision, not an error
    """Dask computes this product. The message is the reason."""


def matmul(a: Any, b: Any) -> da.Array:
    """Multiply as `dask.array.matmul`."""
    a, b = da.asanyarray(a), da.asanyarray(b)
    _check_blocks(a, b)
    pairs = list(zip(reversed(a.chunks[:-2]), reversed(b.chunks[:-2]), strict=False))
    if any(x != y and sum(x) == sum(y) for x, y in pairs):
        raise StaysDasks("batch dimensions have different chunks")
    shared = math.prod(min(sum(x), sum(y)) for x, y in pairs)  # dimensions that are broadcast have length 1
    columns = b.shape[-1] if b.ndim > 1 else 1
    flops = 2 * a.size * columns * math.prod(b.shape[:-2]) / shared
    _check_flops(flops)
    if pairs and a.numblocks[-1] == 1 and package_of(meta_from_array(a)) == "cupy":
        batch = np.broadcast_shapes(a.numblocks[:-2], b.numblocks[:-2])
        chunks = math.prod((*batch, a.numblocks[-2], b.numblocks[-1]))
        _check_flops(flops / chunks, TIMES_FOR_BATCHES, " of a chunk")
    return _kept(products.matmul(a, b), a, b)


def tensordot(lhs: Any, rhs: Any, axes: Any = 2) -> da.Array:
    """Sum products as `dask.array.tensordot`."""
    a, b, out = labelled(da.asanyarray(lhs), da.asanyarray(rhs), axes)
    return _contracted(a.source, a.labels, b.source, b.labels, out)


def einsum(
    *operands: Any, dtype: Any = None, optimize: Any = False, split_every: Any = None, **others: Any
) -> da.Array:
    """Sum products as `dask.array.einsum`; `optimize` and `split_every` have no effect on a product of two operands."""
    if dtype is not None or others:
        raise StaysDasks("it has options")
    inputs, out, arrays = dask_names.parse_einsum_input(operands)
    if len(arrays) != 2:
        raise StaysDasks(f"it has {len(arrays)} operands")
    (a, b), (of_a, of_b) = arrays, inputs.split(",")
    edges = dict(zip(of_a + of_b, a.chunks + b.chunks, strict=True))
    largest = math.prod(max(edges[label], default=0) for label in out)
    if largest > dask.config.get("array.chunk-size-tolerance") * max(math.prod(x.chunksize) for x in arrays):
        raise StaysDasks("Dask cuts it into smaller chunks")
    return _contracted(a, of_a, b, of_b, out)


def tsqr(data: da.Array, compute_svd: bool = False, _max_vchunk_size: int | None = None) -> tuple[da.Array, ...]:
    """Decompose as `dask.array.linalg.tsqr`."""
    if _max_vchunk_size is not None:
        raise StaysDasks("it is a part of another one")
    if data.ndim != 2 or data.numblocks[1] != 1:
        raise StaysDasks(f"it has {data.numblocks} blocks")
    if data.dtype.char not in "fdFD" or package_of(meta_from_array(data)) not in ("numpy", "cupy"):
        raise StaysDasks(f"LAPACK has no {data.dtype}")
    m, n = data.shape
    if not min(data.chunks[0]) >= n > 0:  # sizes may be unknown: NaN
        raise StaysDasks(f"blocks of {min(data.chunks[0])} rows are not taller than {n}")
    row = n * data.dtype.itemsize
    stack, block = data.numblocks[0] * n * row, max(data.chunks[0]) * row
    if stack > max(block, parse_bytes(dask.config.get("array.chunk-size"))):
        raise StaysDasks(f"a task would read {stack} bytes of triangular factors")
    _check_flops(4 * m * n * n)
    return _decomposed(data, compute_svd)


def _decomposed(data: da.Array, svd: bool) -> tuple[da.Array, ...]:
    """Return Q and R, or U, S and Vh, of an array ``(m, n)`` with one column of blocks of at least n rows.

    Each block is ``A[i] = Q[i] R[i]``. One task stacks all R[i], and decomposes the stack: ``Q' R`` or ``U' S Vh``. A
    block of the result is ``Q[i] Q'[i]`` or ``Q[i] U'[i]``. That is one product; for U, Dask computes two. Source:
    Benson, Gleich and Demmel, Direct QR factorizations for tall-and-skinny matrices in MapReduce architectures, 2013.
    """
    (blocks, _), (_, n) = data.numblocks, data.shape
    same = {"dtype": data.dtype, "meta": data}
    factors = data.map_blocks(block_qr, tasks=blocks, **same)  # its blocks are pairs Q, R
    q = factors.map_blocks(operator.itemgetter(0), **same)
    r = factors.map_blocks(operator.itemgetter(1), chunks=((n,) * blocks, (n,)), **same)
    # One block: a tuple of the factors of the stack.
    parts = da.blockwise(stack_factors, "j", r, "ij", svd=svd, concatenate=True, **same)
    left = da.map_blocks(rows_times, q, parts, tasks=blocks, chunks=data.chunks, **same)
    right = da.blockwise(operator.itemgetter(-1), "ij", parts, "j", new_axes={"i": n}, **same)
    if not svd:
        return left, right
    real = meta_from_array(data, ndim=1, dtype=data.dtype.type(0).real.dtype)
    return left, parts.map_blocks(operator.itemgetter(1), dtype=real.dtype, meta=real), right


def _contracted(
    a: da.Array, of_a: Sequence[Label], b: da.Array, of_b: Sequence[Label], out: Sequence[Label]
) -> da.Array:
    """Sum products over the labels that both operands have and the result lacks."""
    _check_blocks(a, b)
    if any(len(set(labels)) < len(labels) for labels in (of_a, of_b, out)):
        raise StaysDasks("an operand has the same index twice")
    if set(out) ^ {x for x in (*of_a, *of_b) if x in out or (x in of_a) != (x in of_b)}:
        raise StaysDasks("an index of one operand is summed over")
    first, second = dict(zip(of_a, a.chunks, strict=True)), dict(zip(of_b, b.chunks, strict=True))
    both = [x for x in of_a if x in second]
    if any(sum(first[x]) != sum(second[x]) or (x in out and first[x] != second[x]) for x in both):
        raise StaysDasks("operands differ in the chunks of an index")
    inner = [x for x in both if x not in out]
    if not inner:
        raise StaysDasks("nothing is summed over")
    edges = first | second
    _check_flops(2 * math.prod(map(sum, edges.values())))
    number = {label: at for at, label in enumerate(edges)}
    numbered = [[number[label] for label in labels] for labels in (of_a, of_b, out)]
    c = _kept(contractions.einsum(a, numbered[0], b, numbered[1], numbered[2]), a, b)
    chunks = tuple(edges[label] for label in out)
    return c if c.chunks == chunks else with_copies(c.rechunk(chunks))


def _check_blocks(a: da.Array, b: da.Array) -> None:
    """Refuse types for which the libraries' results differ in type, and blocks that are empty or of unknown size."""
    if any(math.isnan(n) for n in (*a.shape, *b.shape)):
        raise StaysDasks("sizes are unknown")
    dtype = np.result_type(a.dtype, b.dtype)
    if dtype.kind == "b" or (dtype.kind in "iu" and dtype.itemsize < 8):
        raise StaysDasks(f"where Dask sums over blocks, {dtype} becomes a wider type")
    if 0 in (*a.shape, *b.shape) or any(0 in edges for edges in (*a.chunks, *b.chunks)):
        raise StaysDasks("a block has no elements")


def _kept(c: da.Array, a: da.Array, b: da.Array) -> da.Array:
    """Return the product c of a and b, or refuse it if the workers have too little memory for all of its blocks.

    With too little memory, `persist` of distmm's product would fail. `persist` of Dask's product does not, because
    Dask's workers spill blocks to disk.
    """
    made = c.dask.layers.keys() - a.dask.layers.keys() - b.dask.layers.keys()
    layers = (c.dask.layers[name] for name in made)
    if any(isinstance(layer, ProductLayer) and layer.plan.streamed for layer in layers):
        raise StaysDasks("the workers have too little memory for all blocks of the product")
    return c


def _check_flops(flops: float, times: int = 1, where: str = "") -> None:
    least = times * float(config.chosen(MIN_FLOPS))
    if flops < least:
        raise StaysDasks(f"{flops:.3g} operations{where} are less than {least:.3g}")


def _replacement(name: str, by_distmm: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that computes with distmm, or calls Dask's own one if distmm does not support the operands."""
    by_dask = dask_names.ORIGINALS[name]

    @wraps(by_dask)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        for setting in SETTINGS:  # an invalid setting is an error: Dask's function must not hide it
            config.chosen(setting)
        try:
            result = by_distmm(*args, **kwargs)
        except (StaysDasks, InputError) as reason:  # InputError: e.g. C exceeds the cluster's memory
            log.debug("%s stays Dask's: %s", name, reason)
        else:
            log.debug("%s runs on distmm", name)
            return result
        return by_dask(*args, **kwargs)

    return chosen


REPLACEMENTS = {
    function.__name__: _replacement(function.__name__, function) for function in (matmul, tensordot, einsum, tsqr)
}
