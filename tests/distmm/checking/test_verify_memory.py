"""The memory that a check takes is bounded, whatever the size of blocks."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
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
from distmm.checking import thin_products
from distmm.checking.scaling import SPOILT
from distmm.errors import DeviceMemoryError
from distmm.worker import gpu
from tests.tables import number_of

MIB = 1 << 20


def peak_bytes(call: Callable[[], object]) -> int:
    """Peak of the bytes allocated during the call, by NumPy too."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", ["f4", "c8", ml_dtypes.bfloat16])
def test_a_block_is_multiplied_in_a_few_pieces_of_memory(dtype: str) -> None:
    block = np.random.default_rng(1).standard_normal((1500, 1500), "f4").astype(dtype)
    work = np.dtype("c16" if block.dtype.kind == "c" else "f8")
    panel, weights = np.ones((1500, 17), work), np.ones((1, 1500), np.int32)
    calls: list[Callable[[], object]] = [
        lambda: thin_products.times(block, panel, work),
        lambda: thin_products.times(block.T, panel, work, weights, abs(panel)),
        lambda: thin_products.largest(block, work),
    ]
    whole = block.size * work.itemsize  # at least 18 MB
    for call in calls:
        assert peak_bytes(call) < 6 * MIB < whole / 2.8


def test_a_check_needs_no_copies_of_the_blocks() -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((1200, 1200), "f4") for _ in range(2))
    blocks = [da.from_array(x, chunks=600) for x in (a, b, a @ b)]
    assert verify(*blocks).ok  # the first call imports and caches, which does not count
    with dask.config.set(scheduler="synchronous"):
        peak = peak_bytes(lambda: verify(*blocks))
    assert peak < 6 * MIB < 8 * 1200**2  # the float64 copy of one matrix takes 11.5 MB


@given(m=st.integers(0, 9), k=st.integers(0, 9), height=st.integers(1, 4), scale=st.sampled_from([1.0, 1e-200, 1e300]))
@settings(max_examples=number_of(40))
def test_pieces_and_parts_give_the_product_of_the_whole_block(m: int, k: int, height: int, scale: float) -> None:
    rng, work = np.random.default_rng(m + 10 * k), np.dtype("f8")
    block, panel = rng.standard_normal((m, k)), rng.standard_normal((k, 3))
    sizes = abs(panel[:, :2])
    kept = rng.random(k) < 0.7
    block[:, ~kept] = np.nan
    columns = rng.integers(-3, 3, (1, k)).astype(np.int32)
    columns[:, ~kept] = SPOILT
    wide = np.where(kept, block, 0) / 2.0 ** np.where(kept, columns, 0)
    half = k // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thin_products, "CPU_PIECE", 8 * height * max(1, k))
        parts = [
            thin_products.times(scale * block[:, at], panel[at], work, columns[:, at], sizes[at])
            for at in (slice(0, half), slice(half, k))
        ]
        found = thin_products.summed(parts)
        largest = thin_products.largest(block, work)
    factor = 2.0**found.exponents / scale if scale < 1 else 1 / (scale / 2.0**found.exponents)
    expected = wide @ panel, np.linalg.norm(wide, axis=1)[:, None], abs(wide) @ sizes
    for values, right in zip((found.values, found.norms, found.sizes), expected, strict=True):
        np.testing.assert_allclose(values * factor, right, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(largest, abs(block).max(axis=0, initial=0))


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
    monkeypatch.setattr(gpu, "namespace", lambda _: object())
    monkeypatch.setattr(gpu, "working", lambda _: nullcontext())
    monkeypatch.setattr(gpu, "PAUSES", (0.0, 0.0))


class OnGPU(np.ndarray):
    """An array with CuPy's method that copies it to the host."""

    def get(self) -> np.ndarray:
        return self.view(np.ndarray)


def test_a_block_for_which_the_gpu_has_no_room_is_checked_again(on_gpu: None) -> None:
    tries = []

    def work(xp: object) -> tuple[np.ndarray]:
        tries.append(xp)
        if len(tries) < 3:
            raise CUBLASError("CUBLAS_STATUS_ALLOC_FAILED")
        return (np.arange(3.0).view(OnGPU),)

    (found,) = thin_products.computed(np.ones((3, 4)), work)
    np.testing.assert_array_equal(found, np.arange(3.0))
    assert len(tries) == 3


def test_a_gpu_that_stays_full_ends_the_check_with_a_message_and_other_errors_end_it_at_once(on_gpu: None) -> None:
    tries = []

    def fails(error: Exception, xp: object) -> tuple[np.ndarray]:
        tries.append(error)
        raise error

    with pytest.raises(DeviceMemoryError, match=r"the check of a block, 3 x 4 float64, found no room \(CUBLAS_STATUS"):
        thin_products.computed(np.ones((3, 4)), partial(fails, CUBLASError("CUBLAS_STATUS_ALLOC_FAILED")))
    assert len(tries) == 3
    with pytest.raises(CUBLASError, match="EXECUTION_FAILED"):
        thin_products.computed(np.ones((3, 4)), partial(fails, CUBLASError("CUBLAS_STATUS_EXECUTION_FAILED")))
    assert len(tries) == 4
