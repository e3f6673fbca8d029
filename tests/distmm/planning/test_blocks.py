from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm.errors import InputError
from distmm.planning.blocks import Blocking, Wave, even_edges, slices
from distmm.planning.owners import Grid
from distmm.planning.problem import Problem, accumulator_dtype, operand_batch

sizes = st.integers(0, 500)
edges = st.integers(1, 64)


@given(sizes, edges)
def test_blocks_cover_a_dimension_once_and_in_order(size: int, edge: int) -> None:
    cut = even_edges(size, edge)
    covered = [x for s in slices(cut) for x in range(s.start, s.stop)]
    assert covered == list(range(size))
    assert all(e == edge for e in cut[:-1])


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 100), st.integers(0, 100), st.integers(0, 5))
def test_every_block_has_one_owner_in_the_grid(rows: int, columns: int, i: int, j: int, batch: int) -> None:
    grid = Grid(rows, columns)
    assert 0 <= grid.owner(i, j, (batch,)) < grid.size
    assert grid.owner(i, j) == grid.owner(i + rows, j) == grid.owner(i, j + columns)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 50), st.integers(0, 50), st.integers(0, 3))
def test_a_block_that_is_made_again_has_another_owner(rows: int, columns: int, i: int, j: int, shift: int) -> None:
    before, after = (Grid(rows, columns, shift=s).owner(i, j) for s in (shift, shift + 1))
    assert before != after
    assert max(before, after) < max(rows * columns, 2)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 50), st.integers(0, 50))
def test_a_block_of_a_meets_only_one_row_of_workers(rows: int, columns: int, i: int, p: int) -> None:
    grid = Grid(rows, columns)
    consumers = {grid.owner(i, j) for j in range(3 * columns)}
    assert len(consumers) == columns
    assert grid.owner(i, p) in consumers


@given(st.lists(edges, min_size=1, max_size=20), st.integers(1, 30))
def test_steps_take_every_panel_once_in_ascending_k(k: list[int], panels: int) -> None:
    blocking = Blocking((1,), tuple(k), (1,), panels=panels)
    assert [p for step in blocking.parts()[0] for p in step] == list(range(len(k)))


def test_kinds_of_waves_stand_for_all_waves() -> None:
    for triangle in (False, True):
        m, n = ((3, 3, 2, 3, 3, 2, 1), (4,) * 9) if not triangle else ((3, 3, 2, 3, 3, 2, 1),) * 2
        blocking = Blocking(m, (5,), n, ((2, 2, 1), (1, 1)), triangle=triangle)
        for cuts in ((1, 1, 1), (2, 3, 3), (3, 7, 7)):
            counted = Counter[object]()
            for wave in blocking.waves(cuts, (1, 1)):
                counted[_edges(blocking, wave)] += 1
            kinds = blocking.kinds_of_waves(cuts, (1, 1))
            assert {_edges(blocking, wave): count for wave, count in kinds} == counted


@pytest.mark.parametrize("triangle", [False, True])
def test_kinds_of_waves_are_counted_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch, triangle: bool) -> None:
    monkeypatch.delattr(Blocking, "waves")
    blocking = Blocking((1,) * 3000, (1,), (1,) * 3000, triangle=triangle)
    counts = [count for _, count in blocking.kinds_of_waves((1, 3000, 3000), (1, 1))]
    assert counts == ([3000, 3000 * 2999 // 2] if triangle else [3000**2])


def _edges(blocking: Blocking, wave: Wave) -> tuple[object, ...]:
    cuts = zip((blocking.batch[0], blocking.m, blocking.n), (wave.batches, wave.rows, wave.columns), strict=True)
    (batch, batches), *others = cuts
    inner = len(blocking.batch[1])
    first = batch[batches.start // inner : batches.stop // inner]
    return (wave.triangle, first, *(edges[at.start : at.stop] for edges, at in others))


@pytest.mark.parametrize("workers", [1, 2, 6, 7, 64, 4096])
def test_grids_use_every_worker(workers: int) -> None:
    grids = Grid.all_of(workers)
    assert grids
    assert all(grid.size == workers for grid in grids)


@pytest.mark.parametrize(
    ("dtype", "accumulator"),
    [
        ("f2", "f4"),
        ("f4", "f4"),
        ("f8", "f8"),
        ("i1", "i4"),
        ("u4", "i4"),
        ("u8", "i8"),
        ("?", "i8"),
        ("c8", "c8"),
        (">f8", "f8"),
    ],
)
def test_accumulators_lose_no_bits_of_the_result(dtype: str, accumulator: str) -> None:
    assert accumulator_dtype(np.dtype(dtype)) == np.dtype(accumulator)


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "M8[s]", "m8[s]", "V8", "longdouble"])
def test_types_without_a_product_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(InputError, match="cast"):
        accumulator_dtype(np.dtype(dtype))


def test_accumulator_rule_is_that_of_the_kernels() -> None:
    from distmm_kernels.config import compute_dtype

    for char in "?bBhHiIlLqQefdFD":
        assert accumulator_dtype(np.dtype(char)) == compute_dtype(np.dtype(char))


def test_batches_that_do_not_broadcast_are_refused_with_both_shapes() -> None:
    with pytest.raises(InputError, match=r"\(2,\).*\(3,\)"):
        Problem(1, 1, 1, np.dtype("f4"), (2,), (3,))


def test_a_broadcast_operand_has_only_block_zero() -> None:
    assert operand_batch((4, 5), (1, 7)) == (0, 5)
    assert operand_batch((4, 5), (7,)) == (5,)
    assert operand_batch((4, 5), ()) == ()
