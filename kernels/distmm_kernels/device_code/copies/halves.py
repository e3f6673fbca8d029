"""Device functions of the kernels that split operands: scales, guards, addresses, and writing the parts of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmm_kernels.device_code.copies import split
from distmm_kernels.device_code.copies.split import magnitude, power_of_two
from distmm_kernels.device_code.emit import f32, i32, inlined, u32, u64
from distmm_kernels.emulation import formats
from distmm_kernels.emulation.formats import GRANULE, TOP, Format, Guard
from distmm_kernels.emulation.sparsity import FAR, FAR_BITS, SIXTEENTHS

TINY = u32((formats.TF32_TINY_EXPONENT + 127) << 23)  # bits of the smallest magnitude that TF32 halves represent
LARGE = u32((formats.TF32_LARGEST_EXPONENT + 127) << 23)  # bits of the first magnitude too large for TF32 halves
OVERFLOW, UNDERFLOW, RANGE, SPARSE = (u32(int(guard)) for guard in Guard)
GUARDS = len(Guard)


@inlined
def exponent_of(top):
    """Return the exponent of the scale of a row with this maximum (bits), within the limits; 0 for a row of zeros."""
    exponent = i32(top >> u32(23)) - i32(127)
    exponent = min(max(exponent, i32(-formats.LARGEST_EXPONENT)), i32(formats.LARGEST_EXPONENT))
    return exponent if top != u32(0) else i32(0)


@inlined
def scale_of(top):
    """Return the scale of a row with this maximum (bits)."""
    return power_of_two(exponent_of(top) - i32(TOP))


@inlined
def inverse_scale_of(top):
    """Return the factor that scales a row with this maximum (bits)."""
    return power_of_two(i32(TOP) - exponent_of(top))


@inlined
def guard_of(top):
    """Return the guards for a maximum (bits) that cannot be scaled."""
    if top >= u32((formats.LARGEST_EXPONENT + 128) << 23):
        return OVERFLOW
    if u32(0) < top and top < u32((127 - formats.LARGEST_EXPONENT) << 23):
        return UNDERFLOW
    return u32(0)


@inlined
def word_of(x, scaled, small, far):
    """Return what a number adds to its row's word; ``small``, ``far``: bits of the magnitudes that bound both."""
    size = magnitude(scaled)
    word = u32(1) if size < far else u32(0)
    return word + u32(1 << FAR_BITS) if size < small and x != f32(0) else word


@inlined
def tiny_guard(x):
    """Return the guard that a number raises which is too small for TF32 halves, alone in its row."""
    size = magnitude(x)
    return UNDERFLOW if u32(0) < size and size < TINY else u32(0)


@inlined
def guards_of_counts(word, length, too_small, sparse):
    """Return the guards that a row's word raises: ``too_small`` for many small numbers, ``sparse`` for many far ones.

    A word only grows, so a guard that it raises stays raised.
    """
    small, far = word >> u32(FAR_BITS), word & u32(FAR)
    guard = too_small if u32(formats.SHARE) * small > length - far else u32(0)
    return guard | sparse if u32(16) * far > u32(SIXTEENTHS) * length else guard


@inlined
def raise_guards(flags, granule, guard):
    """Set a granule's flags in host memory: one word for each guard, since updates there are not atomic."""
    for i in range(GUARDS):
        if guard & u32(1 << i) != u32(0):
            split.store_word(flags + (granule * u64(GUARDS) + u64(i)) * u64(4), u32(1))


@inlined
def line_of(matrix, row, granule, lines, k, granule_step, ld, last_ld):
    """Return the first element of a row's granule in a k-major operand."""
    pitch = ld if (granule + u64(1)) * u64(GRANULE) < k else last_ld
    return granule * granule_step + (matrix * lines + row) * pitch


def small_below(form: Format) -> Any:
    """Bits of the magnitude below which a number, scaled if the format is, loses bits or makes products that vanish."""
    return u32((formats.SMALL_EXPONENT if form.scaled else formats.TF32_SMALLEST_EXPONENT) + 127 << 23)


def far_below(form: Format) -> Any:
    """Bits of the magnitude below which a number is far from its row's largest: in TF32, if it is small or zero."""
    return u32(formats.NEAR_EXPONENT + 127 << 23) if form.scaled else small_below(form)


def writer4(form: Format) -> Callable[..., None]:
    """Make ``(hi, lo, x0, x1, x2, x3)``: write the parts of four neighbours; ``lo`` is the offset from hi to lo."""

    def halves(hi, lo, x0, x1, x2, x3):
        part = split.split_half(x0, x1, x2, x3)
        split.store2(hi, part[0], part[1])
        split.store2(hi + lo, part[2], part[3])

    def pairs(hi, lo, x0, x1, x2, x3):
        p0, p1, p2, p3 = split.split_tf32(x0), split.split_tf32(x1), split.split_tf32(x2), split.split_tf32(x3)
        split.store4(hi, p0[0], p1[0], p2[0], p3[0])
        split.store4(hi + lo, p0[1], p1[1], p2[1], p3[1])

    return inlined(halves if form.scaled else pairs)
