"""The product of NumPy or CuPy arrays: the choice of a kernel, and its launches on CuPy's current stream.

Every package of arrays comes here with views of its memory.
"""

from __future__ import annotations

import functools
import math
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from distmm_kernels.background import BUILD_SECONDS, begin
from distmm_kernels.candidate import Candidate
from distmm_kernels.config import PRECISIONS, Problem, result_type, working_type
from distmm_kernels.device import Device
from distmm_kernels.kernel import Array, Kernel, product_shape
from distmm_kernels.symmetric import Symmetry

# Host time of a whole call, in seconds: of one launch on the operands as they are, and of kernels that may copy one.
# A product that takes less time waits for the host. Measured on the host of an H200 (2026-11-26). Other kernels copy
# or split their operands first: `distmm_kernels.rates.expected` has their time.
DIRECT, COPIED = 15e-6, {"register_tiled": 50e-6, "dmma": 50e-6}


class Options(NamedTuple):
    """How a product is computed: the keywords of `distmm_kernels.matmul`."""

    alpha: complex = 1
    beta: complex = 0
    precision: str = "highest"
    reproducible: bool = False
    symmetry: Symmetry | None = None


def result_of(a: Array, b: Array, out: Array | None) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of ``a @ b``, by the rules of `numpy.matmul`; the type of ``out``, if there is one.

    Raises
    ------
    ValueError
        If an operand has no dimension, or the shapes do not match.
    TypeError
        If ``out`` cannot hold numbers of the product's kind.
    """
    for name, x in (("a", a), ("b", b)):
        if x.ndim == 0:
            raise ValueError(f"{name} is a scalar: matmul multiplies matrices and vectors; use * for scalars")
    rows, columns = (a.shape if a.ndim > 1 else (1, *a.shape)), (b.shape if b.ndim > 1 else (*b.shape, 1))
    *batch, m, n = product_shape(rows, columns)
    shape = (*batch, *([m] if a.ndim > 1 else []), *([n] if b.ndim > 1 else []))
    dtype = result_type(a.dtype, b.dtype)
    if out is None:
        return shape, dtype
    if out.shape != shape or not np.can_cast(dtype, out.dtype, "same_kind"):
        raise (ValueError if out.shape != shape else TypeError)(
            f"out is {out.shape} {out.dtype}, the product {shape} {dtype}: give an out of that shape, and of a type "
            "that holds such numbers"
        )
    return shape, np.dtype(out.dtype)


def product(
    a: Array, b: Array, c: Array | None, out: Array | None, device: Device, options: Options, new: bool = False
) -> Array:
    """Return ``alpha * a @ b + beta * c`` for NumPy or CuPy arrays, on the device; in ``out``, if there is one.

    A ``new`` out shares no memory with the operands, and has the product's shape and type.
    """
    if new and out is not None and min(a.ndim, b.ndim) > 1:
        return of_matrices(a, b, c, out, out.dtype, device, options)
    shape, dtype = result_of(a, b, out)
    left, right = (a if a.ndim > 1 else a[None, :]), (b if b.ndim > 1 else b[:, None])
    if c is not None and 1 in (a.ndim, b.ndim):
        c = np.broadcast_to(c, shape)
        c = c[..., None] if b.ndim == 1 else c
        c = c[..., None, :] if a.ndim == 1 else c
    at_once = out is not None and min(a.ndim, b.ndim) > 1 and not any(_overlap(out, x) for x in (a, b))
    if at_once and (c is None or not _overlap(out, c) or (_same(out, c) and options.symmetry is None)):
        return of_matrices(left, right, c, out, dtype, device, options)
    made = of_matrices(left, right, c, None, dtype, device, options).reshape(shape)
    if out is None:
        return made
    out[...] = made
    return out


def of_matrices(
    a: Array, b: Array, c: Array | None, out: Array | None, dtype: np.dtype[Any], device: Device, options: Options
) -> Array:
    """Return the product of matrices ``(..., m, k)`` and ``(..., k, n)``, in ``out`` or as a new contiguous array.

    As in BLAS, they are not read with an alpha of 0.
    """
    if options.alpha == 0:
        a, b = a[..., :0], b[..., :0, :]
    kernel, guarded, _ = kernel_of(a, b, dtype, device, options)
    if options.symmetry is None:
        left, right = kernel.prepare_a(a, wait=False), kernel.prepare_b(b, wait=False)
    else:
        left, right = kernel.prepare_both(a, options.symmetry, wait=False)
    last = {"alpha": options.alpha, "beta": options.beta, "c0": c, "dtype": dtype, "symmetry": options.symmetry}
    made = kernel.multiply(left, right, None, **last, out=out, wait=False)
    if guarded is not None:
        with suppress(MemoryError):  # C is finished: where the GPU is full, the next product looks
            guarded.look(a, b)
    return made


def kernel_of(
    a: Array, b: Array, dtype: np.dtype[Any], device: Device, options: Options
) -> tuple[Any, Any | None, bool]:
    """Choose the kernel of a product of matrices whose result has the type `dtype`.

    Returns
    -------
    kernel
        It computes the product.
    guarded
        The kernel whose guards were raised by earlier products, so that the library computes this one; else None.
    building
        Whether another kernel may be chosen once the usual ones are built.
    """
    working = working_type(a.dtype, b.dtype, dtype, a.shape[-1])
    *batch, m, n = product_shape(a.shape, b.shape)
    k, symmetric, building = a.shape[-1], options.symmetry is not None, begin(working.name, device.compute_capability)
    how = options.precision, options.reproducible, device.kind == "cuda" and captured(), symmetric
    kernel: Any = chosen(m, k, n, tuple(batch), working, device, *how, _by_columns(b), dtype, building)
    steps = math.prod(batch) * m * k * n
    if kernel.guarded and not options.reproducible and not symmetric and kernel.declines(steps):
        return named("cublas", working, device), kernel, building
    return kernel, None, building


def _by_columns(b: Array) -> bool:
    """Whether the columns of B are contiguous, and its rows are not."""
    return bool(b.strides[-2] == b.itemsize != b.strides[-1])


@functools.lru_cache(maxsize=4096)
def chosen(
    m: int, k: int, n: int, batch: tuple[int, ...], dtype: np.dtype[Any], device: Device, precision: str,
    reproducible: bool, in_graph: bool, symmetric: bool = False, turned: bool = False, out: np.dtype[Any] | None = None,
    building: bool = False,
) -> Kernel:  # fmt: skip
    """Return the kernel for a whole product, by the time of the device and that of the host for such calls.

    Some cannot be captured. The result has the type `out`, by default the accumulator's. While kernels are `building`
    on a new machine, a library multiplies if they would not save as much time as they take to compile.

    Raises
    ------
    ValueError
        If the precision is unknown, or if no kernel promises the bits of such a product.
    """
    from distmm_kernels.rates import expected
    from distmm_kernels.select import WORTH, choose, ranked

    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}: use one of {', '.join(PRECISIONS)}")
    problem = Problem(m, k, n, dtype, batch)
    found = ranked(problem, device, precision, reproducible=reproducible)
    if in_graph:
        found = [each for each in found if each[0].kernel.capturable]
    if reproducible or device.kind == "cpu" or not found:
        taken = found[0][0] if found else choose(problem, device, precision, reproducible=reproducible)
    else:

        def time(candidate: Candidate) -> float:
            host, on_device = expected(candidate, problem, device)
            half = symmetric and dtype.name in candidate.triangles
            if candidate.direct(problem, turned, out or problem.accumulator):
                host = DIRECT
            else:
                on_device *= WORTH  # of equally fast kernels, take one that copies nothing
                host = COPIED.get(candidate.name, host) if dtype == problem.accumulator else host
            build = BUILD_SECONDS if building and candidate.kernel.compiled else 0.0
            return build + max(host, on_device / 2 if half else on_device)

        taken = min((each for each, _ in found), key=time)
    return named(taken.name, dtype, device)


@functools.lru_cache(maxsize=256)
def named(name: str, dtype: np.dtype[Any], device: Device) -> Kernel:
    """Return the kernel of a name for blocks of any size."""
    from distmm_kernels.select import select

    return select(Problem(1, 1, 1, dtype), device, name=name)


def captured() -> bool:
    """Whether a CUDA graph captures CuPy's current stream."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    return bool(stream.ptr) and bool(stream.is_capturing())


def _overlap(x: Array, y: Array) -> bool:
    """Whether the memory from the first to the last element of two arrays has a part in common."""
    alike = isinstance(x, np.ndarray) is isinstance(y, np.ndarray)
    return alike and bool(np.may_share_memory(x, y))  # NumPy's function calls CuPy's for CuPy arrays


def _same(x: Array, y: Array) -> bool:
    """Whether two arrays have the same elements in memory."""
    first, other = (z.ctypes.data if isinstance(z, np.ndarray) else z.data.ptr for z in (x, y))
    return first == other and (x.shape, x.strides, x.dtype) == (y.shape, y.strides, y.dtype)
