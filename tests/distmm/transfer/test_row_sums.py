"""Row sums: the words of each row times fixed odd numbers, modulo 2**64, the same on every device."""

from __future__ import annotations

import numpy as np
import pytest

from distmm.transfer.row_sums import row_sums


def test_row_sums_are_sums_of_words_times_odd_numbers() -> None:
    block = np.random.default_rng(0).integers(0, 2**16, (700, 1004), dtype="u2")  # more than one piece
    odd = [int(x) | 1 for x in np.random.default_rng(0).integers(0, 2**64, 251, dtype=np.uint64)]
    for row in (0, 699):
        words = map(int, block[row].view("u8"))
        assert int(row_sums(block)[row]) == sum(w * x for w, x in zip(words, odd, strict=True)) % 2**64
    assert row_sums(np.zeros((3, 5), "i1")).tolist() == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["i1", "f2", "bfloat16", "f4", "f8", "c16"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (700, 1004), (2, 100_003), (5000, 4096)])
def test_a_gpu_computes_the_same_row_sums(dtype: str, shape: tuple[int, int]) -> None:
    import cupy

    block = np.random.default_rng(0).integers(-100, 100, shape).astype(np.dtype(dtype))
    for turn in (lambda x: x, np.asfortranarray, lambda x: x[::2]):
        there = cupy.asarray(turn(block)) if turn is not np.asfortranarray else cupy.asfortranarray(cupy.asarray(block))
        np.testing.assert_array_equal(row_sums(there).get(), row_sums(np.ascontiguousarray(turn(block))))
