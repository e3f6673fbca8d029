"""Index arithmetic of the Hopper kernels, apart from any device."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm_kernels.emulation.splits import PAST_THE_ROWS
from distmm_kernels.tiles.hopper_places import (
    box_place,
    mirrored_place,
    pairs_in_group,
    pairs_place,
    place,
    place_below,
    rows_in_pairs,
)
from distmm_kernels.tiles.hopper_tiles import (
    C_BOX_BYTES,
    GROUP,
    MOST_C_STAGES,
    MOST_STAGES,
    PACE,
    ROWS,
    SHARED_MEMORY,
    STAGES_OF_DEEP,
    UNPACED,
    HopperTile,
    box_columns,
)
from distmm_kernels.tiles.hopper_widths import best_columns, cost
from tests.tables import for_each

FLOATS = [
    HopperTile(operand, output, columns, a_major, b_major)
    for operand, output, columns, a_major, b_major in itertools.product(
        ("float16", "bfloat16"), ("float32", "float16", "bfloat16"), (64, 128, 192, 256), "km", "kn"
    )
]
OTHERS = [
    HopperTile(operand, output, columns, b_major="k")
    for operand, output, columns in itertools.product(("tfloat32",), ("float32", "float16"), (64, 128, 192, 256))
] + [
    HopperTile(operand, "int32", columns, b_major="k")
    for operand in ("int8", "uint8")
    for columns in (64, 128, 192, 256)
]
BYTES = [
    HopperTile(operand, output, columns, b_major="k")
    for operand, output in (("int8", "int8"), ("int8", "uint8"), ("uint8", "uint8"), ("uint8", "bool"))
    for columns in (128, 256)
]
THREE = [
    HopperTile("float16", "float32", columns, a_major, b_major, products=3, scaled=True, adds=adds)
    for columns, a_major, b_major, adds in itertools.product((64, 128, 192), "km", "kn", (False, True))
] + [HopperTile("tfloat32", "float32", columns, b_major="k", products=3) for columns in (64, 128, 192)]
DEEP = [
    HopperTile(operand, output, columns, b_major="k", promotes=True, adds=adds)
    for operand, output, columns, adds in itertools.product(
        ("bfloat16", "tfloat32"), ("float32", "float16"), (64, 128, 192), (False, True)
    )
] + [HopperTile("bfloat16", "float32", columns, sliced=True) for columns in (64, 128, 192, 256)]
FINISHED = [
    HopperTile("float16", "float32", columns, products=products, finishes=True, c0=c0, adds=adds)
    for columns, products, c0, adds in itertools.product(
        (64, 128, 192), (1, 3), (None, "float32", "float16", "bfloat16"), (False, True)
    )
] + [HopperTile("float16", "float16", finishes=True, c0=c0) for c0 in ("float32", "float16")]
PANELS = [
    HopperTile(operand, output, columns, b_major="k", promotes=output == "float32", adds=adds, panels=True)
    for operand, output, columns, adds in itertools.product(
        ("float16", "tfloat32", "bfloat16"), ("float32",), (64, 192), (False, True)
    )
] + [HopperTile("int8", "int32", columns, b_major="k", panels=True) for columns in (64, 256)]
FLOAT8 = [
    HopperTile("float8_e4m3fn", output, columns, b_major="k", promotes=True, b_operand=other, **more)
    for output, columns, other, more in itertools.product(
        ("float32", "bfloat16"), (64, 128, 192), (None, "float8_e5m2"), ({}, {"adds": True, "panels": True})
    )
] + [HopperTile("float8_e5m2", "float16", 128, b_major="k", promotes=True, scaled_blocks=True)]
TRIANGLES = [
    replace(tile, symmetric=True)
    for tile in FLOATS + OTHERS + BYTES + THREE + DEEP + FINISHED + PANELS + FLOAT8
    if tile.output not in ("uint8", "bool") and tile.b_operand is None
]
ALL = FLOATS + OTHERS + BYTES + THREE + DEEP + FINISHED + PANELS + FLOAT8 + TRIANGLES


@for_each(ALL)
def test_tiles_fit_in_shared_memory_and_have_as_many_stages_as_they_may(tile):
    most = STAGES_OF_DEEP if tile.promotes and tile.columns == 192 and not tile.float8 else MOST_STAGES
    assert 2 <= tile.stages <= most
    assert tile.shared_bytes <= SHARED_MEMORY
    assert tile.stages == most or tile.shared_bytes + tile.stage_bytes > SHARED_MEMORY
    assert tile.stage_bytes % 1024 == tile.a_bytes % 1024 == tile.b_bytes % 1024 == 0, "the swizzle repeats every 1024"
    assert tile.depth % tile.instruction_depth == 0
    load, multiply = tile.registers
    assert load + 2 * multiply <= 3 * 168, "what 384 threads are launched with"


@for_each(ALL)
def test_boxes_of_a_tile_use_their_buffers_in_turn(tile):
    boxes = tile.columns // box_columns(tile.output)
    assert boxes * box_columns(tile.output) == tile.columns
    assert boxes * (2 if tile.symmetric and tile.output != "int8" else 1) % tile.slots == 0
    assert 1 <= tile.slots <= (3 if tile.promotes and tile.columns == 192 else 2)


@for_each(ALL)
def test_a_tile_of_c_comes_in_few_stages(tile):
    boxes, together = tile.boxes(tile.accumulator)
    assert boxes * box_columns(tile.accumulator) == tile.columns
    assert together * C_BOX_BYTES <= tile.stage_bytes
    assert 0 < boxes <= MOST_C_STAGES * together


@for_each([tile for tile in ALL if tile.c0])
def test_a_tile_of_c0_comes_in_few_stages(tile):
    boxes, together = tile.boxes(tile.c0)
    assert boxes * box_columns(tile.c0) == tile.columns
    assert box_columns(tile.c0) * (4 if tile.c0 == "float32" else 2) == 128
    assert together * C_BOX_BYTES <= tile.stage_bytes
    assert 0 < boxes <= MOST_C_STAGES * together


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"c0": "float32"}, "multiplied by alpha"),
        ({"finishes": True, "sliced": True}, "multiplied by alpha"),
        ({"operand": "int8", "output": "int32", "b_major": "k", "finishes": True}, "multiplied by alpha"),
        ({"panels": True}, "added to the totals after each"),
        ({"panels": True, "sliced": True, "promotes": False}, "added to the totals after each"),
        ({"panels": True, "products": 3, "columns": 128}, "added to the totals after each"),
        ({"columns": 320}, "320 columns"),
        ({"columns": 100}, "100 columns"),
        ({"columns": 256, "products": 3}, "256 columns"),
        ({"columns": 256, "promotes": True}, "256 columns"),
        ({"columns": 192, "products": 3, "promotes": True}, "added to the totals each stage"),
        ({"operand": "int8", "output": "int32", "columns": 192, "b_major": "k", "promotes": True}, "are exact"),
        ({"operand": "int8", "b_major": "k"}, "int8 to float32"),
        ({"output": "int32"}, "float16 to int32"),
        ({"operand": "tfloat32"}, "contiguous along k"),
        ({"operand": "int8", "output": "int32", "a_major": "m", "b_major": "k"}, "contiguous along k"),
        ({"sliced": True, "adds": True}, "added to C and to each other later"),
        ({"sliced": True, "promotes": True, "columns": 192}, "added to C and to each other later"),
        ({"sliced": True, "output": "float16"}, "sums of the accumulator's type"),
        ({"output": "int8"}, "float16 to int8"),
        ({"operand": "uint8", "output": "int8", "b_major": "k"}, "uint8 to int8"),
        ({"operand": "int8", "output": "int8", "b_major": "k", "adds": True}, "without a C"),
        ({"operand": "int8", "output": "int8", "b_major": "k", "columns": 192}, "boxes of 128 columns"),
        ({"operand": "uint8", "output": "bool", "b_major": "k", "columns": 192}, "boxes of 128 columns"),
        ({"operand": "uint8", "output": "bool", "b_major": "k", "adds": True}, "without a C"),
        ({"operand": "int8", "output": "bool", "b_major": "k"}, "int8 to bool"),
        ({"operand": "int8", "output": "uint8", "b_major": "k", "symmetric": True}, "a symmetric D has 16 or 32 bits"),
        ({"output": "float16", "products": 3, "columns": 192, "symmetric": True}, "a symmetric D has 16 or 32 bits"),
        ({"operand": "float8_e4m3fn", "b_major": "k", "columns": 192}, "after each stage"),
        ({"operand": "float8_e4m3fn", "promotes": True, "columns": 192}, "contiguous along k"),
        ({"b_operand": "float8_e5m2"}, "only 8-bit floats"),
        (
            {
                "operand": "float8_e5m2",
                "b_major": "k",
                "promotes": True,
                "columns": 192,
                "scaled_blocks": True,
            },
            "64 up to 128",
        ),
    ],
)
def test_tiles_that_the_hardware_cannot_do_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        HopperTile(**{"operand": "float16", "output": "float32", **arguments})


@given(high=st.integers(1, 70), wide=st.integers(1, 70), group=st.integers(1, 20))
def test_every_tile_has_one_number(high, wide, group):
    sizes = [np.uint32(size) for size in (high, wide, group)]
    places = [tuple(map(int, place(np.uint32(tile), *sizes))) for tile in range(high * wide)]
    assert sorted(places) == list(itertools.product(range(high), range(wide)))


@given(
    rows=st.integers(1, 5000),
    columns=st.sampled_from([64, 128, 192, 256]),
    above=st.integers(0, 30),
    kind=st.sampled_from(["whole", "part", "complex"]),
)
def test_every_tile_on_and_below_the_diagonal_of_a_symmetric_product_has_one_number(rows, columns, above, kind):
    """A last part of the product has the columns of all parts before it, and begins at a row of tiles.

    A tile of a complex product, given as real numbers, has half as many columns.
    """
    above, columns = above * ROWS if kind == "part" else 0, columns // 2 if kind == "complex" else columns
    high, across = -(-rows // ROWS), -(-(above + rows) // columns)
    grid = rows_in_pairs(high, columns, above)
    sizes = [*map(np.uint32, grid), pairs_in_group(np.uint32(grid[0]))]
    numbers = [np.uint32(number) for number in (high, columns, above)]
    found = [
        tuple(map(int, place_below(*place(np.uint32(tile), *sizes), *numbers))) for tile in range(grid[0] * grid[1])
    ]
    needed = {
        (i, j) for i in range(high) for j in range(across) if above + min(rows, (i + 1) * ROWS) - 1 >= j * columns
    }
    assert needed <= set(found)
    assert len(found) <= len(needed) + grid[1] + 2 * high
    twice = {each for each in set(found) if found.count(each) > 1}
    assert len(twice) <= 1
    assert not twice & needed  # two blocks would add to the same C
    # the epilogue reads this many factors beyond the last one
    beyond = max((j + 1) * columns for i, j in found) - above - rows
    assert (2 * beyond if kind == "complex" else beyond) <= (PAST_THE_ROWS if kind == "complex" else 255)
    assert all(0 <= i < high and j >= 0 for i, j in found)


def test_tiles_run_down_a_group_of_rows_before_the_next_column():
    wide, high = np.uint32(5), np.uint32(3 * GROUP)
    first = [place(np.uint32(tile), high, wide, np.uint32(GROUP)) for tile in range(2 * GROUP)]
    assert first == [(row, column) for column in range(2) for row in range(GROUP)]


@given(m=st.integers(1, 10**5), n=st.integers(1, 10**5), batch=st.integers(1, 5), products=st.sampled_from([1, 3]))
def test_the_chosen_width_is_legal_and_wastes_no_more_than_the_narrowest(m, n, batch, products):
    columns = best_columns(m, n, batch, products, 132)
    HopperTile("float16", "float32", columns, products=products)

    def rounds(columns):
        return -(-(-(-m // ROWS) * batch * -(-n // columns)) // 132) * columns

    assert rounds(columns) <= rounds(64) / 0.6


def test_the_number_of_stages_between_waits_is_a_power_of_two():
    """Blocks test the low bits of the number of stages that they have loaded, and count from the first wait on."""
    assert PACE.bit_count() == 1
    assert UNPACED % PACE == 0


def test_a_product_of_few_tiles_has_narrow_ones_and_a_large_one_wide_ones():
    assert best_columns(512, 512, 1, 1, 132) == 64
    assert best_columns(4096, 4096, 1, 3, 132) == 128, "eight rounds, where 192 columns take six of half as much again"
    assert best_columns(8192, 8192, 1, 3, 132) == 192
    assert best_columns(16384, 16384, 1, 1, 132) == 256
    assert best_columns(16384, 16384, 1, 1, 132, widest=192) == 192


def test_a_symmetric_product_has_tiles_that_fill_its_rounds():
    assert best_columns(4096, 4096, 1, 1, 132, symmetric=True) == 128, "528 tiles are four rounds"
    assert best_columns(4096, 4096, 10, 1, 132, symmetric=True) == 256, "in many rounds wide tiles are faster"
    assert best_columns(8192, 8192, 1, 1, 132, symmetric=True) == 256, "1056 tiles are eight"


def test_a_complex_product_given_as_real_numbers_takes_twice_the_time_of_a_real_one():
    for columns in (64, 128, 192):
        ratio = cost(8192, 16384, 1, 3, 132, columns, symmetric=2) / cost(8192, 8192, 1, 3, 132, columns, symmetric=1)
        assert 1.9 < ratio < 2.1


@pytest.mark.parametrize("output", ["float32", "int32", "float16", "bfloat16"])
def test_the_mirror_image_of_a_warpgroups_boxes_is_four_boxes_of_rows(output):
    itemsize = 4 if output.endswith("32") else 2
    columns, find = 128 // itemsize, mirrored_place(output)
    boxes = np.full((4, 2048), -1)  # of each warp, by byte

    def element(row, column):
        return 64 * column + row  # of the 64 rows and the columns of a box

    def put(warp, at, row, column):
        for byte in range(itemsize):
            assert boxes[warp, at + byte] == -1
            boxes[warp, at + byte] = element(row, column)

    for warp, lane in itertools.product(range(4), range(32)):
        first, at, permuted = (int(each) for each in find(np.uint32(warp), np.uint32(lane)))
        if itemsize == 4:  # as the epilogue's _put_mirrored_words
            for j, lower, second in itertools.product(range(4), (0, 1), (0, 1)):
                to = at + (j % 2 * 8 + second) * 128 + (permuted ^ 16 * second + 32 * lower)
                row, column = 16 * warp + lane // 4 + 8 * lower, 8 * j + 2 * (lane % 4) + second
                put(first + j // 2 * 2, to, row, column)
        else:  # as _put_mirrored_halves: the lane has the address of a row of one of four 8 x 8 matrices
            for j, e in itertools.product(range(4), range(8)):
                matrix, line = divmod(lane, 8)
                row, column = 16 * warp + 8 * (matrix % 2) + e, 16 * j + 8 * (matrix // 2) + line
                put(first + j, at + permuted + 2 * e, row, column)
    for warp in range(4):
        down, across = divmod(warp, 2) if itemsize == 4 else (warp, 0)
        for row, column in itertools.product(range(16), range(columns)):
            found = boxes[warp, swizzled(row, column * itemsize)]
            assert found == element(columns * across + column, 16 * down + row)


def swizzled(row: int, byte: int) -> int:
    """Where the accelerator looks for a byte of a row of 128 bytes, in a box that begins at a multiple of 1024."""
    address = row * 128 + byte
    return address ^ (address >> 7 & 7) << 4


def test_lanes_write_words_of_c_where_the_accelerator_looks_for_them():
    lane_place, seen = box_place("float32"), {}
    for lane, j, below in itertools.product(range(32), range(4), range(2)):
        start, permuted = map(int, lane_place(np.uint32(lane)))
        address = start + (permuted ^ 32 * j) + 8 * 128 * below
        row, column = lane // 4 + 8 * below, 8 * j + lane % 4 * 2  # the layout of wgmma's accumulators
        assert address == swizzled(row, 4 * column)
        seen[address] = row, column
    assert len(seen) == 16 * 32 // 2


@pytest.mark.parametrize("output", ["int8", "uint8", "bool"])
def test_lanes_write_pairs_of_bytes_where_the_accelerator_looks_for_them(output):
    lane_place, seen = box_place(output), set()
    for lane, j, below in itertools.product(range(32), range(16), range(2)):
        start, permuted = map(int, lane_place(np.uint32(lane)))
        address = start + (permuted ^ 16 * (j // 2)) + 8 * (j % 2) + 8 * 128 * below  # as epilogue.py's _put_bytes
        assert address == swizzled(lane // 4 + 8 * below, 8 * j + lane % 4 * 2)
        seen.add(address)
    assert seen == set(range(0, 16 * 128, 2))


def test_lanes_read_pairs_of_halves_where_the_accelerator_puts_them():
    seen = {}
    for lane, j, below in itertools.product(range(32), range(8), range(2)):
        start, permuted = map(int, pairs_place(np.uint32(lane)))
        address = start + (permuted ^ 16 * j) + 8 * 128 * below  # as epilogue.py's _quads
        row, column = lane // 4 + 8 * below, 8 * j + lane % 4 * 2
        assert address == swizzled(row, 2 * column)
        seen[address] = row, column
    assert len(seen) == 16 * 64 // 2


def test_a_warp_reads_pairs_of_halves_from_32_banks():
    starts = [tuple(map(int, pairs_place(np.uint32(lane)))) for lane in range(32)]
    for j in range(8):
        assert len({(start + (permuted ^ 16 * j)) // 4 % 32 for start, permuted in starts}) == 32


def test_lanes_name_rows_of_halves_where_the_accelerator_looks_for_them():
    lane_place, seen = box_place("bfloat16"), set()
    for lane, j in itertools.product(range(32), range(4)):
        start, permuted = map(int, lane_place(np.uint32(lane)))
        address = start + (permuted ^ 32 * j)
        matrix, row = lane // 8, lane % 8  # stmatrix: lanes 8 i to 8 i + 7 name the rows of matrix i
        # registers 0 and 1 hold 8 columns of rows 0 to 7 and 8 to 15, registers 2 and 3 the next 8 columns
        assert address == swizzled(row + 8 * (matrix % 2), 2 * (16 * j + 8 * (matrix // 2)))
        seen.add(address)
    assert seen == {16 * unit for unit in range(16 * 8)}
