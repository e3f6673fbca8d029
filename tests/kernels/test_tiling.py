from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from distmm_kernels.config import SUPPORTED
from distmm_kernels.testing import STRIDES, matrix
from distmm_kernels.tiling import PADDING, TILINGS, VECTOR_BYTES, WARP, Access, Tiling, access

every_type = pytest.mark.parametrize("name", TILINGS)


def test_every_supported_type_has_a_tiling():
    assert set(TILINGS) == {dtype.name for dtype in SUPPORTED}


@every_type
def test_vectors_are_of_16_bytes_and_tiles_fit_where_every_gpu_has_room(name):
    tiling, itemsize = TILINGS[name], np.dtype(name).itemsize
    assert tiling.vector * itemsize == VECTOR_BYTES
    assert 2 * tiling.depth * (tiling.pitch_a + tiling.pitch_b) * itemsize <= 48 * 1024
    assert tiling.threads * tiling.blocks <= 1024


@every_type
@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("wide", [False, True])
def test_the_threads_of_a_block_fetch_every_element_of_a_tile_once(name, operand, axis, wide):
    tiling = TILINGS[name]
    by = Access(axis, tiling.vector if wide else 1)
    fetch = tiling.fetch_a(by) if operand == "a" else tiling.fetch_b(by)
    taken = np.zeros((tiling.rows, tiling.depth) if operand == "a" else (tiling.depth, tiling.columns), int)
    for thread, offset, e in itertools.product(range(tiling.threads), fetch.offsets, range(by.width)):
        start = [thread // fetch.lanes, thread // fetch.lanes]
        start[axis] = thread % fetch.lanes * by.width + e
        taken[start[0] + offset[0], start[1] + offset[1]] += 1
    assert (taken == 1).all()


@every_type
@pytest.mark.parametrize("wide", [False, True])
def test_the_threads_of_a_warp_own_every_element_of_its_part_once(name, wide):
    tiling = TILINGS[name]
    width = tiling.vector if wide else 1
    owned = np.zeros((WARP[0] * tiling.thread_rows, WARP[1] * tiling.thread_columns), int)
    for row, column in itertools.product(range(WARP[0]), range(WARP[1])):
        for i, j in tiling.outputs(width):
            first = column * tiling.vector + j
            owned[row * tiling.vector + i, first : first + width] += 1
    assert (owned == 1).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 100}, "rows is 100, which must be a positive multiple of 32"),
        ({"columns": 64}, "columns is 64, which must be a positive multiple of 128"),
        ({"thread_rows": 6, "rows": 96}, "thread_rows is 6, which must be a positive multiple of 4"),
        ({"vector": 8}, f"padding of shared memory is {PADDING}"),
        ({"rows": 1024, "columns": 512}, "4096 threads a block, CUDA allows 1024"),
        ({"depth": 0}, "depth is 0, which must be a positive multiple of 2"),
        ({"depth": 6}, "cannot share a tile"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(TILINGS["float32"], **change)


def test_a_tiling_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TILINGS["float32"].depth = 16
    assert hash(TILINGS["float32"]) == hash(Tiling(128, 128, 8, 8, 16, 4))


def stack_access(values):
    return access(values.shape, values.strides, 4096, values.itemsize, 4)


def test_aligned_rows_and_columns_are_read_in_vectors():
    values = np.zeros((2, 12, 8), np.float32)
    assert stack_access(values) == Access(1, 4)
    assert stack_access(values.swapaxes(1, 2)) == Access(0, 4)
    assert stack_access(values[:, ::-1]) == Access(1, 4)
    assert stack_access(values[:, :, 4:]) == Access(1, 4)


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((1, 12, 9), np.float32),
        np.zeros((1, 12, 8), np.float32)[:, :, :6],
        np.zeros((1, 12, 8), np.float32)[:, :, ::-1],
        np.zeros((1, 12, 16), np.float32)[:, :, ::2],
        np.broadcast_to(np.float32(0), (1, 12, 8)),
    ],
    ids=["odd pitch", "ragged end", "reversed", "every other", "stride 0"],
)
def test_what_is_not_whole_aligned_vectors_is_read_by_elements(values):
    assert stack_access(values) == Access(1, 1)


def test_an_address_off_the_vector_is_read_by_elements():
    assert access((1, 4, 4), (64, 16, 4), 4100, 4, 4) == Access(1, 1)
    assert access((2, 4, 4), (68, 16, 4), 4096, 4, 4) == Access(1, 1)


@pytest.mark.parametrize("order", STRIDES)
def test_every_stride_has_an_access(order):
    values = matrix((1, 8, 12), "float32", 0, order=order)
    found = stack_access(values)
    assert found.axis == (0 if order == "F" else 1) or order == "broadcast"
    assert found.width == 1 or values.strides[1 + found.axis] == 4
