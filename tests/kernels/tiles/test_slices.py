"""Slices of k: each step of k once and in order, where they begin, and which products are sliced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm_kernels.tiles import slices
from distmm_kernels.tiles.hopper_tiles import ROWS, STRETCH, HopperTile
from distmm_kernels.tiles.hopper_widths import best_columns
from distmm_kernels.tiles.slices import WORKSPACE, at_once, count, place, runs

SIZES = st.integers(1, 10**5)
PRODUCTS = st.sampled_from([1, 3])


@given(k=st.integers(1, 50 * STRETCH), batch=st.integers(1, 4))
def test_slices_cover_k_once_in_order_and_begin_where_k_says(k, batch):
    found = [place(np.uint32(z), np.uint32(k)) for z in range(batch * count(k))]
    starts = [range(0, k, STRETCH)[i] for i in range(count(k))]
    assert [(int(matrix), int(first)) for matrix, first in found] == [(b, s) for b in range(batch) for s in starts]


@given(slices=st.integers(1, 300), together=st.integers(1, 300))
def test_runs_cover_slices_once_in_order(slices, together):
    found = list(runs(slices, together))
    assert [i for first, after in found for i in range(first, after)] == list(range(slices))
    assert all(0 < after - first <= together for first, after in found)


@given(m=SIZES, n=SIZES, slices=st.integers(2, 10**5), batch=st.integers(1, 300), products=PRODUCTS)
def test_sums_and_a_total_fit_in_the_workspace_and_time_is_saved(m, n, slices, batch, products):
    together = at_once(m, n, slices, batch, products, 132, 192)
    assert 1 <= together <= slices
    if together > 1:
        assert 4 * batch * (together + 1) * m * (n + -n % 4) <= WORKSPACE
        tiles = batch * -(-m // ROWS) * -(-n // 192)
        assert tiles < 4 * 132, "so many tiles leave few multiprocessors idle"
        columns = best_columns(m, n, batch * together, products, 132, 256 if products == 1 else 192)
        HopperTile("float16", "float32", columns, products=products, sliced=products == 1)


@pytest.mark.parametrize("products", [1, 3])
@pytest.mark.parametrize(("m", "n", "k"), [(8192, 8192, 2**16), (4096, 4096, 2**16), (16384, 512, 2**16)])
def test_large_products_are_not_sliced(m, n, k, products):
    assert at_once(m, n, count(k), 1, products, 132, 192) == 1


@pytest.mark.parametrize("products", [1, 3])
@pytest.mark.parametrize(("n", "k", "blocks"), [(512, 2**16, 128), (256, 2**18, 128), (128, 2**20, 128)])
def test_few_tiles_of_deep_k_fill_an_h200(products, n, k, blocks):
    together = at_once(n, n, count(k), 1, products, 132, 192)
    columns = best_columns(n, n, together, products, 132, 192)
    assert -(-n // ROWS) * -(-n // columns) * together == blocks


def test_a_very_deep_product_is_sliced_in_few_equal_runs():
    together = at_once(512, 512, count(2**20), 1, 1, 132, 192)
    assert [after - first for first, after in runs(count(2**20), together)] == [together] * 4
    assert slices.count(STRETCH) == 1
    assert slices.count(STRETCH + 1) == 2
