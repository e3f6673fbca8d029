"""The kernels that split float32 operands, on a real GPU, against their NumPy twins: the same bits, the same guards."""

from __future__ import annotations

import numpy as np
import pytest

from distmm_kernels.emulation.formats import FP16_PAIR, GRANULE, TF32_PAIR, Guard, granules
from tests.kernels.reference import twins

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

FORMS = pytest.mark.parametrize("form", [FP16_PAIR, TF32_PAIR], ids=lambda form: form.name)
# (rows, k): single, around vectors of 4 and tiles of 32 and 128, around stretches of 256, and around the granule
SHAPES = [(1, 1), (3, 2), (127, 5), (128, 64), (130, 255), (33, 257), (65, 1024), (9, 1025), (5, 4100), (2, 8192),
          (3, 8193), (2, 16390)]  # fmt: skip


def as_array(parts, part):
    """A part of a piece."""
    import cupy

    pointer = parts.memory + (part.address - parts.memory.ptr)
    return cupy.ndarray(part.shape, parts.format.dtype, pointer, part.strides)


def draw(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def laid(values, order):
    """The stack ``(batch, rows, k)`` on the GPU, lying as ``order`` says."""
    import cupy

    x = cupy.asarray(values)
    if order == "k":
        return x
    if order == "rows":
        return cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    whole = cupy.full([size + 3 for size in x.shape], 77, np.float32)
    if order == "k, off by one":
        view = whole[1 : 1 + x.shape[0], 1 : 1 + x.shape[1], 1 : 1 + x.shape[2]]
    elif order == "rows, off by one":
        whole = whole.swapaxes(1, 2).copy().swapaxes(1, 2)
        view = whole[1 : 1 + x.shape[0], 1 : 1 + x.shape[1], 1 : 1 + x.shape[2]]
    elif order == "reversed":
        return cupy.ascontiguousarray(x[:, ::-1, ::-1])[:, ::-1, ::-1]
    else:
        raise AssertionError(order)
    view[...] = x
    return view


ORDERS = pytest.mark.parametrize("order", ["k", "rows", "k, off by one", "rows, off by one", "reversed"])


def split(gpu, stack, form):
    from distmm_kernels.emulation.splits import splitter

    parts, found = splitter(form, gpu)(stack)
    return parts, found.guards


def expected(matrix, form):
    """Parts ``(hi, lo, scale)`` of one granule of a matrix ``(rows, k)``, and the guard."""
    if form is FP16_PAIR:
        return twins.split_fp16(matrix)
    hi, lo, guard = twins.split_tf32(matrix)
    return hi, lo, None, guard


def same_bits(got, want):
    return np.array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))


def check(parts, guards, values, form):
    batch, rows, k = values.shape
    assert len(guards) == granules(k)
    for g, guard in enumerate(guards):
        wanted = [expected(matrix[:, g * GRANULE : (g + 1) * GRANULE], form) for matrix in values]
        assert guard == np.bitwise_or.reduce([int(w[3]) for w in wanted]), g
        if guard == Guard.SPARSE:
            each = [twins.fp16_counts(matrix[:, g * GRANULE : (g + 1) * GRANULE]) for matrix in values]
            assert parts.counts[g] == tuple(max(some) for some in zip(*each, strict=True))
        piece = parts.piece(g)
        hi, lo = (as_array(parts, part) for part in (piece.hi, piece.lo))
        assert hi.shape == ((batch, rows, length(k, g)) if parts.k_major else (batch, length(k, g), rows))
        for z, (want_hi, want_lo, want_scale, raised) in enumerate(wanted):
            if raised & ~Guard.SPARSE:
                continue
            for part, want in ((hi, want_hi), (lo, want_lo)):
                got = part[z].get() if parts.k_major else part[z].get().T
                assert same_bits(np.ascontiguousarray(got), want)
            if want_scale is not None:
                assert same_bits(scales_of(parts, piece, z, rows), want_scale)


def length(k, granule):
    return min(GRANULE, k - granule * GRANULE)


def scales_of(parts, piece, matrix, rows):
    import cupy

    address = piece.scales + matrix * piece.scales_step
    return cupy.ndarray((rows,), np.float32, parts.memory + (address - parts.memory.ptr)).get()


@FORMS
@ORDERS
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_have_the_bits_of_the_twin(gpu, form, order, shape):
    values = draw((1, *shape))
    parts, guards = split(gpu, laid(values, order), form)
    assert all(number % 16 == 0 for part in parts.piece(0)[:2] for number in (part.address, part.pitch))
    check(parts, guards, values, form)


@FORMS
@ORDERS
def test_stacks_are_split_matrix_by_matrix(gpu, form, order):
    values = draw((5, 35, 70))
    check(*split(gpu, laid(values, order), form), values, form)


@FORMS
@pytest.mark.parametrize("order", ["k", "rows"])
@pytest.mark.parametrize("granule", [0, 1])
@pytest.mark.parametrize("value", [np.inf, np.nan, 2.0**61, 2.0**64, 2.0**-61, 2.0**-130, 0.0])
def test_what_cannot_be_held_raises_the_guard_of_its_granule(gpu, form, order, granule, value):
    values = np.abs(draw((2, 6, GRANULE + 500))) + np.float32(0.5)
    values[1, 4, granule * GRANULE : (granule + 1) * GRANULE : 50] = value
    if value < 1:  # a row of such numbers
        values[1, 4, granule * GRANULE : (granule + 1) * GRANULE] = value
    parts, guards = split(gpu, laid(values, order), form)
    check(parts, guards, values, form)
    assert guards[1 - granule] == 0


@FORMS
@pytest.mark.parametrize("order", ["k", "rows"])
@pytest.mark.parametrize("zeros", [0, 300])
@pytest.mark.parametrize("more", [0, 1])
def test_the_share_of_small_numbers_is_counted_exactly(gpu, form, order, zeros, more):
    k = 65 * 20 + zeros + more
    values = np.ones((1, 40, k), np.float32)
    values[0, 7, :zeros] = 0
    values[0, 7, zeros : zeros + 20 + more] = 2.0**-70
    parts, guards = split(gpu, laid(values, order), form)
    check(parts, guards, values, form)
    assert (guards[0] != 0) == bool(more)


@FORMS
def test_nothing_is_written_outside_and_nothing_is_left_out(gpu, form):
    import cupy

    values = draw((1, 37, 41))
    for order in ("k", "rows"):
        poison = cupy.full(1 << 20, np.nan, np.float32)
        del poison  # its memory is what the parts are made of
        check(*split(gpu, laid(values, order), form), values, form)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_stacks_need_no_kernel(gpu, shape):
    import cupy

    for form in (FP16_PAIR, TF32_PAIR):
        parts, guards = split(gpu, cupy.zeros(shape, np.float32), form)
        assert parts.piece(0).hi.matrices == shape[0]
        assert guards == (Guard(0),) * granules(shape[2])
