from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm_kernels.tiles.fragment_tiles import EDGE, ITEMSIZE, FragmentTiling, tilings, tilings_of_halves
from distmm_kernels.tiles.mma_tiles import lane_place
from tests.tables import number_of

GPUS = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}  # KB of shared memory a block
LAYOUTS = list(itertools.product((False, True), repeat=2))


@st.composite
def any_tiling(draw):
    """Tilings of one to eight warps, for elements of 1, 2 or 4 bytes."""
    itemsize = draw(st.sampled_from((1, 2, 4)))
    warps = draw(st.sampled_from(((1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4))))
    part = draw(st.sampled_from((16, 32, 64))), draw(st.sampled_from((16, 32, 64, 128)))
    vector = 16 // itemsize
    sizes = warps[0] * part[0], warps[1] * part[1], draw(st.sampled_from((4, 8))) * vector
    along_k = draw(st.sampled_from(LAYOUTS)) if itemsize == 2 else (True, True)
    try:
        return FragmentTiling(*sizes, draw(st.integers(2, 4)), part[0] // 8, part[1] // 4, vector, 1, along_k)
    except ValueError:  # too few threads for a row of the tile, which its own message says
        return FragmentTiling(2 * part[0], 2 * part[1], 4 * vector, 3, part[0] // 8, part[1] // 4, vector, 1)


def lines(tiling, operand):
    """First rows of A, or columns of B, of the warps."""
    return range(0, (tiling.rows, tiling.columns)[operand], tiling.part[operand])


def placed(tiling, operand):
    """A tile's elements as copies lay them out: number ``row * pitch + column`` of the tile at its place."""
    rows, pitch = tiling.tile(operand)[0], tiling.pitch(operand)
    place, memory = tiling.vector_place(operand), np.full(rows * pitch, -1)
    for thread, step in itertools.product(range(tiling.threads), tiling.copies(operand)):
        row, number = divmod(thread, tiling.lanes(operand))
        first = int(place(row, number)) + step * pitch  # as the kernel adds it
        assert (memory[first : first + tiling.vector] == -1).all(), "two vectors at one place"
        memory[first : first + tiling.vector] = (row + step) * pitch + number * tiling.vector + np.arange(tiling.vector)
    return memory


@given(any_tiling(), st.sampled_from((0, 1)))
@settings(max_examples=number_of(60), deadline=None)
def test_copies_fill_a_tile_once_and_those_of_8_lanes_go_to_different_banks(tiling, operand):
    memory = placed(tiling, operand)
    assert sorted(memory) == list(range(len(memory)))
    place = tiling.vector_place(operand)
    for first in range(0, tiling.threads, 8):
        rows = (divmod(thread, tiling.lanes(operand)) for thread in range(first, first + 8))
        assert len({int(place(*row)) // tiling.vector % 8 for row in rows}) == 8


@given(any_tiling(), st.sampled_from((0, 1)))
@settings(max_examples=number_of(60), deadline=None)
def test_the_8_rows_of_each_matrix_of_an_ldmatrix_lie_in_different_banks(tiling, operand):
    begin = tiling.first_read(operand)
    for line, step in itertools.product(lines(tiling, operand), range(tiling.depth // tiling.step)):
        for _, flipped, offset in tiling.fragments(operand, step):
            places = [(int(begin(line, *lane_place(lane))) ^ flipped) + offset for lane in range(32)]
            assert all(place % tiling.vector == 0 for place in places), "aligned to 16 bytes"
            for matrix in range(4):
                rows = places[8 * matrix : 8 * matrix + 8]
                assert len({place // tiling.vector % 8 for place in rows}) == 8


def ldmatrix(tiling, operand, memory, line, fragment):
    """What one ldmatrix gives: (register, lane) to the elements in that register, by NVIDIA's description."""
    _, flipped, offset = fragment
    begin, each = tiling.first_read(operand), 4 // tiling.itemsize
    places = [(int(begin(line, *lane_place(lane))) ^ flipped) + offset for lane in range(32)]
    found = {}
    for matrix, lane in itertools.product(range(4), range(32)):
        rows = [memory[place : place + tiling.vector] for place in places[8 * matrix : 8 * matrix + 8]]
        if tiling.along_k[operand]:
            found[matrix, lane] = rows[lane // 4][each * (lane % 4) : each * (lane % 4 + 1)]
        else:
            found[matrix, lane] = [rows[2 * (lane % 4) + e][lane // 4] for e in (0, 1)]
    return found


@given(any_tiling())
@settings(max_examples=25, deadline=None)
def test_a_warp_multiplies_its_rows_by_its_columns(tiling):
    """Registers hold what `mma.sync` wants, by the tables of its fragments, and each element of C is added to once."""
    each = 4 // tiling.itemsize
    memories = [placed(tiling, operand) for operand in (0, 1)]
    step = tiling.depth // tiling.step - 1

    def where(operand, number):
        row, column = divmod(int(number), tiling.pitch(operand))
        return (row, column) if tiling.along_k[operand] else (column, row)  # row of A or column of B, and k

    starts = [lines(tiling, operand)[-1] for operand in (0, 1)]
    held = [{}, {}]
    for operand in (0, 1):
        for fragment in tiling.fragments(operand, step):
            for (matrix, lane), elements in ldmatrix(
                tiling, operand, memories[operand], starts[operand], fragment
            ).items():
                held[operand][fragment.register + matrix, lane] = [where(operand, x) for x in elements]
    added = set()
    products = [product for number in range(tiling.part[1] // EDGE) for product in tiling.products(number)]
    assert len(products) == tiling.part[0] // 16 * (tiling.part[1] // 8)
    for a, b, c in products:
        for lane, register in itertools.product(range(32), range(4)):
            row, column = register // 2 * 8 + lane // 4, 2 * (lane % 4) + register % 2  # of the instruction's D
            i, j = divmod(c[register], tiling.thread_columns)
            mine = lane_place(lane)
            of_c = starts[0] + mine[0] + tiling.offset(0, i), starts[1] + 2 * mine[1] + tiling.offset(1, j)
            assert of_c not in added
            added.add(of_c)
            for half, q, e in itertools.product((0, 1), range(4), range(each)):
                k = step * tiling.step + half * tiling.vector + q * each + e
                left = held[0][a[2 * half + row // 8], row % 8 * 4 + q][e]
                right = held[1][b[half], column * 4 + q][e]
                assert (left, right) == ((of_c[0], k), (of_c[1], k))
    assert len(added) == tiling.part[0] * tiling.part[1]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("operand", ITEMSIZE)
def test_tiles_fit_the_shared_memory_of_each_gpu(operand, gpu):
    layouts = LAYOUTS if ITEMSIZE[operand] == 2 else [(True, True)]
    makers = (tilings,) if operand == "int8" else (tilings, tilings_of_halves)
    for tiling in itertools.chain(*(make(operand, gpu, along_k) for along_k in layouts for make in makers)):
        assert tiling.blocks * (tiling.shared_bytes + 1024) <= (GPUS[gpu] + 1) * 1024
        assert tiling.threads * tiling.blocks <= 1024


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((128, 96, 32, 3, 8, 12, 8, 1), "a warp has 48 columns, which must be a power of two from 16 on"),
        ((128, 128, 64, 3, 8, 8, 16, 1, (True, False)), "ldmatrix transposes elements of 2 bytes, these have 1"),
        ((128, 128, 24, 3, 8, 8, 8, 1), "depth is 24, which must be a positive multiple of 32"),
        ((32, 32, 32, 3, 4, 8, 8, 1, (True, False)), None),
        ((16, 16, 64, 3, 2, 4, 8, 1), "a thread copies"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes, reason):
    if reason is None:
        assert FragmentTiling(*sizes).threads == 32
    else:
        with pytest.raises(ValueError, match=reason):
            FragmentTiling(*sizes)
