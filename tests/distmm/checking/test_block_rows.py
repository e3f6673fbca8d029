"""A pass over a matrix: what it finds does not depend on the chunks, and each block has one task."""

from __future__ import annotations

from collections import Counter
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from dask.callbacks import Callback
from dask.utils import key_split
from hypothesis import given, settings
from hypothesis import strategies as st

import distmm
from distmm.checking import block_rows
from distmm.checking.block_rows import Pass, Sampled, whole
from distmm.errors import InputError
from tests.tables import number_of

M, N, VECTORS = 40, 37, 3
WORK = np.dtype(np.float64)


def cut(edges: list[int], length: int) -> tuple[int, ...]:
    """Cut a length at these places."""
    ends = sorted({0, length, *(edge % length for edge in edges)})
    return tuple(np.diff(ends).tolist())


@settings(max_examples=number_of(40))
@given(
    st.lists(st.integers(0, M), max_size=4),
    st.lists(st.integers(0, N), max_size=36),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_what_is_found_does_not_depend_on_the_chunks(
    down: list[int], across: list[int], weighted: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    block, panel = rng.standard_normal((M, N), "f4"), rng.standard_normal((N, VECTORS + 1))
    rows, columns = (np.sort(rng.choice(size, 5, replace=False)) for size in block.shape)
    by = rng.integers(-3, 3, N).astype(np.int32) if weighted else None
    matrix = da.from_array(block, (cut(down, M), cut(across, N)))
    asked = Pass("A", WORK, VECTORS, WORK, Sampled(rows, columns))
    (parts,) = dask.compute(asked.over(matrix, panel, by), scheduler="synchronous")
    found = whole(parts)
    divided = block.astype(WORK) / (1.0 if by is None else 2.0**by)
    sums = found.sums.at(0)
    np.testing.assert_allclose(sums.values, divided @ panel[:, :VECTORS], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(sums.norms[:, 0], np.linalg.norm(divided, axis=1), rtol=1e-12)
    np.testing.assert_allclose(sums.sizes, abs(divided) @ panel[:, VECTORS:], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(found.largest, abs(block).max(axis=0))
    np.testing.assert_array_equal(found.sampled, block[rows][:, columns])


@pytest.mark.parametrize("sampled", [Sampled(np.array([2, 19])), Sampled(None, np.array([0, 30]))])
def test_whole_rows_and_columns_are_sampled(sampled: Sampled) -> None:
    block = np.arange(M * N, dtype="f4").reshape(M, N)
    lazy = Pass("A", WORK, VECTORS, None, sampled).over(da.from_array(block, 7), np.ones((N, VECTORS)))
    (parts,) = dask.compute(lazy, scheduler="synchronous")
    rows, columns = sampled.rows, sampled.columns
    expected = block[rows] if columns is None else block[:, columns]
    np.testing.assert_array_equal(whole(parts).sampled, expected)


def tasks_of_check(united: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Count the tasks of a check of matrices of 8 x 8 blocks of 256 bytes each."""
    monkeypatch.setattr(block_rows, "UNITED_BYTES", united)
    tasks: Counter[str] = Counter()

    class Counted(Callback):  # type: ignore[misc]
        def _pretask(self, key: Any, dsk: Any, state: Any) -> None:
            tasks[key_split(key)] += 1

    blocked = da.ones((64, 64), dtype="f4", chunks=8)
    with Counted(), dask.config.set(scheduler="synchronous"):
        assert distmm.verify(blocked, blocked, da.full((64, 64), 64, dtype="f4", chunks=8))
    assert tasks.total() < tasks["distmm-block-rows"] + 3 * 64 + 50  # 3 * 64: tasks that make blocks
    return tasks["distmm-block-rows"]


@pytest.mark.parametrize(("united", "groups"), [(256, 8), (3 * 256, 3)])
def test_a_check_has_one_task_for_each_large_block_and_for_neighbours_of_small_ones(
    monkeypatch: pytest.MonkeyPatch, united: int, groups: int
) -> None:
    assert tasks_of_check(united, monkeypatch) == 3 * 8 * (groups + 1)


def test_a_pass_over_a_transpose_reads_the_blocks_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_rows, "UNITED_BYTES", 2 * 7 * 7 * 4)
    block, panel = np.random.default_rng(0).standard_normal((M, N), "f4"), np.ones((M, VECTORS))
    asked = Pass("A", WORK, VECTORS, WORK, Sampled(np.array([2, 19]), np.array([0, 30])))
    (parts,) = dask.compute(asked.over(da.from_array(block, 7), panel, form="transpose"), scheduler="synchronous")
    found = whole(parts)
    np.testing.assert_allclose(found.sums.at(0).values, block.T.astype(WORK) @ panel, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(found.largest, abs(block).max(axis=1))
    np.testing.assert_array_equal(found.sampled, block.T[[2, 19]][:, [0, 30]])


def test_blocks_that_differ_from_their_array_are_refused() -> None:
    a, wrong = np.ones((8, 8)), da.ones((8, 8), chunks=4).map_blocks(lambda block: block[:1], chunks=((4, 4), (4, 4)))
    for operands in ((wrong, a, a), (a, wrong, a), (a, a, wrong)):
        with pytest.raises(InputError, match=r"a block of [ABC] is a ndarray of shape \(1, 4\), and its array says"):
            distmm.verify(*operands)
