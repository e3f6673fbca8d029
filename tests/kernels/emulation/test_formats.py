from __future__ import annotations

import gc
import itertools
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm_kernels.emulation.formats import FP16_PAIR, GRANULE, TF32_PAIR, granules, warps_of
from distmm_kernels.emulation.launches import Found
from distmm_kernels.emulation.splits import Layout, Parts


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


@given(st.sampled_from([FP16_PAIR, TF32_PAIR]), st.integers(1, 4), st.integers(1, 300),
       st.integers(1, 3 * GRANULE), st.booleans())  # fmt: skip
def test_pieces_tile_the_memory_of_an_operand(form, batch, rows, k, k_major):
    at = Layout.of(form, batch, rows, k, k_major)
    parts = Parts(form, at, type("Memory", (), {"ptr": 1 << 20}))
    itemsize, spans = form.dtype.itemsize, []
    for i in range(granules(k)):
        hi, lo, scales, scales_step = parts.piece(i)
        length = min(GRANULE, k - i * GRANULE)
        assert hi.shape == ((batch, rows, length) if at.k_major else (batch, length, rows))
        assert all(number % 16 == 0 for part in (hi, lo) for number in (part.address, part.pitch, part.step))
        assert hi.columns * itemsize <= hi.pitch
        if at.k_major:
            spans += [(hi.address, hi.address + batch * rows * hi.pitch)]
        last = hi.address + (batch - 1) * hi.step + (hi.rows - 1) * hi.pitch + hi.columns * itemsize
        assert last <= (1 << 20) + (at.lo or at.scales)
        assert lo.address - hi.address == at.lo
        if form.scaled:
            assert (1 << 20) + at.scales <= scales
            assert scales + (batch - 1) * scales_step + 4 * (rows + 256) <= (1 << 20) + at.maxima
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert at.lo <= at.scales <= at.maxima <= at.words <= at.end


def test_guards_without_memory_end_without_another_error(monkeypatch):
    def alloc(size):
        raise MemoryError

    cuda = SimpleNamespace(alloc_pinned_memory=alloc, Event=lambda **_: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with pytest.raises(MemoryError):
        Found(1)
    gc.collect()
    assert ignored == []
