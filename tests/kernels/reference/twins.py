"""NumPy models of tensor-core kernels, with the same bits. With them, accuracy is measured without a GPU.

The arithmetic is that of MMA-Sim (arXiv 2511.10909), whose authors checked it against the hardware. An instruction
aligns all products and the accumulator to the largest exponent, truncates them 25 bits below it, adds them exactly, and
truncates the sum to float32. All of this rounds towards zero. So the error of a long chain grows with its length, not
with the square root of the length. A kernel with float32's accuracy must add the tensor core's sum to a float32 total
every few instructions (promotion).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from distmm_kernels.emulation.formats import (
    GRANULE,
    LARGEST_EXPONENT,
    NEAR_EXPONENT,
    SHARE,
    SMALL_EXPONENT,
    TF32_LARGEST_EXPONENT,
    TF32_SMALLEST_EXPONENT,
    TF32_TINY_EXPONENT,
    TOP,
    Guard,
)
from distmm_kernels.emulation.sparsity import FAR, FAR_BITS, SIXTEENTHS, Counts, counts
from distmm_kernels.tiles.hopper_tiles import STRETCH, STRETCH_OF_FLOAT8

__all__ = [
    "float8",
    "fma_chain",
    "fp16_counts",
    "fp16x3",
    "guards_of",
    "mma_sync_x3",
    "nearest_tf32",
    "one_product",
    "round_tf32",
    "split_fp16",
    "split_tf32",
    "tf32x3",
    "wgmma",
    "words",
]

Float32 = NDArray[np.float32]

KEPT = 25  # the tensor core keeps this many bits below the largest exponent
KEPT_OF_FLOAT8 = 13  # the same of 8-bit floats, and the bits of its sums
STEPS = {
    "float16": 16,
    "bfloat16": 16,
    "float32": 8,
    "float8_e4m3fn": 32,
    "float8_e5m2": 32,
}  # steps of k of one instruction; float32 is TF32 here


def split_fp16(x: Float32) -> tuple[NDArray[np.float16], NDArray[np.float16], Float32, Guard]:
    """Split rows ``(rows, k)`` of one granule: ``x = (hi + lo) * scale``, nearly.

    Returns
    -------
    hi, lo
        ``(rows, k)``. Not valid if another guard than `Guard.SPARSE` is raised.
    scale
        ``(rows,)``, powers of two.
    """
    top, finite, raw, exponent = _tops(x)
    guard = Guard(0)
    if not finite.all() or (raw > LARGEST_EXPONENT).any():
        guard |= Guard.OVERFLOW
    if (top[finite] > 0).any() and (raw[finite & (top > 0)] < -LARGEST_EXPONENT).any():
        guard |= Guard.UNDERFLOW
    guard |= guards_of(_fp16_words(x, exponent), x.shape[1])
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x * np.ldexp(np.float32(1), TOP - exponent)[:, None]
        hi = scaled.astype(np.float16)
        lo = (scaled - hi.astype(np.float32)).astype(np.float16)
    return hi, lo, np.ldexp(np.float32(1), exponent - TOP), guard


def _tops(x: Float32) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.intp], NDArray[np.intp]]:
    """Return for each row: its maximum, whether it is finite, the maximum's exponent, and the exponent of its scale."""
    top = np.max(np.abs(x), axis=1, initial=0.0)
    finite = np.asarray(np.isfinite(x).all(axis=1))
    raw = np.where(finite, _exponent(np.where(finite, top, 1.0)), 128)
    return top, finite, raw, np.where(top == 0, 0, np.clip(raw, -LARGEST_EXPONENT, LARGEST_EXPONENT))


def _fp16_words(x: Float32, exponent: NDArray[np.intp]) -> NDArray[np.uint32]:
    one = np.ldexp(1.0, exponent - TOP)[:, None]
    return words(x, one * 2.0**SMALL_EXPONENT, one * 2.0**NEAR_EXPONENT)


def fp16_counts(x: Float32) -> Counts:
    """Count the small and far numbers of rows ``(rows, k)`` of one granule, which `split_fp16` splits."""
    return next(counts(_fp16_words(x, _tops(x)[3])[None, None], (x.shape[1],)))


def words(x: NDArray[Any], small: Any, near: Any) -> NDArray[np.uint32]:
    """Return the words that count small and far numbers of rows ``(rows, k)`` (`distmm_kernels.emulation.sparsity`).

    Parameters
    ----------
    small, near
        For each row: the least magnitude that is not small, and the least that is near.
    """
    few, many = ((x != 0) & (np.abs(x) < small)).sum(axis=1), (np.abs(x) < near).sum(axis=1)
    return np.asarray(few << FAR_BITS | many, np.uint32)


def guards_of(words: NDArray[np.uint32], length: int) -> Guard:
    """Return the guards that are raised for rows with these words."""
    small, far = words >> FAR_BITS, words & FAR
    too_small = Guard.RANGE if (SHARE * small > length - far).any() else Guard(0)
    return too_small | (Guard.SPARSE if (16 * far > SIXTEENTHS * length).any() else Guard(0))


def split_tf32(x: Float32) -> tuple[Float32, Float32, Guard]:
    """Split ``(rows, k)`` of one granule into two TF32 numbers: ``x = hi + lo``, nearly."""
    guard = Guard(0)
    with np.errstate(invalid="ignore", over="ignore"):
        if not (np.abs(x) < np.ldexp(1.0, TF32_LARGEST_EXPONENT)).all():
            guard |= Guard.OVERFLOW
        if Guard.RANGE in guards_of(words(x, *[2.0**TF32_SMALLEST_EXPONENT] * 2), x.shape[1]):
            guard |= Guard.UNDERFLOW
        if ((x != 0) & (np.abs(x) < 2.0**TF32_TINY_EXPONENT)).any():
            guard |= Guard.UNDERFLOW
        hi = round_tf32(x)
        return hi, round_tf32(x - hi), guard


def round_tf32(x: Float32) -> Float32:
    """Round to 10 mantissa bits, ties away from zero, as ``cvt.rna.tf32.f32`` does. NaN and infinity are kept."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x).astype(np.float32)


def nearest_tf32(x: Float32) -> Float32:
    """Round to 10 mantissa bits, ties to even, as the tensor memory accelerator does. A NaN becomes a quiet NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nan = ((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)).astype(np.uint32)
    half = np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
    kept = (bits + (np.uint32(1) - nan) * half | nan << np.uint32(22)) & np.uint32(0xFFFFE000)
    rounded: Float32 = kept.view(np.float32)
    return rounded


def wgmma(acc: Float32, a: NDArray[Any], b: NDArray[Any], kept: int | None = None) -> Float32:
    """Add one instruction's products: ``acc (m, n) + a (m, k) @ b (k, n)``.

    The operands are float16, bfloat16, 8-bit floats or float32. Of float32, the lower 13 bits are ignored, as for TF32.
    The exponent of a product is the sum of its factors' exponents, before normalisation.
    """
    float8 = a.dtype.itemsize == 1
    kept = kept or (KEPT_OF_FLOAT8 if float8 else KEPT)
    a, b = _as_read(a), _as_read(b)
    products = a[:, :, None] * b[None, :, :]  # exact in float64
    exponents = _exponent(a)[:, :, None] + _exponent(b)[None, :, :]
    exponents = np.where(products == 0, -(10**6), exponents)
    top = np.maximum(exponents.max(axis=1), np.where(acc == 0, -(10**6), _exponent(acc)))
    unit = np.where(top == -(10**6), 0, top) - kept
    terms = np.trunc(np.ldexp(products, -unit[:, None, :])).sum(axis=1) + np.trunc(
        np.ldexp(acc.astype(np.float64), -unit)
    )
    total = _towards_zero(np.ldexp(terms, unit))
    return (total.view(np.uint32) & np.uint32(0xFFFFFC00)).view(np.float32) if float8 else total


def fp16x3(a: Float32, b: Float32, c: Float32 | None = None, promotion: int | None = 64) -> Float32:
    """Return ``c + a @ b`` as the kernel ``fp16x3`` computes it, one granule of k after another.

    Parameters
    ----------
    promotion
        Steps of k after which the tensor core's sum is added to a float32 total; None: never.
    """
    d = np.zeros((a.shape[0], b.shape[1]), np.float32) if c is None else c
    for first in range(0, a.shape[1], GRANULE):
        a_hi, a_lo, rows, _ = split_fp16(a[:, first : first + GRANULE])
        b_hi, b_lo, columns, _ = split_fp16(b[first : first + GRANULE].T)
        total = _promoted(np.zeros_like(d), (a_lo, b_hi.T), (a_hi, b_lo.T), (a_hi, b_hi.T), promotion=promotion)
        scaled = (total * rows[:, None]) * columns  # exact unless the result is subnormal
        d = scaled if c is None and first == 0 else d + scaled
    return d


def mma_sync_x3(a: Float32, b: Float32, *, halves: str = "float16", kept: int = KEPT, step: int = 16) -> Float32:
    """Return ``a @ b`` of one granule as `mma_sync_fp16x3` computes it, except for the last bits.

    The sum of three products is added to the float32 total after each instruction's steps of k.

    Parameters
    ----------
    kept, step
        Model of the tensor core: bits that it keeps below the largest exponent, and steps of k that it adds at the same
        time. On an A100: 24 bits, and half the steps of an instruction.
    """
    if halves == "float16":
        split: tuple[NDArray[Any], ...] = *split_fp16(a)[:3], *split_fp16(b.T)[:3]
    else:
        split = *split_tf32(a)[:2], np.ones(len(a), np.float32), *split_tf32(b.T)[:2], np.ones(b.shape[1], np.float32)
    a_hi, a_lo, rows, b_hi, b_lo, columns = split
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for start in range(0, a.shape[1], STEPS[a_hi.dtype.name]):
        acc, end = np.zeros_like(total), min(start + STEPS[a_hi.dtype.name], a.shape[1])
        for left, right in ((a_lo, b_hi), (a_hi, b_lo), (a_hi, b_hi)):
            for first in range(start, end, step):
                last = min(first + step, end)
                acc = wgmma(acc, left[:, first:last], right[:, first:last].T, kept)
        total = total + acc
    scaled: Float32 = (total * rows[:, None]) * columns
    return scaled


def tf32x3(a: Float32, b: Float32, c: Float32 | None = None, promotion: int | None = 32) -> Float32:
    """Return ``c + a @ b`` as the kernel ``tf32x3`` computes it; the parameters are those of `fp16x3`."""
    d = np.zeros((a.shape[0], b.shape[1]), np.float32) if c is None else c
    for first in range(0, a.shape[1], GRANULE):
        (a_hi, a_lo, _), (b_hi, b_lo, _) = (split_tf32(x[first : first + GRANULE]) for x in (a.T, b))
        pairs = (a_lo.T, b_hi), (a_hi.T, b_lo), (a_hi.T, b_hi)
        d = d + _promoted(np.zeros_like(d), *pairs, promotion=promotion)
    return d


def one_product(a: NDArray[Any], b: NDArray[Any], c: Float32 | None = None, promotion: int | None = STRETCH) -> Float32:
    """Return ``c + a @ b`` as the kernels of one product compute it: float16, bfloat16, or float32, rounded to TF32.

    The parameters are those of `fp16x3`.
    """
    if a.dtype == np.float32:
        a, b = nearest_tf32(a), nearest_tf32(b)
    total = np.zeros((a.shape[0], b.shape[1]), np.float32) if c is None else c
    return _promoted(total, (a, b), promotion=promotion)


def float8(a: NDArray[Any], b: NDArray[Any], c: Float32 | None = None) -> Float32:
    """Return ``c + a @ b`` of 8-bit floats as the kernel ``hopper_float8`` computes it."""
    return one_product(a, b, c, STRETCH_OF_FLOAT8)


def fma_chain(a: Float32, b: Float32, c: Float32 | None = None) -> Float32:
    """Return ``c + a @ b`` by a chain of fused multiply-adds, as ``"ieee"`` does.

    Each sum is rounded to float64, then to float32. This differs from a fused multiply-add in one case in 2^29.
    """
    d = np.zeros((a.shape[0], b.shape[1]), np.float32) if c is None else c
    for k in range(a.shape[1]):
        d = (a[:, k, None].astype(np.float64) * b[k].astype(np.float64) + d).astype(np.float32)
    return d


def _promoted(total: Float32, *pairs: tuple[NDArray[Any], NDArray[Any]], promotion: int | None) -> Float32:
    """Add the products of the pairs to ``total``, with a promotion every ``promotion`` steps of k.

    Between promotions, one pair is added after another, so pairs with small products come first.
    """
    k = pairs[0][0].shape[1]
    stretch, step = promotion or max(k, 1), STEPS[pairs[0][0].dtype.name]
    for start in range(0, k, stretch):
        acc = np.zeros_like(total)
        for left, right in pairs:
            for first in range(start, min(start + stretch, k), step):
                last = min(first + step, start + stretch)
                acc = wgmma(acc, left[:, first:last], right[first:last])
        total = total + acc
    return total


def _as_read(x: NDArray[Any]) -> NDArray[np.float64]:
    if x.dtype == np.float32:
        x = (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return x.astype(np.float64)


def _exponent(x: NDArray[Any]) -> NDArray[np.intp]:
    """Return floor(log2 |x|), exact. For zero the result is arbitrary."""
    return np.asarray(np.frexp(x)[1].astype(np.intp) - 1)


def _towards_zero(x: NDArray[np.float64]) -> Float32:
    nearest = x.astype(np.float32)
    over = np.abs(nearest.astype(np.float64)) > np.abs(x)
    return np.where(over, np.nextafter(nearest, np.float32(0)), nearest).astype(np.float32)
