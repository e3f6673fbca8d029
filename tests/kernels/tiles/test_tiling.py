from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from distmm_kernels.config import SUPPORTED
from distmm_kernels.layout.vectors import VECTOR_BYTES
from distmm_kernels.tiles.tiling import TILINGS, WARP, lane_place, tiling_for

every_tiling = pytest.mark.parametrize(
    ("name", "tiling"), [(name, tiling) for name, tilings in TILINGS.items() for tiling in tilings]
)
LARGE, SMALL = TILINGS["float32"]


def test_every_real_type_has_tilings_the_largest_first():
    assert set(TILINGS) == {dtype.name for dtype in SUPPORTED if dtype.kind != "c"}
    for large, small in TILINGS.values():
        assert large.rows * large.columns > small.rows * small.columns


@every_tiling
def test_vectors_are_of_16_bytes_and_tiles_fit_where_every_gpu_has_room(name, tiling):
    itemsize = np.dtype(name).itemsize
    assert tiling.vector * itemsize == VECTOR_BYTES
    assert tiling.shared_bytes <= 48 * 1024
    assert tiling.shared_bytes * tiling.blocks <= 99 * 1024 + 1024 * tiling.blocks, "sm_120 has 100 KB"
    assert tiling.threads * tiling.blocks <= 1024


@every_tiling
@pytest.mark.parametrize("operand", [0, 1])
def test_the_threads_of_a_block_copy_every_element_of_a_tile_once(name, tiling, operand):
    taken = np.zeros((tiling.depth, (tiling.rows, tiling.columns)[operand]), int)
    for thread, step, e in itertools.product(range(tiling.threads), tiling.copies(operand), range(tiling.vector)):
        k, vector = divmod(thread, tiling.lanes(operand))
        taken[k + step, vector * tiling.vector + e] += 1
    assert (taken == 1).all()


def test_the_lanes_of_a_warp_have_a_place_each():
    assert sorted(map(lane_place, range(32))) == list(itertools.product(range(WARP[0]), range(WARP[1])))


@pytest.mark.parametrize("axis", [0, 1])
def test_half_a_warp_reads_in_one_pass_what_its_lanes_share_in_pairs(axis):
    # of the two lowest bits of a lane, one must leave the row as it is and the other the column
    for half in (range(16), range(16, 32)):
        assert any(all(lane_place(lane)[axis] == lane_place(lane ^ bit)[axis] for lane in half) for bit in (1, 2))
        places = {lane_place(lane)[axis] for lane in half}
        assert len(places) * VECTOR_BYTES <= 128, "32 banks of 4 bytes"


@every_tiling
@pytest.mark.parametrize("wide", [False, True])
def test_the_threads_of_a_warp_own_every_element_of_its_part_once(name, tiling, wide):
    width = tiling.vector if wide else 1
    owned = np.zeros((WARP[0] * tiling.thread_rows, WARP[1] * tiling.thread_columns), int)
    for (row, column), (i, j) in itertools.product(map(lane_place, range(32)), tiling.outputs(width)):
        first = column * tiling.vector + j
        owned[row * tiling.vector + i, first : first + width] += 1
    assert (owned == 1).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 100}, "rows is 100, which must be a positive multiple of 32"),
        ({"columns": 64}, "columns is 64, which must be a positive multiple of 128"),
        ({"thread_rows": 6, "rows": 96}, "thread_rows is 6, which must be a positive multiple of 4"),
        ({"rows": 1024, "columns": 512}, "4096 threads a block, CUDA allows 1024"),
        ({"depth": 0}, "depth is 0, which must be a positive multiple of 2"),
        ({"depth": 6}, "cannot be divided evenly"),
        ({"stages": 1}, "1 stages.*give 2 or more"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(LARGE, **change)


def test_a_tiling_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LARGE.depth = 16
    assert hash(LARGE) == hash(dataclasses.replace(LARGE))


@pytest.mark.parametrize(
    ("m", "n", "batch", "expected"),
    [
        (8192, 8192, 1, LARGE),
        (64, 64, 1, SMALL),
        (512, 512, 1, SMALL),  # 16 large tiles would leave 116 of 132 multiprocessors idle
        (512, 512, 64, LARGE),
        (1, 100_000, 1, SMALL),  # a large tile would be empty for the most part
        (4096, 4096, 1, LARGE),
    ],
)
def test_small_products_take_small_tiles(m, n, batch, expected):
    assert tiling_for(TILINGS["float32"], m, n, batch, 132) is expected
