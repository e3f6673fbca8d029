"""Products of 8-bit floats with scales, as ``torch._scaled_mm`` has them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from distmm_kernels import select
from distmm_kernels.config import FLOAT8, Problem
from distmm_kernels.device import Device, current
from distmm_kernels.gemm.hopper_float8 import HopperFloat8Kernel
from distmm_kernels.kernel import Array, Kernel, product_shape
from distmm_kernels.layout.float8 import native
from distmm_kernels.tiles.hopper_tiles import STRETCH_OF_FLOAT8 as BLOCK


def scaled_product(
    a: Array,
    b: Array,
    scale_a: Any = 1.0,
    scale_b: Any = 1.0,
    *,
    dtype: DTypeLike = np.float32,
    device: Device | None = None,
    name: str | None = None,
) -> Array:
    """Return ``(scale_a * A) @ (scale_b * B)``, accumulated in float32.

    Parameters
    ----------
    a, b
        ``(m, k)`` and ``(k, n)``, float8_e4m3fn or float8_e5m2 of ml_dtypes; on GPUs as `distmm_kernels.layout.float8`
        has them. They may be of different types.
    scale_a
        float32 factors of the tensor (a number), of its rows ``(m, 1)``, or of blocks of 128 steps of k: of rows
        ``(m, ceil(k / 128))`` or of 128 rows ``(ceil(m / 128), ceil(k / 128))``.
    scale_b
        The same for B: a number, ``(1, n)``, ``(ceil(k / 128), n)`` or ``(ceil(k / 128), ceil(n / 128))``.
    dtype
        float32, float16 or bfloat16; the result is rounded once.
    device
        By default the current GPU, or the CPU if there is none.
    name
        The kernel; by default the fastest of precision ``"high"``. On Hopper GPUs that is ``"hopper_float8"``.

    Returns
    -------
    array
        ``(m, n)`` on the device.

    Raises
    ------
    TypeError
        If an operand is no 8-bit float.
    ValueError
        If shapes do not match, or a scale has none of the shapes above.
    """
    for x, which in ((a, "a"), (b, "b")):
        if native(x.dtype) not in FLOAT8 or x.ndim != 2:
            kinds = " or ".join(kind.name for kind in FLOAT8)
            raise TypeError(f"{which} is {x.dtype} with {x.ndim} dimensions: give one matrix of {kinds}")
    (m, n), k, out = product_shape(a.shape, b.shape), a.shape[1], np.dtype(dtype)
    if out.name not in ("float32", "float16", "bfloat16"):
        raise TypeError(f"a result cannot be {out}: ask for float32, float16 or bfloat16")
    kernel = select.select(Problem(m, k, n, native(a.dtype)), device or current(), "high", name=name)
    with kernel._on_device():
        rows = _factors(scale_a, m, k, "scale_a", kernel)
        columns = _factors(scale_b if np.ndim(scale_b) < 2 else scale_b.T, n, k, "scale_b", kernel)
        if isinstance(kernel, HopperFloat8Kernel) and 0 not in (m, k, n):
            return kernel.multiply_scaled(kernel.prepare_a(a), kernel.prepare_b(b), rows, columns, out)
        blocks = max(len(rows), len(columns))
        # without steps of k there may be no block
        total = None if blocks else kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None, wait=False)
        for i in range(blocks):
            part = slice(i * BLOCK, (i + 1) * BLOCK) if blocks > 1 else slice(None)
            each = kernel.multiply(kernel.prepare_a(a[:, part]), kernel.prepare_b(b[part]), None, wait=False)
            each = each * rows[min(i, len(rows) - 1), :, None] * columns[min(i, len(columns) - 1)]
            total = each if total is None else total + each
        return kernel.finish(total, 1, 0, None, out)


def _factors(scale: Any, lines: int, k: int, name: str, kernel: Kernel) -> Array:
    """Return ``(1, lines)`` or ``(ceil(k / 128), lines)`` float32 factors on the device, of rows of A or columns of B.

    ``scale`` is a number, or has a row for each line or for each 128 lines.
    """
    blocks = -(-k // BLOCK)
    factors = kernel._to_device(np.asarray(scale, np.float32) if np.ndim(scale) == 0 else scale)
    if factors.size == 1:
        return kernel._module.broadcast_to(factors.reshape(1, 1), (1, lines))
    coarse = -(-lines // BLOCK)
    if factors.ndim != 2 or factors.shape[0] not in (lines, coarse) or factors.shape[1] not in (1, blocks):
        along = "(rows, blocks of k)" if name == "scale_a" else "(columns, blocks of k), transposed,"
        raise ValueError(
            f"{name} has shape {factors.shape} {along}: give a number, or {lines} or {coarse} lines by 1 or {blocks} "
            f"blocks of {BLOCK} steps of k"
        )
    if factors.shape[0] != lines:
        factors = factors.repeat(BLOCK, axis=0)[:lines]
    return factors.T.astype(np.float32)
