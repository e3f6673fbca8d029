"""The memory that a check takes is bounded, whatever the size of blocks."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import distmm
from distmm import verify
from distmm.checking import freivalds, row_slices
from distmm.checking.scaling import SPOILT
from distmm.errors import DeviceMemoryError
from distmm.worker import gpu

MIB = 1 << 20


def peak_bytes(call: Callable[[], object]) -> int:
    """Peak of the bytes allocated during the call, by NumPy too."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_slices, "SLICE", MIB)


@pytest.mark.parametrize("dtype", ["f4", "c8", ml_dtypes.bfloat16])
def test_a_block_is_multiplied_in_a_few_slices_of_memory(small_slices: None, dtype: str) -> None:
    block = np.random.default_rng(1).standard_normal((1500, 1500), "f4").astype(dtype)
    work = np.dtype("c16" if block.dtype.kind == "c" else "f8")
    panel = np.ones((1500, 17), work)
    lines = np.ones((2, 1500), work)
    exponents = np.ones(1500, np.int32)
    calls: list[Callable[[], object]] = [
        lambda: row_slices.across(block, panel, None, None, work=work, power=2),
        lambda: row_slices.across(block, panel, exponents, exponents, work=work, power=1),
        lambda: row_slices.down(block, lines, None, work=work),
        lambda: row_slices.largest(block, work=work, axis=1),
        lambda: row_slices.finite(block, work=work, axis=1),
    ]
    whole = block.size * work.itemsize  # at least 18 MB
    for call in calls:
        assert peak_bytes(call) < 6 * MIB < whole / 2.8


def test_a_check_needs_no_copies_of_the_blocks(small_slices: None) -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((1200, 1200), "f4") for _ in range(2))
    blocks = [da.from_array(x, chunks=600) for x in (a, b, a @ b)]
    assert verify(*blocks).ok  # the first call imports and caches, which does not count
    with dask.config.set(scheduler="synchronous"):
        peak = peak_bytes(lambda: verify(*blocks))
    assert peak < 6 * MIB < 8 * 1200**2  # the float64 copy of one matrix takes 11.5 MB


@given(m=st.integers(0, 9), k=st.integers(0, 9), height=st.integers(1, 4), power=st.sampled_from([0, 1, 2]))
@settings(max_examples=40)
def test_slices_give_the_product_of_the_whole_block(m: int, k: int, height: int, power: int) -> None:
    rng = np.random.default_rng(m + 10 * k)
    block, panel = rng.standard_normal((m, k), "f4"), rng.standard_normal((k, 3))
    kept = rng.random(k) < 0.7
    block[:, ~kept] = np.nan
    rows, columns = (rng.integers(-3, 3, size).astype(np.int32) for size in (m, k))
    columns[~kept] = SPOILT
    wide = np.where(kept, block, 0).astype("f8") / 2.0 ** np.where(kept, columns, 0)
    both = wide / 2.0 ** rows[:, None]
    expected = both @ panel
    if power:
        expected[:, -1] = np.abs(both) ** power @ panel[:, -1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_slices, "SLICE", 8 * height * max(1, k))
        found = row_slices.across(block, panel, rows, columns, work=np.dtype("f8"), power=power)
        lines = rng.standard_normal((2, m))
        below = row_slices.down(block, lines, columns, work=np.dtype("f8"))
        finite = [row_slices.finite(block, work=np.dtype("f8"), axis=axis)[0] for axis in (0, 1)]
        largest = [row_slices.largest(block, work=np.dtype("f8"), axis=axis)[0] for axis in (0, 1)]
    np.testing.assert_allclose(found[0], expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(below[0], [lines[0] @ wide, lines[1] @ np.abs(wide)], rtol=1e-12, atol=1e-12)
    for axis in (0, 1):
        np.testing.assert_array_equal(finite[axis], np.isfinite(block).any(axis=1 - axis))
        np.testing.assert_array_equal(largest[axis], abs(block).max(axis=1 - axis, initial=0))


def test_numpy_arrays_are_checked_where_they_lie(client: Client) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal((700, 700), "f4") for _ in range(2))
    c = distmm.empty((700, 700), "f4")
    np.matmul(a, b, out=c)
    with client.as_current():
        # Arrays sent with the graph would lie in the scheduler's memory too, 2 MB each.
        assert verify(a, b.T, c, transb=True).ok
        c[650, 3] += 1
        verdict = verify(a, b, c)
    assert not verdict.ok
    assert "[650, 3]" in verdict.message


class CUBLASError(RuntimeError):
    """As CuPy raises it."""


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy blocks count as blocks in GPU memory."""
    monkeypatch.setattr(freivalds, "namespace", lambda _: object())
    monkeypatch.setattr(gpu, "PAUSES", (0.0, 0.0))


def test_a_block_for_which_the_gpu_has_no_room_is_checked_again(on_gpu: None) -> None:
    tries = []

    def across(block: np.ndarray, panel: np.ndarray) -> np.ndarray:
        tries.append(block.shape)
        if len(tries) < 3:
            raise CUBLASError("CUBLAS_STATUS_ALLOC_FAILED")
        return block @ panel

    block, panel = np.arange(12.0).reshape(3, 4), np.ones((4, 2))
    np.testing.assert_array_equal(freivalds._retried(across, block, panel), block @ panel)
    assert tries == [(3, 4)] * 3


def test_a_gpu_that_stays_full_ends_the_check_with_a_message_and_other_errors_end_it_at_once(on_gpu: None) -> None:
    tries = []

    def fails(error: Exception, block: np.ndarray) -> None:
        tries.append(error)
        raise error

    with pytest.raises(DeviceMemoryError, match=r"the check of a block, 3 x 4 float64, found no room \(CUBLAS_STATUS"):
        freivalds._retried(partial(fails, CUBLASError("CUBLAS_STATUS_ALLOC_FAILED")), np.ones((3, 4)))
    assert len(tries) == 3
    with pytest.raises(CUBLASError, match="EXECUTION_FAILED"):
        freivalds._retried(partial(fails, CUBLASError("CUBLAS_STATUS_EXECUTION_FAILED")), np.ones((3, 4)))
    assert len(tries) == 4
