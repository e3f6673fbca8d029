from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm_kernels.formats import FP16_PAIR, GRANULE, TF32, TF32_PAIR, granules, place, warps_of
from distmm_kernels.splits import Layout, Parts

ITEM = 4


def placed(array):
    return place(array.shape, array.strides, array.__array_interface__["data"][0], array.itemsize)


def aligned_zeros(shape):
    """Zeros that begin on 16 bytes."""
    memory = np.zeros(int(np.prod(shape)) + 4, np.float32)
    first = -(memory.__array_interface__["data"][0] // ITEM) % 4
    return memory[first : first + int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize(
    ("cut", "contiguous", "aligned"),
    [
        ((slice(None), slice(None), slice(None)), "k", True),
        ((slice(None), slice(None), slice(4, None)), "k", True),
        ((slice(None), slice(None), slice(1, None)), "k", False),
        ((slice(None), slice(None), slice(None, None, 2)), None, False),
        ((slice(None), slice(None), slice(None, None, -1)), None, False),
        ((slice(None), slice(None, None, -1), slice(None)), "k", True),
        ((slice(None), slice(None), slice(3, 4)), "k", False),
        ((slice(None), slice(2, 3), slice(None, None, 2)), "rows", False),
    ],
)
def test_views_are_read_in_place_where_an_axis_is_contiguous(cut, contiguous, aligned):
    x = aligned_zeros((3, 8, 16))[cut]
    assert (placed(x).contiguous, placed(x).aligned and contiguous is not None) == (contiguous, aligned)
    if x.shape[1] > 1 and x.shape[2] > 1:
        turned = {"k": "rows", "rows": "k", None: None}[contiguous]
        assert placed(x.swapaxes(1, 2)).contiguous == turned


@given(st.tuples(*[st.integers(1, 9)] * 3), st.integers(0, 4), st.booleans())
def test_aligned_means_every_four_neighbours_lie_on_16_bytes(shape, offset, turned):
    whole = aligned_zeros((shape[0], shape[1], shape[2] + offset))
    x = whole[:, :, offset:]
    x = x.swapaxes(1, 2) if turned else x
    placement = placed(x)
    axis = {"k": 2, "rows": 1}[placement.contiguous]
    starts = np.moveaxis(x, axis, 2)[:, :, :1]
    addresses = [starts[i].__array_interface__["data"][0] for i in np.ndindex(starts.shape[:2])]
    assert placement.aligned == all(address % 16 == 0 for address in addresses)


@given(st.integers(0, 5 * GRANULE))
def test_granules_cover_k(k):
    assert (granules(k) - 1) * GRANULE < k <= granules(k) * GRANULE or k == granules(k) == 0


@given(st.integers(1, 5 * GRANULE))
def test_the_warps_of_a_row_hold_a_granule_of_it_and_are_no_more_than_needed(k):
    held = min(k, GRANULE)
    warps = warps_of(k)
    assert 8 % warps == 0
    assert warps * 1024 >= held
    assert warps == 1 or warps // 2 * 1024 < held


@given(st.sampled_from([FP16_PAIR, TF32_PAIR, TF32]), st.integers(1, 4), st.integers(1, 300),
       st.integers(1, 3 * GRANULE), st.booleans())  # fmt: skip
def test_pieces_tile_the_memory_of_an_operand(form, batch, rows, k, by_rows):
    at = Layout.of(form, batch, rows, k, by_rows)
    parts = Parts(form, at, type("Memory", (), {"ptr": 1 << 20}))
    itemsize, spans = form.dtype.itemsize, []
    for i in range(granules(k)):
        hi, lo, scales, scales_step = parts.piece(i)
        length = min(GRANULE, k - i * GRANULE)
        assert hi[1:4] == ((batch, rows, length) if at.k_major else (batch, length, rows))
        assert all(number % 16 == 0 for part in (hi, lo) for number in (part.address, part.pitch, part.step))
        assert hi.columns * itemsize <= hi.pitch
        if at.k_major and form.guarded:
            spans += [(hi.address, hi.address + batch * rows * hi.pitch)]
        last = hi.address + (batch - 1) * hi.step + (hi.rows - 1) * hi.pitch + hi.columns * itemsize
        assert last <= (1 << 20) + (at.lo or at.scales)
        assert lo.address - hi.address == at.lo
        if form.scaled:
            assert (1 << 20) + at.scales <= scales
            assert scales + (batch - 1) * scales_step + 4 * (rows + 256) <= (1 << 20) + at.maxima
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert at.lo <= at.scales <= at.maxima <= at.weights <= at.end
