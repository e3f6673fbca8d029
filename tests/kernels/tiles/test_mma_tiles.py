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
        owned[2 * row + i, 2 * column + j : 2 * column + j + width] += 1
    assert (owned == 1).all()


def loads(tiling, operand):
    return [each for number in range(tiling.fragments[operand]) for each in tiling.loads(operand, number)]


def begins(tiling, operand, lane):
    """Where a lane begins to read, as the kernel has it."""
    (below, beside), (across, along) = lane_place(lane), tiling.steps(operand)
    return (2, 1)[operand] * below * across + beside * along


@every_tiling
@pytest.mark.parametrize("operand", [0, 1])
def test_lanes_served_at_once_read_from_different_banks(tiling, operand):
    for _, place, count in loads(tiling, operand):
        at_once = 16 // count  # 128 bytes
        for first in range(0, 32, at_once):
            places = [begins(tiling, operand, lane) + place for lane in range(first, first + at_once)]
            assert all(at % count == 0 for at in places), "aligned"
            banks = {(at + e) % 16 for at in places for e in range(count)}
            assert len(banks) == 16, "32 banks of 4 bytes"


@every_tiling
def test_a_fragment_of_b_is_loaded_into_registers_of_its_own_and_so_is_one_of_a(tiling):
    for operand in (0, 1):
        taken = sorted(register + e for register, _, count in loads(tiling, operand) for e in range(count))
        lines = (tiling.thread_rows, tiling.thread_columns // 2)[operand]
        assert taken == list(range(lines * tiling.step // 4))
    assert tiling.operands == (tiling.thread_rows + tiling.thread_columns // 2) * tiling.step // 4


@every_tiling
def test_the_instructions_of_a_step_multiply_all_rows_of_a_warp_by_all_its_columns(tiling):
    rng = np.random.default_rng(0)
    rows, columns, steps = 8 * tiling.thread_rows, 4 * tiling.thread_columns, tiling.step
    a, b = rng.integers(-9, 10, (rows, steps)), rng.integers(-9, 10, (steps, columns))
    held = [[{}, {}] for _ in range(32)]  # registers of A and of B, by lane
    for lane, operand in itertools.product(range(32), (0, 1)):
        values = (a, b.T)[operand]
        for register, place, count in loads(tiling, operand):
            for e in range(count):
                line, column = divmod(begins(tiling, operand, lane) + place + e, tiling.pitch(operand))
                i, k = (line, column) if tiling.along_k[operand] else (column, line)
                held[lane][operand][register + e] = values[i, k]
    found = np.zeros((rows, columns), int)
    for i, j in np.ndindex(tiling.fragments):
        for registers in tiling.products(i, j):
            for place, value in instruction(registers, held):
                lane, element = place
                below, beside = lane_place(lane)
                row, column = divmod(element, tiling.thread_columns)
                found[2 * below + tiling.offset(0, row), 2 * beside + tiling.offset(1, column)] += value
    np.testing.assert_array_equal(found, a @ b)


def instruction(registers, held):
    """What a float64 `mma.sync` adds to which register of which lane, by the layouts in NVIDIA's PTX manual."""
    height, fours = len(registers.a) // len(registers.b), len(registers.b)
    a, b = np.zeros((8 * height, 4 * fours), int), np.zeros((4 * fours, 8), int)
    for lane in range(32):
        group, in_group = lane >> 2, lane & 3
        for i, register in enumerate(registers.a):
            a[group + i % height * 8, i // height * 4 + in_group] = held[lane][0][register]
        for i, register in enumerate(registers.b):
            b[4 * i + in_group, group] = held[lane][1][register]
    d = a @ b
    for lane, (i, register) in itertools.product(range(32), enumerate(registers.c)):
        yield (lane, register), d[(lane >> 2) + i // 2 * 8, 2 * (lane & 3) + i % 2]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 96}, "rows is 96, which must be a positive multiple of 64"),
        ({"depth": 12, "instruction": (16, 8)}, "depth is 12, which must be a positive multiple of 8"),
        ({"thread_columns": 1}, "thread_columns is 1, which must be a positive multiple of 2"),
        ({"early": 4}, "early is 4, which must be less than 4 fragments"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(MmaTiling(128, 128, 16, 3, 8, 8, 2), **change)
