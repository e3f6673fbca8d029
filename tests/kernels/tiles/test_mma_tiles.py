from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from distmm_kernels.tiles.mma_tiles import LANES, MmaTiling, lane_place, tilings

GPUS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
LAYOUTS = list(itertools.product((False, True), repeat=2))
every_tiling = pytest.mark.parametrize(
    "tiling",
    [dataclasses.replace(x, along_k=layout) for gpu in ((8, 6), (9, 0)) for x in tilings(gpu) for layout in LAYOUTS],
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gpu", GPUS)
def test_tiles_fit_the_shared_memory_of_each_gpu(gpu, layout):
    most = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(gpu, 99) * 1024
    for tiling in tilings(gpu):
        tiling = dataclasses.replace(tiling, along_k=layout)
        assert tiling.shared_bytes <= most
        assert tiling.threads * tiling.blocks <= 1024


@every_tiling
@pytest.mark.parametrize("operand", [0, 1])
def test_the_threads_of_a_block_copy_every_element_of_a_tile_once(tiling, operand):
    taken = np.zeros(tiling.tile(operand), int)
    for thread, step, e in itertools.product(range(tiling.threads), tiling.copies(operand), range(tiling.vector)):
        line, vector = divmod(thread, tiling.lanes(operand))
        taken[line + step, vector * tiling.vector + e] += 1
    assert (taken == 1).all()


def test_the_lanes_of_a_warp_have_a_place_each():
    assert sorted(map(lane_place, range(32))) == list(itertools.product(*map(range, LANES)))


@every_tiling
@pytest.mark.parametrize("wide", [False, True])
def test_the_threads_of_a_warp_own_every_element_of_its_part_once(tiling, wide):
    width = tiling.vector if wide else 1
    owned = np.zeros((8 * tiling.thread_rows, 4 * tiling.thread_columns), int)
    for (row, column), (i, j) in itertools.product(map(lane_place, range(32)), tiling.outputs(width)):
        owned[2 * row + i, 4 * column + j : 4 * column + j + width] += 1
    assert (owned == 1).all()


def begins(tiling, operand, lane):
    """Where a lane begins to read, as the kernel has it."""
    (below, beside), (across, along) = lane_place(lane), tiling.steps(operand)
    return 2 * below * across + beside * along


@every_tiling
@pytest.mark.parametrize("operand", [0, 1])
def test_lanes_served_at_once_read_from_different_banks(tiling, operand):
    for _, place, count in tiling.loads(operand):
        at_once = 16 // count  # 128 bytes
        for first in range(0, 32, at_once):
            places = [begins(tiling, operand, lane) + place for lane in range(first, first + at_once)]
            assert all(at % count == 0 for at in places), "aligned"
            banks = {(at + e) % 16 for at in places for e in range(count)}
            assert len(banks) == 16, "32 banks of 4 bytes"


@every_tiling
def test_the_instructions_of_a_step_multiply_all_rows_of_a_warp_by_all_its_columns(tiling):
    rng = np.random.default_rng(0)
    rows, columns = 8 * tiling.thread_rows, 4 * tiling.thread_columns
    a, b = rng.integers(-9, 10, (rows, 4)), rng.integers(-9, 10, (4, columns))
    held = [[{}, {}] for _ in range(32)]  # registers of A and of B, by lane
    for lane, operand in itertools.product(range(32), (0, 1)):
        values = (a, b.T)[operand]
        for register, place, count in tiling.loads(operand):
            for e in range(count):
                line, column = divmod(begins(tiling, operand, lane) + place + e, tiling.pitch(operand))
                i, k = (line, column) if tiling.along_k[operand] else (column, line)
                held[lane][operand][register + e] = values[i, k]
    found = np.zeros((rows, columns), int)
    for registers in tiling.products():
        for place, value in instruction(registers, held):
            lane, element = place
            below, beside = lane_place(lane)
            i, j = divmod(element, tiling.thread_columns)
            found[2 * below + tiling.row_of(i), 4 * beside + tiling.column_of(j)] += value
    np.testing.assert_array_equal(found, a @ b)


def instruction(registers, held):
    """What `mma.sync.m8n8k4` and `m16n8k4` for float64 add to which register of which lane, by NVIDIA's layout."""
    height = 8 * len(registers.a)
    a, b = np.zeros((height, 4), int), np.zeros((4, 8), int)
    for lane in range(32):
        group, in_group = lane >> 2, lane & 3
        for i, register in enumerate(registers.a):
            a[group + 8 * i, in_group] = held[lane][0][register]
        b[in_group, group] = held[lane][1][registers.b]
    d = a @ b
    for lane, (i, register) in itertools.product(range(32), enumerate(registers.c)):
        yield (lane, register), d[(lane >> 2) + i // 2 * 8, 2 * (lane & 3) + i % 2]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 96}, "rows is 96, which must be a positive multiple of 64"),
        ({"depth": 12}, "depth is 12, which must be a positive multiple of 8"),
        ({"thread_columns": 2}, "thread_columns is 2, which must be a positive multiple of 4"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(MmaTiling(128, 128, 16, 3, 8, 8, 2), **change)
